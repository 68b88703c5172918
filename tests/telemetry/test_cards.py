"""Cards are found without CUDA and named by UUID; those that are not there are refused in one sentence."""

import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import psutil
import pynvml
import pytest

from entente.telemetry import cards as module
from entente.telemetry.cards import (
    VARIABLE,
    Card,
    check_visible,
    plan_cards,
    take_cards,
    torch_cuda,
    unusable_cards,
    visible_cards,
)
from entente.telemetry.errors import InputError
from tests.telemetry.fake_nvml import GIB, FakeCard, FakeNvml

TWO_SLICES = (FakeCard(uuid="MIG-aa11", total=20 * GIB, free=19 * GIB), FakeCard(uuid="MIG-bb22", total=20 * GIB, free=20 * GIB))
FOUR = FakeNvml(
    cards=(
        FakeCard(uuid="GPU-1111", name="NVIDIA A100", free=70 * GIB),
        FakeCard(uuid="GPU-2222"),
        FakeCard(uuid="GPU-2233", old=True),
        FakeCard(uuid="GPU-4444", slices=TWO_SLICES),
    )
)


def seen(visible: str | None, nvml: FakeNvml = FOUR) -> list[str]:
    return [card.uuid for card in visible_cards(nvml, environ={} if visible is None else {VARIABLE: visible})]


def test_the_stand_in_has_only_names_of_the_real_module():
    names = [name for name in dir(FakeNvml()) if name.lower().startswith("nvml")]
    assert len(names) > 12 and [name for name in names if not hasattr(pynvml, name)] == []


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        pytest.param(None, ["GPU-1111", "GPU-2222", "GPU-2233", "MIG-aa11", "MIG-bb22"], id="not set: all, in PCI order"),
        pytest.param("1,0", ["GPU-2222", "GPU-1111"], id="numbers, in their order"),
        pytest.param("GPU-1", ["GPU-1111"], id="its beginning"),
        pytest.param("MIG-bb22, 0", ["MIG-bb22", "GPU-1111"], id="a slice"),
        pytest.param("0,-1,1", ["GPU-1111"], id="what follows -1 is hidden"),
        pytest.param("GPU-22", [], id="a beginning of two"),
        pytest.param("", [], id="empty"),
    ],
)
def test_cuda_s_variable_says_which_cards_there_are_and_in_which_order(visible: str | None, expected: list[str]):
    assert seen(visible) == expected


def test_a_card_has_the_figures_of_its_own_handle():
    first, _, _, piece, _ = visible_cards(FOUR, environ={})
    assert first == Card(
        uuid="GPU-1111", index=0, name="NVIDIA A100", total=80 * GIB, free=70 * GIB, driver="580.65.06", mig=False
    )  # fmt: skip
    assert (piece.mig, piece.index, piece.total, piece.free) == (True, 3, 20 * GIB, 19 * GIB), "not those of the whole card"
    assert FOUR.opened == 0, "NVML is closed again"


ANSWERS = [f"nvmlDeviceGet{what}" for what in ("HandleByIndex", "UUID", "Name", "MemoryInfo", "MigMode")]


@pytest.mark.parametrize("number", [pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_UNKNOWN])
@pytest.mark.parametrize("answer", ANSWERS)
def test_what_a_card_or_slice_does_not_answer_never_hides_another(answer: str, number: int):
    odd, piece = (FakeCard(uuid=uuid, errors={answer: number}) for uuid in ("GPU-odd", "MIG-odd"))
    nvml = FakeNvml(cards=(FakeCard(uuid="GPU-0"), odd, FakeCard(uuid="GPU-2", slices=(piece, *TWO_SLICES))))
    found, lost = seen(None, nvml), unusable_cards(nvml)
    assert [uuid for uuid in found if "odd" not in uuid] == ["GPU-0", "MIG-aa11", "MIG-bb22"]
    assert ("GPU-odd" in found) != any(sentence.startswith("card 1 cannot be used (") for sentence in lost), (
        "never without a word"
    )
    assert nvml.opened == 0
    if "GPU-odd" not in found:
        with pytest.raises(InputError, match="names '1', which is no card"):
            check_visible(nvml, environ={VARIABLE: "1"})


NO_MEMORY = {"nvmlDeviceGetMemoryInfo": pynvml.NVML_ERROR_NOT_SUPPORTED}


@pytest.mark.parametrize("card", [{"total": 0, "free": 0}, {"errors": NO_MEMORY}])
def test_a_card_without_a_memory_of_its_own_has_the_machine_s(card: dict):
    (found,) = visible_cards(FakeNvml(cards=[FakeCard(uuid="GPU-1", name="NVIDIA GB10", **card)]), environ={})
    assert found.total == psutil.virtual_memory().total and 0 < found.free <= found.total


def test_a_machine_without_a_driver_has_no_cards():
    assert visible_cards(FakeNvml(has_driver=False), environ={VARIABLE: "0"}) == ()
    check_visible(FakeNvml(has_driver=False), environ={VARIABLE: "7"})


