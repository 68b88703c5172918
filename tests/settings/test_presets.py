"""The presets for one card: engine and trainer fit on it, by the memory plan, and not on a card with a quarter less."""

from pathlib import Path

import pytest

from entente.inference.memory_plan import GIB, Machine, ModelShape, check_memory, plan_memory
from entente.settings.find_model import token_budget, trainer_bytes, trainer_gpu_bytes
from entente.settings.layers import layered_settings
from entente.settings.run_settings import RunSettings
from entente.telemetry.cards import Card, CardPlan
from entente.telemetry.errors import InputError
from entente.training.settings import usual_rate

CONTEXTS = 2 * GIB
"""Room for what two processes hold beside their tensors; an engine that is started again needs its share free beside them."""

ACTIVATIONS = 2 * GIB
"""What an engine takes of its share beside weights and cache, by rule of thumb."""
UNSHARED = 300
"""Tokens of a request that it shares with no other: board, power and orders."""


def shape_of(family: str, layers: int, hidden: int, inner: int, heads: int, keys: int, vocabulary: int, tied: bool) -> ModelShape:
    """A shape from the numbers of a published config. Biases of qwen2 are left out: under a millionth of the weights each."""
    width = 128
    block = hidden * width * (2 * heads + 2 * keys) + 3 * hidden * inner + 2 * hidden
    return ModelShape(
        family=family,
        layers=layers,
        hidden=hidden,
        inner=inner,
        heads=heads,
        key_value_heads=keys,
        head_width=width,
        parameters=layers * block + hidden + vocabulary * hidden * (1 if tied else 2),
        stored="bfloat16",
        positions=32_768,
    )


SHAPES = {
    "Qwen/Qwen2.5-1.5B-Instruct": shape_of("qwen2", 28, 1536, 8960, 12, 2, 151_936, True),
    "Qwen/Qwen3-4B-Instruct-2507": shape_of("qwen3", 36, 2560, 9728, 32, 8, 151_936, True),
    "Qwen/Qwen2.5-7B-Instruct": shape_of("qwen2", 28, 3584, 18_944, 28, 4, 152_064, False),
    "Qwen/Qwen2.5-14B-Instruct": shape_of("qwen2", 48, 5120, 13_824, 40, 8, 152_064, False),
}
"""From the config.json of each model on its hub page."""
PARAMETERS = {"1.5B": 1.54e9, "4B": 4.0e9, "7B": 7.61e9, "14B": 14.7e9}
"""As the model cards have them."""
CARDS = (24, 40, 80, 141)
"""Decimal gigabytes, which are a little less than cards of these names have."""


H100 = (Path("docs/qwen3-4b-h100.toml"),)
"""Lies over the preset for 80 GB."""


def preset(card: int, files: tuple[Path, ...] = ()) -> tuple[RunSettings, ModelShape]:
    settings = layered_settings(f"gpu-{card}", files, {"inference": {"engine": "vllm"}, "training": {"device": "cuda"}})
    return settings, SHAPES[settings.inference.model]


