"""Claims about the tuner's rules: the grid, what is refused, what is chosen, what its files say. Nothing is started."""

import json
import math
import tomllib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from decoding.legal_table import END
from decoding.thinking import ThoughtRule
from inference.settings import InferenceSettings
from pipeline.run_settings import layered_settings
from telemetry.errors import DataError, InputError
from tuning.candidates import Candidate, candidates_of, refused, varied_axes
from tuning.choose import NOISE, choose, confirmed, cost_per_thousand
from tuning.figures import FIGURES, ArmFigures, Pass, arm_figures
from tuning.job import Measured
from tuning.outputs import figures_of, slots_or_merged, sweep_files, table_rows, tuned_toml
from tuning.requests import chain_table, check_shape, random_rows
from tuning.settings import TuneSettings

BASE = InferenceSettings(adapters="merge_reload", max_model_length=512)


def figures(rate: float, *, p99: float = 1000.0, hit: float = 0.5, spread: float = 0.01) -> ArmFigures:
    """Figures of an arm, but for those named all 1."""
    told = dict.fromkeys(FIGURES, 1.0) | {"decisions_per_s": rate, "e2el_ms_p99": p99, "cache_hit": hit, "spread": spread}
    return ArmFigures(**told | {"requests": 2}, e2el_ms=(p99 / 2, p99))  # type: ignore[arg-type]


def measured(rate: float, **named: float) -> Measured:
    """A candidate that was measured; without the adapter it is three times as fast, which must mislead nobody."""
    return Measured(state="measured", arms={"off": figures(3 * rate), "on": figures(rate, **named)})


def grid(**axes: tuple) -> list[Candidate]:
    return candidates_of(BASE, TuneSettings(**{"max_sequences": (), "max_batched_tokens": (), **axes}), on_gpu=False)


def test_the_grid_of_the_issue_is_three_by_three_by_two_and_holds_the_settings_in_force_once():
    found = grid(max_sequences=(128, 256, 512), max_batched_tokens=(4096, 8192, 16384), prefix_caching=("on", "off"))
    assert len(found) == 18 and [each.current for each in found] == [True] + [False] * 17
    assert len({each.key for each in found}) == 18
    assert varied_axes(found) == ["max_sequences", "max_batched_tokens", "prefix_caching"]


def test_settings_in_force_that_are_not_in_the_grid_are_measured_too_and_first():
    found = grid(max_sequences=(256,), concurrency=(64,))
    assert [(each.settings.max_sequences, each.current) for each in found] == [(128, True), (256, False)]
    assert {each.concurrency for each in found} == {64}


def test_an_arrival_rate_is_tried_beside_the_number_in_flight():
    found = grid(concurrency=(64,), request_rate=(2.0, 8.0))
    assert [(each.concurrency, each.request_rate) for each in found] == [(64, 0.0), (0, 2.0), (0, 8.0)]


def test_a_candidate_keeps_its_key_when_the_grid_grows():
    few, many = grid(max_sequences=(256,)), grid(max_sequences=(32, 256), block_size=(32, 64))
    assert {each.key for each in few} <= {each.key for each in many}


def test_an_axis_of_the_other_kind_of_machine_is_refused():
    with pytest.raises(InputError, match="gpu_memory_share says nothing where the engine computes on the CPU"):
        grid(gpu_memory_share=(0.9,))
    with pytest.raises(InputError, match="kv_cache_gib says nothing"):
        candidates_of(BASE, TuneSettings(kv_cache_gib=(2,)), on_gpu=True)


def test_candidates_that_do_not_fit_are_left_out_with_the_reason_unless_none_is_left():
    def check(settings: InferenceSettings) -> None:
        if settings.kv_cache_gib > 2:
            raise InputError(f"{settings.kv_cache_gib} GiB are too many")

    found = grid(kv_cache_gib=(1, 4))
    assert list(refused(found, check, adapter_rank=16).values()) == ["4 GiB are too many"]
    with pytest.raises(InputError, match=r"none of the 1 candidates can run here.* 4 GiB are too many"):
        refused([found[1]], check, adapter_rank=16)


