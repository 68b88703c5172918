"""Figures of the machine: memory as the kernel counts it, and of GPUs nothing at all where there is none."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from entente.telemetry.cards import VARIABLE, visible_cards
from entente.telemetry.devices import LARGEST_FILE, GpuSampler, append_line, read_device
from entente.telemetry.metrics import check
from storage.run_sql import ask, connect
from storage.run_views import VIEWS
from storage.runs import RunPaths
from tests.telemetry.fake_nvml import FakeCard, FakeNvml
from tests.waiting import wait_until


class Cards:
    """Two GPUs behind `pynvml`'s own constants."""

    def __init__(self) -> None:
        self.old = SimpleNamespace(gpu=20, memory=5, used=30 << 20, total=40 << 20, milliwatts=100_000)
        self.new = SimpleNamespace(gpu=90, memory=40, used=10 << 20, total=80 << 20, milliwatts=250_500)

    def install(self, patch: pytest.MonkeyPatch) -> None:
        FakeNvml(cards=[FakeCard(uuid="GPU-old"), FakeCard(uuid="GPU-new")]).install(patch.setattr)
        patch.delenv(VARIABLE, raising=False)
        answers: dict[str, Callable[..., Any]] = {
            "nvmlDeviceGetHandleByUUID": {"GPU-old": self.old, "GPU-new": self.new}.__getitem__,
            "nvmlDeviceGetUtilizationRates": lambda card: card,
            "nvmlDeviceGetPowerUsage": lambda card: card.milliwatts,
            "nvmlDeviceGetClockInfo": lambda card, kind: {pynvml.NVML_CLOCK_SM: 1500}[kind],
            "nvmlDeviceGetTemperature": lambda card, sensor: {pynvml.NVML_TEMPERATURE_GPU: 60}[sensor],
        }
        for name, answer in answers.items():
            assert hasattr(pynvml, name)
            patch.setattr(pynvml, name, answer)
        memory = pynvml.nvmlDeviceGetMemoryInfo  # the cards' own, while they are found
        patch.setattr(pynvml, "nvmlDeviceGetMemoryInfo", lambda card: card if hasattr(card, "used") else memory(card))


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch) -> Cards:
    """The two GPUs."""
    two = Cards()
    two.install(monkeypatch)
    return two


def test_without_a_gpu_there_are_no_figures_no_error_and_one_sentence(said: list[str], monkeypatch: pytest.MonkeyPatch):
    def absent() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", absent)
    with GpuSampler(0.01) as sampler:
        assert sampler.sample() == sampler.sample() == {}
    assert said == ["no GPU metrics: NVML Shared Library Not Found"]


def test_of_several_gpus_the_busiest_the_fullest_and_the_power_of_all_are_told(cards: Cards):
    first = GpuSampler().sample()
    check(first)
    assert first == {
        "gpu/utilisation": 0.9, "gpu/utilisation_mean": 0.55, "gpu/memory_share": 0.75, "gpu/memory_used_mib": 40,
        "gpu/memory_busy_share": 0.4, "gpu/power_w": 350.5, "gpu/sm_clock_mhz": 1500, "gpu/temperature_c": 60, "gpu/readings": 1,
    }  # fmt: skip


