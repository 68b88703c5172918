"""Settings follow from figures, and each says why."""

import tomllib
from typing import Any

import pytest

from pipeline.run_settings import layered_settings
from smoke.job import Device
from smoke.recommend import Advice, as_toml, attention_remark, base_preset, engine_share, recommend, smallest_near_best

GIB = 2**30
CARD = {"total_bytes": 80.0 * GIB}
STEP = {
    "g8.flex.step_s": 2.0,
    "g8.varlen.step_s": 1.0,
    "g8.dense.step_s": 0.5,
    "g8.recompute.step_s": 1.3,
    "g8.old.step_s": 9.0,
    "g8.old.peak_gib": 70.0,
    "budget.2048.unique_tokens_per_s": 900.0,
    "budget.2048.peak_gib": 20.0,
    "budget.4096.unique_tokens_per_s": 1000.0,
    "budget.4096.peak_gib": 24.0,
    "budget.8192.unique_tokens_per_s": 1010.0,
    "budget.8192.peak_gib": 32.0,
}
ENGINE = {"start_s": 60.0, "decisions_per_s.8": 50.0, "decisions_per_s.128": 220.0, "decisions_per_s.256": 225.0, "swap_ms": 9.0}
WHOLE = {
    "card": CARD,
    "engine": ENGINE,
    "jump": {"on.decisions_per_s": 300.0, "off.decisions_per_s": 220.0, "gain": 1.36},
    "adapters": {"slots.decisions_per_s": 200.0, "merge_reload.decisions_per_s": 260.0},
    "attention": {"agrees.varlen": 1.0, "agrees.flex": 1.0, "drawn.dense.gradient_error": 0.9},
    "training-step": STEP,
}


def values(device: Device = "cuda", **changed: Any) -> dict[str, object]:
    found = {name: figures for name, figures in (WHOLE | changed).items() if figures is not None}
    return {each.name: each.value for each in recommend(device, found)}


def test_a_whole_test_of_a_card_gives_a_setting_for_every_question():
    assert values() == {
        "inference.dtype": "bfloat16",
        "training.dtype": "bfloat16",
        "inference.gpu_memory_share": 0.64,  # (80 - 1.1 * 24 - 2) / 80 = 0.645
        "inference.max_sequences": 128,
        "inference.jump_forced": "on",
        "inference.adapters": "slots",
        "training.token_budget": 4096,
    }


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        pytest.param({"jump": {"gain": 1.02}}, {"inference.jump_forced": "off"}, id="a gain within noise is none"),
        pytest.param({"adapters": {"merge_reload.decisions_per_s": 1.0}}, {"inference.adapters": "merge_reload"}, id="no slots"),
        pytest.param({"training-step": {"g8.recompute.step_s": 1.0}}, {"training.recompute": True}, id="only with recompute"),
        pytest.param({"training-step": {}}, {"inference.gpu_memory_share": 0.9}, id="a trainer that was not measured"),
        pytest.param({"card": {"total_bytes": 24.0 * GIB}}, {"inference.gpu_memory_share": 0.2}, id="a trainer that fills it"),
    ],
)
def test_a_setting_follows_its_stage(changed: dict[str, Any], expected: dict[str, object]):
    found = values(**changed)
    assert {name: found[name] for name in expected} == expected


@pytest.mark.parametrize("stage", WHOLE)
def test_a_stage_that_did_not_pass_says_nothing(stage: str):
    owned = {
        "card": {"inference.gpu_memory_share"},
        "engine": {"inference.max_sequences"},
        "jump": {"inference.jump_forced"},
        "adapters": {"inference.adapters"},
        "attention": set(),
        "training-step": {"training.token_budget"},
    }
    assert set(values()) - set(values(**{stage: None})) == owned[stage]


def test_on_a_cpu_the_faster_way_of_adapters_is_taken_and_no_share_of_a_card():
    found = values("cpu")
    assert found["inference.adapters"] == "merge_reload"
    assert not {"inference.gpu_memory_share", "inference.dtype"} & set(found)


def test_of_nearly_equal_rates_the_smallest_value_is_taken():
    assert smallest_near_best({1: 10.0, 8: 96.0, 32: 100.0, 128: 99.0}) == 8


def test_the_old_step_takes_no_part_of_the_card():
    assert engine_share(CARD, {"g8.flex.peak_gib": 10.0, "g8.old.peak_gib": 70.0}) == 0.83


def test_the_file_is_one_that_a_run_accepts_and_gives_a_reason_for_each_setting(tmp_path):
    advice = [each for each in recommend("cuda", WHOLE)]
    text = as_toml(advice, ["a remark"])
    (tmp_path / "preset.toml").write_text(text)
    settings = layered_settings("laptop", [tmp_path / "preset.toml"])
    assert settings.inference.max_sequences == 128 and settings.training.token_budget == 4096
    assert text.startswith("# a remark\n")
    assert all(f"# {each.reason}" in text for each in advice)


def test_a_text_is_quoted_in_the_file():
    text = as_toml(
        [Advice(name="inference.adapters", value="slots", reason="r"), Advice(name="training.recompute", value=True, reason="r")]
    )
    assert tomllib.loads(text) == {"inference": {"adapters": "slots"}, "training": {"recompute": True}}


def test_the_remark_names_attentions_that_agree_the_fastest_first():
    assert ": varlen 1000 ms, flex 2000 ms." in attention_remark(WHOLE), "dense is faster, and disagrees"
    assert attention_remark({}) == ""


@pytest.mark.parametrize(
    ("gib", "expected"), [(22.5, "gpu-24"), (44.4, "gpu-40"), (79.6, "gpu-80"), (139.8, "gpu-141"), (8.0, "gpu-24")]
)
def test_the_preset_is_the_largest_that_the_card_holds(gib: float, expected: str):
    names = ["laptop", "gpu-24", "gpu-40", "gpu-80", "gpu-141", "cluster"]
    assert base_preset(names, {"total_bytes": gib * GIB}, "cuda") == expected
    assert base_preset(["laptop", "single-gpu"], {}, "cuda") == "single-gpu"
    assert base_preset(names, {"total_bytes": gib * GIB}, "cpu") == "laptop"