def test_slots_narrower_than_the_adapter_are_refused_where_there_are_slots():
    found = grid(adapters=("slots", "merge_reload"), adapter_rank=(8, 16))
    sentences = refused(found, lambda _: None, adapter_rank=16)
    narrow = [each.key for each in found if each.settings.adapters == "slots" and each.settings.adapter_rank == 8]
    assert list(sentences) == narrow and "do not take an adapter of rank 16" in sentences[narrow[0]]


def test_what_is_chosen_is_fastest_with_the_adapter_on_within_latency_and_hits():
    current, slow, late, cold, best = found = grid(max_sequences=(16, 32, 64, 256))
    told = {
        current.key: measured(100),
        slow.key: Measured(state="measured", arms={"off": figures(9999), "on": figures(50)}),
        late.key: measured(400, p99=13_001),
        cold.key: measured(400, hit=0.29),
        best.key: measured(200),
    }
    choice = choose(found, told, TuneSettings())
    assert choice.chosen is best
    assert [row["note"] for row in table_rows(found, told, TuneSettings(), ["max_sequences"], best.key)] == [
        "misses", "misses", "chosen", "", ""
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("rate", "spread", "stays"),
    [
        pytest.param(100 * (1 + NOISE / 2), 0.0, True, id="hardly faster"),
        pytest.param(130.0, 0.4, True, id="faster by less than passes differ"),
        pytest.param(130.0, 0.1, False, id="faster by more"),
    ],
)
def test_settings_in_force_give_way_only_to_a_gain_beyond_noise(rate: float, spread: float, stays: bool):
    current, other = grid(max_sequences=(64,))
    choice = choose([current, other], {current.key: measured(100), other.key: measured(rate, spread=spread)}, TuneSettings())
    assert (choice.chosen is current) is stays


@pytest.mark.parametrize(
    ("again", "stays"),
    [
        pytest.param(measured(125), False, id="there again"),
        pytest.param(measured(102), True, id="gone"),
        pytest.param(measured(150, spread=0.6), True, id="within what passes differ by"),
        pytest.param(measured(150, p99=99_999), True, id="too late now"),
        pytest.param(Measured(state="died", arms={}), False, id="not measured"),
    ],
)
def test_a_gain_counts_if_it_is_there_again_beside_the_settings_in_force(again: Measured, stays: bool):
    current, other = grid(max_sequences=(64,))
    first = choose([current, other], {current.key: measured(100), other.key: measured(300)}, TuneSettings())
    assert first.chosen is other
    assert (confirmed(first, measured(100), again, TuneSettings(), current).chosen is current) is stays


@pytest.mark.parametrize(("engine", "stays"), [("vllm", True), ("vllm_async", False)])
def test_on_a_cpu_a_gain_must_be_one_of_cpu_time_too(engine: str, stays: bool):
    current, other = grid(max_sequences=(64,))
    first = choose([current, other], {current.key: measured(100), other.key: measured(300)}, TuneSettings())
    again = replace(measured(300), engine=engine)  # as much CPU time for each decision as before
    assert (confirmed(first, measured(100), again, TuneSettings(), current).chosen is current) is stays


def test_constraints_that_nothing_holds_name_the_nearest_candidate_and_by_how_much_it_misses():
    current, other = grid(max_sequences=(64,))
    told = {current.key: measured(100, p99=30_000), other.key: measured(10, p99=13_500, hit=0.25)}
    choice = choose([current, other], told, TuneSettings())
    assert choice.chosen is None and choice.nearest is other
    assert "exceeds max_latency_ms 13,000 by 500 ms" in choice.why and "below min_cache_hit 0.3 by 0.050" in choice.why