def test_readings_are_taken_on_the_beat_folded_over_the_step_and_kept_for_sql(cards: Cards, tmp_path: Path):
    paths = RunPaths(tmp_path / "run").create()
    with GpuSampler(0.01, paths.devices) as sampler:
        wait_until(paths.devices.is_file)
        cards.new.gpu, cards.new.milliwatts = 10, 50_500
        read = len(paths.devices.read_text().splitlines())
        wait_until(lambda: len(paths.devices.read_text().splitlines()) >= read + 6)  # two more readings after that, of two cards
        figures = sampler.sample()
        check(figures)
        assert 0.1 < figures["gpu/utilisation"] < 0.9, "a mean over the readings, not the last"
        assert figures["gpu/readings"] >= 3 and 150.5 < figures["gpu/power_w"] < 350.5
    lines = [json.loads(line) for line in paths.devices.read_text().splitlines()]
    assert {line["device"] for line in lines} == {"GPU-old", "GPU-new"} and len(lines) >= 6
    assert [line["utilisation"] for line in lines if line["device"] == "GPU-new"][-1] == 0.1
    answer = ask(
        connect(paths.root), "SELECT device, max(value) AS most FROM devices WHERE name = 'power_w' GROUP BY ALL ORDER BY 1"
    )
    assert answer.to_pylist() == [{"device": "GPU-new", "most": 250.5}, {"device": "GPU-old", "most": 100.0}]


def test_only_the_cards_that_a_run_takes_are_read(cards: Cards, monkeypatch: pytest.MonkeyPatch):
    _, new = visible_cards()
    assert GpuSampler(cards=[new, new]).sample()["gpu/power_w"] == 250.5, "engine and trainer on one card are one device"
    monkeypatch.setenv(VARIABLE, "0")
    assert GpuSampler().sample()["gpu/power_w"] == 100.0, "what CUDA does not see is not read"


@pytest.mark.parametrize("answer", ["nvmlDeviceGetHandleByUUID", "nvmlDeviceGetHandleByIndex", "nvmlDeviceGetUUID"])
def test_a_card_that_is_lost_takes_no_other_from_the_figures_and_is_named(
    answer: str, said: list[str], monkeypatch: pytest.MonkeyPatch
):
    lost = FakeCard(uuid="GPU-1", errors={answer: pynvml.NVML_ERROR_GPU_IS_LOST})
    FakeNvml(cards=[lost, FakeCard(uuid="GPU-2", total=8 << 30, free=6 << 30)]).install(monkeypatch.setattr)
    monkeypatch.delenv(VARIABLE, raising=False)
    figures = GpuSampler().sample()
    assert (figures["gpu/memory_share"], figures["gpu/memory_used_mib"]) == (0.25, 2048.0)
    (sentence,) = said
    assert sentence.startswith("card 0 ") and "lost" in sentence


def test_a_slice_has_the_memory_of_its_own_handle(monkeypatch: pytest.MonkeyPatch):
    piece = FakeCard(uuid="MIG-1", total=20 << 30, free=5 << 30)
    FakeNvml(cards=[FakeCard(uuid="GPU-1", slices=[piece])]).install(monkeypatch.setattr)

    def refuse(*_: object) -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    for name in ("GetUtilizationRates", "GetPowerUsage", "GetClockInfo", "GetTemperature"):
        monkeypatch.setattr(pynvml, f"nvmlDevice{name}", refuse)
    assert read_device(piece) == {"memory_share": 0.75, "memory_used_mib": 15 * 1024.0}


def test_the_file_of_readings_is_bounded(tmp_path: Path):
    file = tmp_path / "devices.jsonl"
    for number in range(200):
        append_line(file, json.dumps({"number": number}), largest=500)
    sizes = {each.name: each.stat().st_size for each in tmp_path.iterdir()}
    assert set(sizes) == {"devices.jsonl", "devices.before.jsonl"} and max(sizes.values()) < 600
    assert json.loads(file.read_text().splitlines()[-1]) == {"number": 199}
    assert f"the newest {LARGEST_FILE >> 20} to {LARGEST_FILE >> 19} MiB" in VIEWS["devices"]


@pytest.mark.gpu
@pytest.mark.skipif(not Path("/dev/nvidia0").exists(), reason="no NVIDIA GPU here")
def test_a_real_gpu_gives_figures_that_can_be():
    figures = GpuSampler().sample()
    check(figures)
    assert 0 <= figures["gpu/utilisation"] <= 1 and 0 < figures["gpu/memory_share"] <= 1 and figures["gpu/power_w"] > 0
