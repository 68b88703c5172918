"""The pipeline on paper obeys the utilisation law, and agrees with cases worked out by hand."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from benchmarks import pipeline_on_paper
from benchmarks.measured_figures import SOURCES, read_measured
from benchmarks.pipeline_on_paper import Hardware, Work, bench_paper, simulate, trainer_s, worker_rates
from benchmarks.worker_scaling import Rates
from telemetry.errors import InputError

SMALL = Work(forks_a_step=8, decisions_a_fork=3, budget_steps=1)


def _seen(workers: int = 2, *, rate: float = 50.0, game_s: float = 0.002, step_s: float = 0.3, steps: int = 10):
    return simulate(
        workers, rates=Rates({1: rate, 8: 3 * rate}), work=SMALL, game_s=game_s, game_processes=1, step_s=step_s, steps=steps
    )


def test_no_station_works_more_than_all_the_time_nor_lets_more_through_than_it_can():
    seen = _seen(2, steps=20)
    for name in ("games", "workers", "trainer"):
        assert 0 < seen.busy_share(name) <= 1 + 1e-9
    assert seen.decisions_per_s <= 1 / 0.002 + 1e-9
    assert seen.decisions_per_s <= 2 * 150 + 1e-9
    assert seen.steps / seen.seconds <= 1 / 0.3 + 1e-9


def test_work_that_passed_a_station_is_the_time_it_was_busy():
    """The utilisation law: busy share = throughput x service time."""
    seen = _seen(2, steps=20)
    assert seen.busy_share("trainer") == pytest.approx(seen.steps / seen.seconds * 0.3, rel=1e-6)
    assert seen.busy_share("games") == pytest.approx(seen.decisions / seen.seconds * 0.002, rel=0.1)


def test_a_slow_trainer_is_never_left_waiting_and_a_fast_one_mostly_is():
    assert _seen(4, step_s=5.0).bottleneck == "trainer"
    assert _seen(4, step_s=5.0).busy_share("trainer") > 0.95
    assert _seen(1, rate=10.0, step_s=0.01).bottleneck == "workers"
    assert _seen(8, game_s=0.5, step_s=0.01).bottleneck == "games"


def test_one_fork_at_a_time_by_hand():
    """A step: one fork of three decisions, each 0.1 s of game and 0.5 s of a worker, then 1 s of training; nothing overlaps."""
    work = Work(forks_a_step=1, decisions_a_fork=3, budget_steps=0)
    seen = simulate(1, rates=Rates({1: 2.0}), work=work, game_s=0.1, game_processes=1, step_s=1.0, steps=4)
    assert seen.seconds == pytest.approx(4 * (3 * 0.6 + 1.0))
    assert seen.lags == [0, 0, 0, 0]


def test_more_workers_never_make_it_slower_and_stop_helping_at_the_trainer():
    rates = [_seen(workers, step_s=0.5).decisions_per_s for workers in (1, 2, 4, 16)]
    assert all(after >= before * 0.999 for before, after in pairwise(rates))
    assert rates[-1] == pytest.approx(24 / 0.5, rel=0.15)


def test_no_fork_is_older_than_the_budget_allows():
    work = Work(forks_a_step=4, decisions_a_fork=2, budget_steps=2)
    seen = simulate(2, rates=Rates({1: 100.0}), work=work, game_s=0.001, game_processes=1, step_s=2.0, steps=12)
    assert max(seen.lags) <= 2 and seen.decisions >= 12 * 8


def test_a_workers_rate_is_the_roofline_by_hand():
    hardware, work = Hardware(), Work()
    read_s = 7.6e9 * 2 / (3.35e12 * 0.6)
    prefill_s = 36 * 2 * 7.6e9 / (989e12 * 0.4)
    assert worker_rates(hardware, work)(1) == pytest.approx(1 / (prefill_s + 24 * (read_s + 0.004)))
    assert trainer_s(hardware, work) == pytest.approx(128 * 9 * 0.8 * 464 * 0.19 * 4 * 7.6e9 / (989e12 * 0.4) + 1.01)


def test_the_page_names_every_number_of_workers():
    outcome = bench_paper(work=SMALL, workers=(1, 2), steps=2)
    assert {f"steps_per_hour_{workers}_workers" for workers in (1, 2)} <= set(outcome.metrics)


def test_no_workers_are_no_pipeline():
    with pytest.raises(InputError, match="0 workers"):
        _seen(0)


# -- figures of the same sitting ------------------------------------------------------------------------------------------

MACHINE = {"python": "3.12", "cpu_cores": "2"}


def stored(file: Path, benchmark: str, metrics: dict[str, object], machine: dict[str, str] = MACHINE) -> Path:
    """What `entente bench NAME --json > FILE` leaves: a table, then the object."""
    outcome = {"benchmark": benchmark, "metrics": metrics, "targets": {}, "machine": machine}
    file.write_text(f" bench {benchmark}  figure\n a  1\n{json.dumps(outcome)}\n")
    return file


def test_measured_figures_replace_what_is_assumed_and_the_page_says_which(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    files = [
        stored(tmp_path / "trainer", "trainer", {"unique_token_share_recorded": 0.38, "speedup_recorded": 6.0}),
        stored(tmp_path / "decode", "decode", {"client_ms_per_decision_http": 3.0, "uncached_tokens_per_decision": 72}),
    ]
    measured = read_measured(files)
    assert measured == {"unique_share": 0.38, "game_s": pytest.approx(0.003), "uncached_tokens": 72.0}
    said: list[str] = []
    monkeypatch.setattr(pipeline_on_paper, "reporter", lambda: type("Said", (), {"say": said.append})())
    assumed, found = (bench_paper(workers=(1,), steps=2, measured=given).metrics for given in ({}, measured))
    assert found["trainer_s_a_step"] - 1.01 == pytest.approx(2 * (assumed["trainer_s_a_step"] - 1.01)), "twice the unique tokens"
    assert (assumed["measured_figures"], found["measured_figures"]) == (0, 3)
    assert {name: found[name] for name in SOURCES} == {**measured, "orchestration_s": 0.010}
    assert "unique_share 0.19: assumed" in said and "orchestration_s 0.01: assumed" in said
    assert "unique_share 0.38: measured, unique_token_share_recorded of `bench trainer`" in said


def test_figures_of_bench_all_are_taken_too(tmp_path: Path):
    share = {"benchmark": "orchestration", "metrics": {"prefect_client_cpu_ms_per_step": 20}, "machine": MACHINE}
    file = tmp_path / "all.json"
    file.write_text(json.dumps({"benchmarks": {"orchestration": share, "decode": {"error": "no engine"}}}))
    assert read_measured([file]) == {"orchestration_s": pytest.approx(0.02)}


@pytest.mark.parametrize(
    ("second", "sentence"),
    [
        (("decode", {"uncached_tokens_per_decision": 36}, {**MACHINE, "cpu_cores": "64"}), "another machine"),
        (("trainer", {"unique_token_share_recorded": 0.2}), "repeats unique_token_share_recorded"),
        (("storage", {"select_1e6_ms": 70}), "has no figure that the pipeline on paper takes"),
        (("decode", {"uncached_tokens_per_decision": float("nan")}), "is nan: it must be a number above 0"),
        (("decode", {"uncached_tokens_per_decision": 0}), "must be a number above 0"),
        (("decode", {"uncached_tokens_per_decision": "36"}), "must be a number above 0"),
    ],
)
def test_figures_that_do_not_belong_together_are_refused(tmp_path: Path, second: Any, sentence: str):
    first = stored(tmp_path / "first", "trainer", {"unique_token_share_recorded": 0.2})
    with pytest.raises(InputError, match=sentence):
        read_measured([first, stored(tmp_path / "second", *second)])


@pytest.mark.parametrize("content", ["", "no object", "[1]", '{"benchmark": "decode"}', '{"benchmarks": [1]}', "[" * 100_000])
def test_a_file_without_figures_is_the_users_mistake(tmp_path: Path, content: str):
    file = tmp_path / "figures"
    file.write_text(content)
    with pytest.raises(InputError, match="holds no figures of a benchmark"):
        read_measured([file])