@pytest.mark.parametrize("visible", ["0,7", "GPU-9999"])
def test_a_variable_that_names_no_card_is_refused_with_the_cards_there_are(visible: str):
    with pytest.raises(InputError, match=rf"names '{visible.split(',')[-1]}', which is no card .*0 GPU-1111.*3 MIG-aa11.*unset"):
        check_visible(FOUR, environ={VARIABLE: visible})


def test_what_a_process_gave_away_it_still_counts_and_its_children_do_not(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "_original", [])
    monkeypatch.setenv(VARIABLE, "0,1")
    both = visible_cards(FOUR)
    for card in (both[1], both[0]):
        take_cards([card])
        assert module.os.environ[VARIABLE] == card.uuid, "what children see"
        assert visible_cards(FOUR) == both
    take_cards(())
    assert module.os.environ[VARIABLE] == both[0].uuid, "an engine on the CPU changes nothing"


def planned(count: int, **wanted) -> tuple[list[int], list[int], bool]:
    cards = [card(uuid=f"GPU-{place}", index=place) for place in range(count)]
    plan = plan_cards(cards, **wanted)
    return [each.index for each in plan.engine], [each.index for each in plan.trainer], plan.shared


def card(**values) -> Card:
    first = {"uuid": "GPU-0", "index": 0, "name": "H100", "total": 80 * GIB, "free": 80 * GIB, "driver": "535.104", "mig": False}
    return Card(**(first | values))


@pytest.mark.parametrize(
    ("count", "wanted", "expected"),
    [
        pytest.param(0, {"engine": (), "processes": 1}, ([], [], False), id="no card"),
        pytest.param(1, {"engine": (), "processes": 1}, ([0], [0], True), id="one card is shared"),
        pytest.param(2, {"engine": (), "processes": 1}, ([0], [1], False), id="the trainer takes the free one"),
        pytest.param(4, {"engine": (), "tensor_parallel": 2, "processes": 1}, ([0, 1], [2], False), id="two for the engine"),
        pytest.param(4, {"engine": (1,), "processes": 3}, ([1], [0, 2, 3], False), id="a card for each process"),
        pytest.param(2, {"engine": None, "processes": 1}, ([], [0], False), id="servers elsewhere"),
    ],
)
def test_engine_and_trainer_take_different_cards_where_there_are_enough(count: int, wanted: dict, expected: tuple):
    assert planned(count, **wanted) == expected


@pytest.mark.parametrize(
    ("wanted", "sentence"),
    [
        ({"engine": (2,)}, r"inference.cards asks for card 2, but this process sees 2 cards, counted from 0"),
        ({"engine": (), "tensor_parallel": 4}, r"inference.tensor_parallel asks for card 2, but this process sees 2 cards"),
        ({"engine": (), "processes": 3}, r"training.processes 3 need a card each, but 2 of the 2 visible cards are theirs"),
    ],
)
def test_cards_that_are_not_there_are_refused_by_the_setting_that_asks(wanted: dict, sentence: str):
    with pytest.raises(InputError, match=sentence):
        planned(2, **wanted)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("cuda: Optional[str] = '13.0'\nhip: Optional[str] = '9.1'", (13, 0)), ("cuda: Optional[str] = None", None)],
)
def test_torch_s_cuda_is_read_from_its_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str, expected):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "version.py").write_text(f"__version__ = '2.13.0'\n{text}\n")
    monkeypatch.setattr(metadata, "distribution", lambda name: SimpleNamespace(locate_file=tmp_path.joinpath))
    assert torch_cuda() == expected


@pytest.mark.gpu
@pytest.mark.skipif(not Path("/dev/nvidia0").exists(), reason="no NVIDIA GPU here")
def test_a_real_card_is_seen_by_torch_under_its_uuid():
    found = visible_cards()
    assert found and all(0 < card.free <= card.total for card in found)
    program = "import torch; print(torch.cuda.device_count(), torch.cuda.get_device_properties(0).uuid)"
    environment = {**module.os.environ, VARIABLE: found[-1].uuid}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.split() == ["1", found[-1].uuid.removeprefix("GPU-")]


@pytest.mark.parametrize(
    ("cuda", "driver", "sentence"),
    [
        ((13, 0), "550.54.15", "needs NVIDIA driver 580 or newer, and this machine has 550.54.15"),
        ((12, 6), "470.1", "needs NVIDIA driver 525"),
        (None, "580.159", "built for the CPU"),
        ((13, 0), "580.82.07", ""),
        ((12, 6), "550.54.15", ""),
        ((13, 0), "unknown", ""),
    ],
)
def test_a_driver_that_torch_cannot_use_is_named(cuda: tuple[int, int] | None, driver: str, sentence: str):
    problem = module.driver_problem(driver, cuda)
    assert (problem is None) is (not sentence) and sentence in (problem or ("", ""))[0]
