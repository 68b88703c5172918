"""The pipeline on paper obeys the utilisation law, and agrees with cases worked out by hand."""

from itertools import pairwise

import pytest

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
    assert trainer_s(hardware, work) == pytest.approx(128 * 9 * 0.8 * 464 * 0.19 * 4 * 7.6e9 / (989e12 * 0.4) + 1.0)


def test_the_page_names_every_number_of_workers():
    outcome = bench_paper(work=SMALL, workers=(1, 2), steps=2)
    assert {f"steps_per_hour_{workers}_workers" for workers in (1, 2)} <= set(outcome.metrics)


def test_no_workers_are_no_pipeline():
    with pytest.raises(InputError, match="0 workers"):
        _seen(0)
