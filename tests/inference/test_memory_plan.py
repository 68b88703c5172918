"""What a model needs is reckoned as vLLM and the weight files have it, and what cannot fit is refused with the figures."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from entente.inference.memory_plan import (
    CONTEXT_BYTES,
    ENGINE_PROCESS_BYTES,
    GIB,
    Machine,
    ModelShape,
    check_memory,
    plan_memory,
    read_shape,
    this_machine,
    trainer_gpu_memory,
    trainer_memory,
    trainer_share,
)
from entente.inference.settings import InferenceSettings
from entente.telemetry.cards import CardPlan
from entente.telemetry.errors import InputError
from tests.telemetry.fake_nvml import card

SEVEN_B = ModelShape(
    family="qwen2",
    layers=28,
    hidden=3584,
    inner=18944,
    heads=28,
    key_value_heads=4,
    head_width=128,
    parameters=7_615_616_512,
    stored="bfloat16",
    positions=32768,
)
"""Qwen2.5-7B, by its published config."""


def test_the_shape_of_a_model_is_read_from_its_files(model: Path):
    shape = read_shape(model)
    assert shape.parameters == json.loads((model / "recipe.json").read_text())["parameters"]
    assert (shape.layers, shape.hidden, shape.heads, shape.key_value_heads, shape.positions) == (2, 64, 2, 1, 1024)


def test_vllm_is_refused_where_it_has_no_lora():
    experts = replace(SEVEN_B, family="qwen3_moe")
    said = refusal(experts, Machine(memory=100 * GIB), dtype="bfloat16")
    assert said.startswith("vLLM has no LoRA for a mixture of experts ('qwen3_moe') on a CPU")
    on_gpu = Machine(memory=100 * GIB, gpu_total=80 * GIB, gpu_free=80 * GIB)
    for engine in ("vllm", "torch"):
        check_memory(experts, InferenceSettings(engine=engine, dtype="bfloat16", max_sequences=8), machine=on_gpu)


def test_the_adapter_has_the_weights_that_peft_gives_it():
    # 161,480,704 parameters at rank 64, as peft prints for this model and all seven modules; linear in the rank.
    assert SEVEN_B.lora_parameters(64) == 161_480_704
    assert SEVEN_B.lora_parameters(16) * 4 == SEVEN_B.lora_parameters(64)
    few = trainer_memory(SEVEN_B, rank=64, dtype="bfloat16", targets=("q_proj",))
    assert trainer_memory(SEVEN_B, rank=64, dtype="bfloat16") - few == 16 * (161_480_704 - 28 * 64 * 2 * 3584)


def refusal(shape: ModelShape, machine: Machine, trainer: int = 0, trainer_gpu: int = 0, **settings: object) -> str:
    wanted = InferenceSettings.model_validate({"engine": "vllm"} | settings)
    with pytest.raises(InputError) as caught:
        check_memory(shape, wanted, machine=machine, trainer=trainer, trainer_gpu=trainer_gpu)
    return str(caught.value)


def test_a_cache_too_large_for_the_machine_is_refused_with_one_that_fits():
    machine = Machine(memory=50 * GIB)
    said = refusal(SEVEN_B, machine, dtype="bfloat16", kv_cache_gib=40)
    assert "key-value cache 40.0 GiB" in said and "50.0 GiB are available" in said
    assert "lower inference.kv_cache_gib from 40 to 34" in said
    check_memory(SEVEN_B, InferenceSettings(engine="vllm", dtype="bfloat16", kv_cache_gib=34), machine=machine)
    assert "lower inference.kv_cache_gib" in refusal(SEVEN_B, machine, dtype="bfloat16", kv_cache_gib=35)


def test_a_gpu_is_refused_for_what_is_free_and_for_what_the_weights_take():
    card = {"memory": 100 * GIB, "gpu_total": 80 * GIB}
    said = refusal(SEVEN_B, Machine(**card, gpu_free=40 * GIB), dtype="bfloat16", gpu_memory_utilization=0.85)
    assert "asks for 68.0 GiB of the GPU, but 40.0 GiB are free" in said
    said = refusal(SEVEN_B, Machine(**card, gpu_free=80 * GIB), dtype="bfloat16", gpu_memory_utilization=0.1)
    assert "weights take 14.2 GiB" in said and "gives the engine 8.0 GiB" in said
    check_memory(SEVEN_B, InferenceSettings(engine="vllm", dtype="bfloat16"), machine=Machine(**card, gpu_free=80 * GIB))


def test_engine_and_trainer_on_one_card_are_refused_with_the_share_that_leaves_both_room():
    trainer = trainer_gpu_memory(SEVEN_B, rank=16, dtype="bfloat16", tokens=4096, recompute=False)
    kept = (trainer - 2 * SEVEN_B.parameters - 16 * SEVEN_B.lora_parameters(16)) / 4096
    assert 5.7 * 2**20 < kept < 5.8 * 2**20, "5.7 MiB a token, as the plan says"
    card = Machine(memory=100 * GIB, gpu_total=80 * GIB, gpu_free=80 * GIB)
    said = refusal(SEVEN_B, card, trainer_gpu=trainer, dtype="bfloat16", gpu_memory_utilization=0.85)
    assert "takes 68.0 GiB and the trainer at least 37." in said and "80.0 GiB are free: lower the share to 0.5" in said
    share = float(said.split("lower the share to ")[1].split(",")[0])
    fits = InferenceSettings(engine="vllm", dtype="bfloat16", gpu_memory_utilization=share)
    check_memory(SEVEN_B, fits, machine=card, trainer_gpu=trainer)
    tight = InferenceSettings(engine="vllm", dtype="bfloat16", gpu_memory_utilization=share + 0.02)
    with pytest.raises(InputError, match="share the GPU"):
        check_memory(SEVEN_B, tight, machine=card, trainer_gpu=trainer)
    again = trainer_gpu_memory(SEVEN_B, rank=16, dtype="bfloat16", tokens=4096, recompute=True)
    assert 0.50 < (kept - (trainer - again) / 4096) / 2**20 < 0.52, "0.5 with recomputation"
    small = Machine(memory=100 * GIB, gpu_total=40 * GIB, gpu_free=40 * GIB)
    said = refusal(SEVEN_B, small, trainer_gpu=trainer, dtype="bfloat16", gpu_memory_utilization=0.5)
    assert "use servers on other GPUs" in said
    with pytest.raises(InputError, match=r"the trainer needs at least 37.* of the GPU, but 30\.0 GiB are free"):
        check_memory(
            SEVEN_B,
            InferenceSettings(urls=("http://elsewhere:8100",)),
            machine=Machine(memory=100 * GIB, gpu_total=40 * GIB, gpu_free=30 * GIB),
            trainer_gpu=trainer,
        )


def test_the_torch_engine_is_refused_a_card_that_cannot_hold_the_weights_one_sequence_and_the_trainer():
    def machine(free: int) -> Machine:
        return Machine(memory=128 * GIB, gpu_free=free, gpu_total=max(free, 24 * GIB))

    # 14.8 billion weights as those of Qwen3-14B, in bfloat16: 27.5 GiB.
    fourteen = replace(SEVEN_B, family="qwen3", layers=40, hidden=5120, key_value_heads=8, heads=40, parameters=14_768_307_200)
    settings = InferenceSettings(engine="torch", dtype="bfloat16", max_model_length=2048, max_sequences=256)
    said = refusal(fourteen, machine(23 * GIB), trainer_gpu=20 * GIB, **settings.model_dump())
    assert "takes 27.5 GiB of the GPU for weights and 320 MiB for one sequence" in said
    assert "and the trainer at least 20.0 GiB" in said and "but 23.0 GiB are free" in said
    plan = plan_memory(fourteen, settings, machine(80 * GIB))
    least = plan.weights + 2048 * plan.token + 20 * GIB + 2 * CONTEXT_BYTES
    assert plan.gpu_needed > least, "rows may grow to more than is refused"
    check_memory(fourteen, settings, machine=machine(least), trainer_gpu=20 * GIB)
    refusal(fourteen, machine(least - 1), trainer_gpu=20 * GIB, **settings.model_dump())
    apart = replace(machine(least - 20 * GIB - CONTEXT_BYTES), trainer_free=23 * GIB, trainer_total=24 * GIB)
    check_memory(fourteen, settings, machine=apart, trainer_gpu=20 * GIB)


def test_the_torch_engine_takes_what_its_rows_grow_to_and_no_cache_of_vllm_s(model: Path):
    shape = read_shape(model)
    settings = InferenceSettings(engine="torch", max_model_length=512, max_sequences=128, kv_cache_gib=9999)
    plan = plan_memory(shape, settings, Machine(memory=0))
    assert plan.kv_cache == 128 * 512 * plan.token and plan.needed == plan.process + plan.kv_cache + plan.weights
    check_memory(shape, settings, machine=Machine(memory=plan.needed))
    said = refusal(shape, Machine(memory=plan.needed - 1), **settings.model_dump())
    assert "lower inference.max_sequences" in said


def test_an_engine_over_two_cards_holds_half_of_weights_and_cache_on_each():
    machine = Machine(memory=100 * GIB, gpu_total=80 * GIB, gpu_free=80 * GIB)
    settings = InferenceSettings(engine="vllm", dtype="bfloat16")
    one = plan_memory(SEVEN_B, settings, machine)
    two = plan_memory(SEVEN_B, settings.model_copy(update={"tensor_parallel": 2}), machine)
    assert (two.weights, two.token) == (one.weights // 2, one.token // 2), "of four key-value heads each card holds two"
    assert two.kv_cache == one.kv_cache + one.weights // 2 and two.tokens > 2 * one.tokens
    assert two.needed == one.needed + ENGINE_PROCESS_BYTES["vllm"], "a process for each card"
    eight = plan_memory(SEVEN_B, settings.model_copy(update={"tensor_parallel": 8}), machine)
    assert eight.token == one.token // 4, "with fewer heads than cards each card holds one"
    said = refusal(SEVEN_B, machine, engine="vllm", dtype="bfloat16", tensor_parallel=3)
    assert said == "inference.tensor_parallel 3 must divide the 28 attention heads of the model: change it"


def test_the_memory_is_that_of_the_cards_that_each_side_takes():
    apart = this_machine(CardPlan(engine=(card(0, free=70), card(1, total=40, free=39)), trainer=(card(2, total=24, free=20),)))
    assert (apart.gpu_free, apart.gpu_total) == (39 * GIB, 40 * GIB), "the smallest of the engine's"
    assert apart.trainer_gpu == (20 * GIB, 24 * GIB)
    shared = this_machine(CardPlan(engine=(card(0),), trainer=(card(0),)))
    assert shared.trainer_total is None and shared.trainer_gpu == (80 * GIB, 80 * GIB)
    alone = this_machine(CardPlan(trainer=(card(0),)))
    assert alone.gpu_total == 0 and alone.trainer_gpu[1] == 80 * GIB
    wanted = InferenceSettings(engine="vllm", dtype="bfloat16", gpu_memory_utilization=0.9)
    fits = Machine(memory=100 * GIB, gpu_free=79 * GIB, gpu_total=80 * GIB, trainer_free=20 * GIB, trainer_total=24 * GIB)
    check_memory(SEVEN_B, wanted, machine=fits, trainer_gpu=19 * GIB)
    with pytest.raises(InputError, match=r"the trainer needs at least 21.0 GiB of the GPU, but 20.0 GiB are free"):
        check_memory(SEVEN_B, wanted, machine=fits, trainer_gpu=21 * GIB)


def test_a_trainer_on_the_engine_s_card_leaves_room_for_the_engine_to_start_again():
    both = CardPlan(engine=(card(0),), trainer=(card(0),))
    for share in (0.3, 0.45, 0.6):
        settings = InferenceSettings(engine="vllm", gpu_memory_utilization=share)
        taken = trainer_share(both, settings) * 80 * GIB
        # What vLLM finds free at its start: the card less the trainer's tensors, and a context for each process.
        assert 80 * GIB - taken - 2 * CONTEXT_BYTES >= share * 80 * GIB - 1
        assert taken > (0.97 - share) * 80 * GIB, "and no more than that"
    assert trainer_share(CardPlan(engine=(card(0),), trainer=(card(1),)), InferenceSettings(engine="vllm")) == 0.0
    assert trainer_share(both, InferenceSettings(engine="torch")) == 0.0
