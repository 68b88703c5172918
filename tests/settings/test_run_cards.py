"""Engine and trainer of a run take the cards that the settings name, or the run is refused before anything starts."""

import pytest

from entente.inference import engine_cards
from entente.settings import find_model as module
from entente.settings.find_model import check_room, run_cards
from entente.settings.layers import layered_settings
from entente.settings.run_settings import RunSettings
from entente.telemetry import cards
from entente.telemetry.errors import InputError
from tests.inference.fake_vllm import fake_vllm
from tests.telemetry.fake_nvml import GIB, FakeCard, FakeNvml


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    """Two cards, and packages built for CUDA."""
    two = FakeNvml(cards=[FakeCard(uuid="GPU-0"), FakeCard(uuid="GPU-1", total=24 * GIB, free=23 * GIB)])
    two.install(monkeypatch.setattr)
    monkeypatch.setattr(engine_cards, "find_vllm", lambda: fake_vllm("cuda"))
    for each in (engine_cards, module):
        monkeypatch.setattr(each, "torch_cuda", lambda: (13, 0))
    monkeypatch.setattr(cards, "_original", [])
    monkeypatch.delenv(cards.VARIABLE, raising=False)
    return two


def settings(**changed: dict) -> RunSettings:
    return layered_settings("laptop", (), changed)


def taken(**changed: dict) -> tuple[list[str], list[str], bool]:
    plan = run_cards(settings(**changed))
    return [card.uuid for card in plan.engine], [card.uuid for card in plan.trainer], plan.shared


def test_engine_and_trainer_take_a_card_each_if_there_are_two(machine: FakeNvml, monkeypatch: pytest.MonkeyPatch):
    assert taken() == (["GPU-0"], ["GPU-1"], False)
    assert taken(inference={"cards": [1]}) == (["GPU-1"], ["GPU-0"], False)
    assert taken(training={"device": "cpu"}) == (["GPU-0"], [], False)
    assert taken(inference={"urls": ["http://elsewhere:8100"]}) == ([], ["GPU-0"], False)
    assert run_cards(settings(), trains=False).trainer == ()
    monkeypatch.setenv(cards.VARIABLE, "GPU-1")
    assert taken() == (["GPU-1"], ["GPU-1"], True)


def test_a_run_on_the_cpu_takes_none_and_looks_at_none(machine: FakeNvml, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(engine_cards, "find_vllm", lambda: fake_vllm("cpu"))
    for each in (engine_cards, module):
        monkeypatch.setattr(each, "torch_cuda", lambda: None)
    monkeypatch.setenv(cards.VARIABLE, "7")
    assert taken() == ([], [], False)
    assert machine.asked == []


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"attention": "flex", "device": "cpu"}, r"flex', .* and the trainer computes on the CPU: set"),
        ({"visible": "3"}, r"CUDA_VISIBLE_DEVICES names '3', which is no card of this machine"),
        ({"visible": "", "device": "cuda"}, r"training.device is 'cuda' but torch has no GPU here"),
    ],
)
def test_a_card_that_the_run_cannot_use_is_refused_before_anything_starts(
    machine: FakeNvml, monkeypatch: pytest.MonkeyPatch, changed: dict, sentence: str
):
    if "visible" in changed:
        monkeypatch.setenv(cards.VARIABLE, changed["visible"])
    training = {name: value for name, value in changed.items() if name != "visible"}
    with pytest.raises(InputError, match=sentence):
        check_room(settings(training=training), trains=True)
