"""The engine is the one that the setting means, its cards are chosen without CUDA, and each refusal is one sentence."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from entente.inference import engine_cards as module
from entente.inference import torch_engine
from entente.inference.choose_engine import engine_here
from entente.inference.engine_cards import engine_cards, has_cuda
from entente.inference.settings import InferenceSettings
from entente.telemetry import cards
from entente.telemetry.errors import InputError
from tests.inference.fake_vllm import fake_vllm
from tests.telemetry.fake_nvml import FakeCard, FakeNvml

ROOT = Path(__file__).resolve().parent.parent.parent
Build = Callable[..., None]


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch) -> Build:
    """Makes this a machine with `count` cards and packages of these builds."""

    def make(count: int = 2, *, vllm: str | None = "cuda", torch: tuple[int, int] | None = (13, 0), visible: str | None = None):
        FakeNvml(cards=[FakeCard(uuid=f"GPU-{place}") for place in range(count)]).install(monkeypatch.setattr)
        found = fake_vllm(vllm) if vllm else None
        for name in (module.__name__, "entente.inference.server_arguments"):
            monkeypatch.setattr(f"{name}.find_vllm", lambda: found)
        monkeypatch.setattr(module, "torch_cuda", lambda: torch)
        monkeypatch.setattr(cards, "_original", [])
        monkeypatch.delenv(cards.VARIABLE, raising=False)
        if visible is not None:
            monkeypatch.setenv(cards.VARIABLE, visible)

    return make


def chosen(**settings: object) -> list[str]:
    return [card.uuid for card in engine_cards(InferenceSettings.model_validate(settings))]


def refusal(**settings: object) -> str:
    with pytest.raises(InputError) as caught:
        chosen(**settings)
    return str(caught.value)


def test_an_engine_takes_the_cards_that_it_names_else_the_first(build: Build):
    build(4)
    assert chosen() == ["GPU-0"]
    assert chosen(cards=[2]) == ["GPU-2"]
    assert chosen(tensor_parallel=2) == ["GPU-0", "GPU-1"]
    assert chosen(tensor_parallel=2, cards=[3, 1]) == ["GPU-3", "GPU-1"]
    build(4, visible="2,3")
    assert chosen(cards=[1]) == ["GPU-3"], "counted among the visible ones"
    build(4, visible="")
    assert chosen() == []


def test_an_engine_on_the_cpu_takes_no_card(build: Build):
    build(2, vllm="cpu", torch=None)
    assert chosen() == [] and chosen(urls=["http://elsewhere:8100"], cards=[9]) == []
    build(2, vllm=None, torch=None)
    assert chosen() == []
    build(2, vllm=None)
    assert chosen() == ["GPU-0"], "the torch engine"


@pytest.mark.parametrize(
    ("here", "settings", "sentence"),
    [
        pytest.param(
            {}, {"engine": "torch", "tensor_parallel": 2},
            "inference.tensor_parallel 2 needs vLLM, but the engine is torch here: set inference.engine to 'vllm'", id="torch",
        ),
        pytest.param(
            {"vllm": "cpu", "torch": None}, {"tensor_parallel": 2},
            "inference.tensor_parallel 2 needs GPUs, but the engine computes on the CPU here: install the build for CUDA (`make "
            "setup` on a machine with a card), or remove it", id="CPU build",
        ),
        pytest.param({"count": 0}, {"cards": [0]}, "make a card visible (nvidia-smi must list it", id="no card"),
        pytest.param({"visible": "5"}, {}, "CUDA_VISIBLE_DEVICES names '5', which is no card of this", id="names nothing"),
    ],
)  # fmt: skip
def test_an_engine_that_cannot_have_its_cards_is_refused_with_the_cure(build: Build, here: dict, settings: dict, sentence: str):
    build(**here)
    assert sentence in refusal(**settings)


@pytest.mark.parametrize(
    ("version", "here", "expected"),
    [
        ("2.13.0+cpu", {"torch": None}, False),
        ("2.13.0", {}, True),
        ("2.13.0", {"visible": ""}, False),
        ("2.13.0+rocm6", {"count": 0, "torch": None}, True),
    ],
)
def test_a_gpu_is_known_without_torch(build: Build, monkeypatch: pytest.MonkeyPatch, version: str, here: dict, expected: bool):
    build(**here)
    monkeypatch.setattr(module, "metadata", SimpleNamespace(version=lambda name: version))
    assert has_cuda() == expected


def test_choosing_an_engine_and_planning_its_memory_calls_no_cuda_and_imports_no_torch(tmp_path: Path):
    """Whoever initialises CUDA in the flow's process keeps vLLM from its cards; `is_available` alone does already."""
    program = """
import sys
from entente.inference.choose_engine import choose_engine, engine_here
from entente.inference.host import EngineHost
from entente.inference.settings import InferenceSettings
from entente.settings.find_model import check_room
from entente.settings.layers import layered_settings
engine_here(InferenceSettings())
check_room(layered_settings("laptop"), trains=True)
print([name for name in ("torch", "vllm") if name in sys.modules])
import torch
def touched(*_):
    raise AssertionError("CUDA was touched")
for name in ("is_available", "device_count", "_lazy_init", "current_device"):
    setattr(torch.cuda, name, touched)
engine_here(InferenceSettings())
check_room(layered_settings("laptop"), trains=True)
print(torch.cuda.is_initialized())
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.splitlines() == ["[]", "False"], done.stderr


def test_the_torch_engine_takes_its_card_before_it_asks_for_a_device(
    build: Build, model: Path, host, monkeypatch: pytest.MonkeyPatch
):
    build(3)
    monkeypatch.setattr(os, "environ", environment := dict(os.environ))
    seen: list[str] = []

    def device() -> None:
        seen.append(environment[cards.VARIABLE])
        raise RuntimeError("enough")

    monkeypatch.setattr(torch_engine, "best_device", device)
    engine = torch_engine.TorchEngine(model, InferenceSettings(engine="torch", cards=(1,)))
    with pytest.raises(Exception, match="enough"):
        host.submit(engine.start()).result(timeout=30)
    assert seen == ["GPU-1"]


@pytest.mark.parametrize(
    ("wanted", "vllm", "cards", "kind", "reason"),
    [
        ("auto", "cuda", 0, "torch", "on a GPU only"),
        ("auto", "cpu", 1, "torch", "on a GPU only"),
        ("auto", "cuda", 1, "vllm", "this machine has a GPU"),
        ("auto", None, 1, "torch", "no vLLM is installed"),
        ("torch", "cuda", 1, "torch", "inference.engine is 'torch'"),
        ("vllm", "cpu", 0, "vllm", "inference.engine is 'vllm'"),
    ],
)
def test_the_setting_and_what_is_there_decide(build: Build, wanted, vllm, cards: int, kind: str, reason: str):
    build(cards, vllm=vllm)
    chosen, sentence = engine_here(InferenceSettings(engine=wanted))
    assert chosen == kind and reason in sentence


def test_vllm_that_is_asked_for_and_missing_is_refused_with_the_cure(build: Build):
    build(vllm=None)
    with pytest.raises(
        InputError, match=r"the engine is vLLM, but there is no .*: `make setup-vllm` .*; or set inference.engine to"
    ):
        engine_here(InferenceSettings(engine="vllm"))