def test_a_grid_of_which_nothing_started_chooses_nothing():
    (current,) = grid()
    told = {current.key: Measured(state="not started", reason="no room", log="a\nb", arms={})}
    choice = choose([current], told, TuneSettings())
    assert choice.chosen is None and choice.nearest is None
    assert table_rows([current], told, TuneSettings(), [], "")[0]["note"] == "not started: no room"


def test_figures_of_an_arm_are_medians_of_passes_and_percentiles_of_requests():
    first = Pass(seconds=2.0, e2el_ms=[float(n) for n in range(1, 101)], ttft_ms=[5.0], tpot_ms=[2.0], itl_ms=[1.0, 3.0])
    first.prompt_tokens, first.cached_tokens, first.completion_tokens, first.cpu_s = 1000, 400, 500, 1.0
    second = Pass(seconds=4.0, e2el_ms=[200.0] * 100, ttft_ms=[7.0], tpot_ms=[4.0], itl_ms=[2.0])
    second.prompt_tokens, second.cached_tokens, second.completion_tokens, second.cpu_s = 1000, 600, 500, 3.0
    told = arm_figures([first, second])
    assert told.decisions_per_s == (50 + 25) / 2 and told.cache_hit == 0.5 and told.tokens_per_s == (250 + 125) / 2
    assert told.e2el_ms_p99 == np.quantile([*range(1, 101), *[200] * 100], 0.99) and told.itl_ms_mean == 2.0
    assert told.spread == pytest.approx(25 / 37.5) and told.cpu_ms == 20.0
    assert told.goodput_per_s(100.0) == told.decisions_per_s / 2 and told.goodput_per_s(1.0) == told.decisions_per_s / 200


def test_a_recorded_decision_becomes_a_chain_as_long_as_it_under_the_same_masks():
    eos = 2
    table = chain_table([4, 7, 9, 2, 5, 1, 2], [0, 3, 5, 7], eos)
    assert table.longest == 3 and table.is_sound
    assert [table.allowed(node).tolist() for node in range(3)] == [[4, 7, 9], [5], [2]], "the end mark stands at the end alone"
    node = 0
    for token in (9, 5, 2):
        node = table.advance(node, token)
    assert node == END


def test_a_recorded_thought_becomes_a_thought_of_as_many_tokens():
    """Ids below 9 but for the end mark 2, twice; then the end of the thought, 6; then 4 or 7."""
    table = chain_table([-3, 9, -3, 9, 6, 4, 7, 2], [0, 2, 4, 5, 7, 8], 2)
    assert table.longest == 5 and table.is_sound and table.thought == ThoughtRule(budget=2, end=9, excluded=2)
    state = table.start
    for token in (8, 0, 6, 7, 2):
        state = table.advance(state, token)
    assert state == END


def test_sets_that_do_not_end_with_the_model_s_end_mark_are_refused():
    with pytest.raises(DataError, match="of another model"):
        chain_table([4, 7], [0, 1, 2], 2)


def test_random_requests_have_the_shape_and_the_common_beginning_that_were_asked_for(model: Path):
    tuning = TuneSettings(requests=20, concurrency=(4,), random_prompt_tokens=40, random_completion_tokens=6, random_shared=0.25)
    rows = random_rows(model, tuning, max_model_length=512)
    assert len(rows) == 20 and {row.length for row in rows} == {46} and {len(row.prompt_ids) for row in rows} == {40}
    assert len({tuple(row.prompt_ids[:10]) for row in rows}) == 1 and len({tuple(row.prompt_ids) for row in rows}) == 20


def test_random_requests_longer_than_the_engine_takes_are_refused_with_both_numbers():
    with pytest.raises(InputError, match=r"128 prompt and 384 completion tokens exceed inference\.max_model_length 511"):
        check_shape(TuneSettings(), max_model_length=511)
    check_shape(TuneSettings(), max_model_length=512)


def test_twice_the_requests_in_flight_are_asked_at_least():
    assert TuneSettings(requests=8, concurrency=(16, 64)).asked == 128


