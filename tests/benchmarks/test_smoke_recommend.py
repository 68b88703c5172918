"""Settings follow from figures, and each says why."""

from typing import Any

import pytest

from benchmarks.smoke.recommend import as_toml, base_preset, recommend, smallest_near_best
from entente.settings.layers import layered_settings

GIB = 2**30
STEP = {
    "step_s.2048": 2.0,
    "tokens_per_s.2048": 900.0,
    "peak_gib.2048": 20.0,
    "tokens_per_s.4096": 1000.0,
    "peak_gib.4096": 24.0,
    "tokens_per_s.8192": 1010.0,
    "peak_gib.8192": 32.0,
    "recompute": 0.0,
}
WHOLE = {
    "card": {"total_bytes": 80.0 * GIB},
    "engine": {"start_s": 60.0, "decisions_per_s.8": 50.0, "decisions_per_s.128": 220.0, "decisions_per_s.256": 225.0},
    "training-step": STEP,
}


def values(device: Any = "cuda", **changed: Any) -> dict[str, object]:
    return {each.name: each.value for each in recommend(device, WHOLE | changed)}


def test_a_whole_test_of_a_card_gives_a_setting_for_every_question():
    assert values() == {
        "inference.dtype": "bfloat16",
        "training.dtype": "bfloat16",
        "inference.gpu_memory_utilization": 0.64,  # (80 - 1.1 * 24 - 2) / 80 = 0.645
        "inference.max_sequences": 128,
        "training.token_budget": 4096,
    }


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        pytest.param(
            {"training-step": STEP | {"recompute": 1.0}}, {"training.gradient_checkpointing": True}, id="only with recompute"
        ),
        pytest.param({"training-step": {}}, {"inference.gpu_memory_utilization": 0.9}, id="a trainer that was not measured"),
        pytest.param(
            {"card": {"total_bytes": 24.0 * GIB}}, {"inference.gpu_memory_utilization": 0.2}, id="a trainer that fills it"
        ),
        pytest.param(
            {"attention": {"agrees": 1.0, "flex_s": 0.8, "ranges_s": 1.0}}, {"training.attention": "flex"}, id="flex is faster"
        ),
    ],
)
def test_a_setting_follows_its_stage(changed: dict[str, Any], expected: dict[str, object]):
    found = values(**changed)
    assert {name: found[name] for name in expected} == expected


def test_a_stage_that_did_not_pass_says_nothing_and_a_cpu_has_no_share():
    assert set(recommend("cpu", {})) == set()
    assert set(values("cpu")) == {"inference.max_sequences", "training.token_budget"}


@pytest.mark.parametrize(
    "attention",
    [
        pytest.param({}, id="not compared"),
        pytest.param({"agrees": 0.0, "flex_s": 0.1, "ranges_s": 1.0}, id="another gradient"),
        pytest.param({"agrees": 1.0, "flex_s": 0.96, "ranges_s": 1.0}, id="no faster than two measurements differ"),
    ],
)
def test_ranges_stay_until_a_card_has_shown_an_equal_gradient_in_less_time(attention: dict[str, float]):
    assert "training.attention" not in values(attention=attention)


def test_of_nearly_equal_rates_the_smallest_value_is_taken():
    assert smallest_near_best({1: 10.0, 8: 96.0, 32: 100.0, 128: 99.0}) == 8


def test_the_file_is_one_that_a_run_accepts_and_gives_a_reason_for_each_setting(tmp_path):
    advice = recommend("cuda", WHOLE)
    text = as_toml(advice, "a remark")
    (tmp_path / "preset.toml").write_text(text)
    settings = layered_settings("laptop", [tmp_path / "preset.toml"])
    assert settings.inference.max_sequences == 128 and settings.training.token_budget == 4096
    assert text.startswith("# a remark\n") and all(f"# {each.reason}" in text for each in advice)


@pytest.mark.parametrize(
    ("gib", "expected"), [(22.5, "gpu-24"), (44.4, "gpu-40"), (79.6, "gpu-80"), (139.8, "gpu-141"), (8.0, "gpu-24")]
)
def test_the_preset_is_the_largest_that_the_card_holds(gib: float, expected: str):
    names = ["laptop", "gpu-24", "gpu-40", "gpu-80", "gpu-141", "cluster"]
    assert base_preset(names, {"total_bytes": gib * GIB}, "cuda") == expected
    assert base_preset(names, {"total_bytes": gib * GIB}, "cpu") == "laptop"