def machine(total: float) -> Machine:
    """A card on which the driver holds half a GiB."""
    return Machine(memory=200 * GIB, gpu_total=int(total), gpu_free=int(total) - GIB // 2)


def test_the_shapes_are_those_of_the_models():
    for name, shape in SHAPES.items():
        (expected,) = [count for size, count in PARAMETERS.items() if f"-{size}-" in name]
        assert shape.parameters == pytest.approx(expected, rel=0.01), name


@pytest.mark.parametrize(("card", "files"), [*((card, ()) for card in CARDS), (80, H100)])
def test_the_rate_of_a_preset_is_the_usual_one_of_its_model(card: int, files: tuple[Path, ...]):
    settings, shape = preset(card, files)
    assert settings.training.learning_rate == usual_rate(shape.hidden)


def check(settings: RunSettings, shape: ModelShape, card: Machine) -> None:
    """The check before a run."""
    needed = {"trainer": trainer_bytes(settings, shape), "trainer_gpu": trainer_gpu_bytes(settings, shape, card)}
    check_memory(shape, settings.inference, machine=card, **needed)


@pytest.mark.parametrize(("card", "files"), [*((card, ()) for card in CARDS), (80, H100)])
def test_engine_and_trainer_of_a_preset_fit_with_room_to_start_the_engine_again(card: int, files: tuple[Path, ...]):
    settings, shape = preset(card, files)
    here = machine(card * 1e9)
    check(settings, shape, here)
    trainer = trainer_gpu_bytes(settings, shape, here)
    plan = plan_memory(shape, settings.inference, here)
    assert plan.gpu_needed + trainer + CONTEXTS <= here.gpu_free
    held = (plan.kv_cache - ACTIVATIONS) // plan.token
    assert held >= settings.inference.max_sequences * UNSHARED, "the cache holds fewer requests than are decoded together"
    assert trainer > shape.parameters * 2 and settings.inference.adapter_rank >= settings.training.lora_rank


@pytest.mark.parametrize("card", CARDS)
def test_a_card_with_a_quarter_less_is_refused_in_a_sentence(card: int):
    settings, shape = preset(card)
    here = machine(0.75 * card * 1e9)
    trainer = trainer_gpu_bytes(settings, shape, here)
    assert plan_memory(shape, settings.inference, here).gpu_needed + trainer + CONTEXTS > here.gpu_free
    with pytest.raises(InputError, match=r"share the GPU.*are free: ") as refused:
        check(settings, shape, here)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(("processes", "machines", "fits"), [(4, "1", True), (1, "4", True), (1, "1", False)])
def test_a_base_that_does_not_fit_on_one_card_is_not_refused_where_processes_split_it(
    processes: int, machines: str, fits: bool, monkeypatch: pytest.MonkeyPatch
):
    """The 7B has 14.2 GiB of weights."""
    monkeypatch.setenv("PET_NNODES", machines)
    given, shape = preset(80)[0], SHAPES["Qwen/Qwen2.5-7B-Instruct"]
    training = given.training.model_copy(update={"processes": processes, "fsdp": True, "gradient_checkpointing": True})
    settings, own = given.model_copy(update={"training": training}), {"trainer_free": 12 * GIB, "trainer_total": 12 * GIB}
    card = Machine(memory=200 * GIB, gpu_total=80 * GIB, gpu_free=80 * GIB, **own)
    if fits:
        check(settings, shape, card)
    else:
        with pytest.raises(InputError, match=r"the trainer needs at least .* but 12\.0 GiB are free"):
            check(settings, shape, card)


def test_micro_batches_fit_beside_the_part_of_a_split_base_that_a_card_holds():
    """Of the 7B, whose 14.2 GiB leave nothing of such a card."""
    given, shape = preset(80)[0], SHAPES["Qwen/Qwen2.5-7B-Instruct"]
    training = given.training.model_copy(update={"processes": 4, "fsdp": True, "gradient_checkpointing": True})
    cards = tuple(
        Card(uuid=f"GPU-{n}", index=n, name="T4", total=16 * GIB, free=16 * GIB, driver="580", mig=False) for n in range(5)
    )
    plan = CardPlan(engine=cards[:1], trainer=cards[1:])
    assert token_budget(given.model_copy(update={"training": training}), shape, plan) == 8192


@pytest.mark.parametrize(
    ("shared", "share", "expected"), [(True, 0.55, 4096), (True, 0.32, 8192), (True, 0.8, 1024), (False, 0.9, 8192)]
)
def test_micro_batches_have_what_fits_into_the_trainer_s_part_of_the_card(shared: bool, share: float, expected: int):
    settings, shape = preset(80, H100)
    inference = settings.inference.model_copy(update={"gpu_memory_utilization": share})
    settings = settings.model_copy(
        update={"inference": inference, "training": settings.training.model_copy(update={"token_budget": 0})}
    )
    one, other = (
        Card(uuid=f"GPU-{n}", index=n, name="H100", total=81_559 << 20, free=81_000 << 20, driver="580", mig=False)
        for n in range(2)
    )
    plan = CardPlan(engine=(one,), trainer=(one if shared else other,))
    assert token_budget(settings, shape, plan) == expected
    assert token_budget(settings, shape, CardPlan()) == 0, "a CPU has its own constant"
    named = settings.model_copy(update={"training": settings.training.model_copy(update={"token_budget": 700})})
    assert token_budget(named, shape, plan) == 700