@pytest.mark.parametrize("on_gpu", [False, True])
def test_chosen_settings_are_a_file_that_presets_load_and_that_changes_what_was_tuned(tmp_path: Path, on_gpu: bool):
    settings = BASE.model_copy(update={"max_sequences": 512, "block_size": 64, "prefix_caching": False, "gpu_memory_share": 0.9})
    file = tmp_path / "tuned.toml"
    file.write_text(tuned_toml(Candidate(settings=settings, concurrency=77), on_gpu=on_gpu, remarks=["two\nlines"]))
    loaded = layered_settings("laptop", [file]).inference
    assert (loaded.max_sequences, loaded.block_size, loaded.prefix_caching, loaded.max_in_flight) == (512, 64, False, 77)
    assert loaded.gpu_memory_share == (0.9 if on_gpu else InferenceSettings().gpu_memory_share)
    assert file.read_text().startswith("# two\n# lines\n") and set(tomllib.loads(file.read_text())) == {"inference"}


def test_the_grid_is_written_in_vllm_s_own_words_once_for_servers_and_once_for_loads():
    found = grid(max_sequences=(128, 256), concurrency=(32, 64), adapters=("slots", "merge_reload"))
    files = sweep_files(found, TuneSettings(concurrency=(32, 64)))
    assert {record["max_num_seqs"] for record in files["serve-params"]} == {128, 256} and len(files["serve-params"]) == 4
    assert [record.get("max_lora_rank") for record in files["serve-params"]].count(16) == 2
    assert sorted(record["max_concurrency"] for record in files["bench-params"]) == [32, 64]
    for records in files.values():
        assert json.loads(json.dumps(records)) == records


@pytest.mark.vllm
def test_vllm_s_sweep_takes_the_files_and_each_of_its_commands_the_options():
    sweep = pytest.importorskip("vllm.benchmarks.sweep.param_sweep")
    files = sweep_files(grid(adapters=("slots",)), TuneSettings())
    items = sweep.ParameterSweep.from_records(files["serve-params"])
    command = items[-1].apply_to_cmd(["vllm", "serve", "model"])
    assert {"--enable-lora", "--enable-prefix-caching"} <= set(command)
    assert command[command.index("--max-num-seqs") + 1] == "128"


def test_the_price_of_a_thousand_decisions_follows_from_the_hour_s():
    assert math.isclose(cost_per_thousand(100.0, 3.6), 0.01)
    (current,) = grid()
    told = figures_of(current, {current.key: measured(100)}, TuneSettings(price_per_hour=3.6))
    assert (
        told is not None
        and told["on"]["cost_per_thousand"] == 0.01
        and "cost_per_thousand" not in str(figures_of(current, {current.key: measured(100)}, TuneSettings()))
    )


def test_the_lora_table_compares_with_merged_weights_and_names_the_better_way_or_why_there_is_none():
    def way(adapters: str, on: float, off: float) -> dict:
        return {"settings": {"adapters": adapters}, "state": "measured", "reason": "", "on": arm(on), "off": arm(off)}

    def arm(rate: float) -> dict:
        return {"decisions_per_s": rate, "e2el_ms_p99": 10.0}

    rows, advice = slots_or_merged([way("slots", 20.0, 40.0), way("merge_reload", 50.0, 50.0)])
    assert [(row["served as"], row["times"]) for row in rows] == [
        ("merged weights", "1.00"), ("slots", "2.50"), ("slots, requests without an adapter", "1.25")
    ]  # fmt: skip
    assert (
        "inference.adapters 'merge_reload'" in advice
        and "'slots'" in slots_or_merged([way("slots", 60, 60), way("merge_reload", 50, 50)])[1]
    )
    assert "either way" in slots_or_merged([way("slots", 51.0, 60.0), way("merge_reload", 50.0, 50.0)])[1]
    broken = {"settings": {"adapters": "merge_reload"}, "state": "refused", "reason": "no float32"}
    rows, advice = slots_or_merged([way("slots", 20.0, 40.0), broken])
    assert len(rows) == 2 and advice == "merged weights could not be measured (refused: no float32)"
