"""A sweep's plan, its halving, its file and its result, without training anything."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from evaluation.score_files import ScoreRecord, read_scores, write_score
from evaluation.settings import EvaluationSettings
from evaluation.strength import Score
from pipeline.sweep import SweepState, read_sweep, share_base_scores
from pipeline.sweep_results import seeds_wanted, sweep_results
from pipeline.sweep_search import Point, survivors
from storage.runs import RunPaths
from telemetry.errors import DataError, InputError

DRAWN = 'seeds = [0]\nsearch = "random"\nsamples = 3\n[settings]\n'
RATES = '[settings]\n"training.learning_rate" = [1e-3, 2e-3, 4e-3]\n'


def state_of(folder: Path, text: str) -> SweepState:
    (folder / "sweep.toml").write_text(text)
    return SweepState(read_sweep(folder / "sweep.toml"), folder / "runs")


def test_every_setting_is_trained_with_every_seed_and_nothing_else_differs(tmp_path: Path):
    state = state_of(tmp_path, f'name = "rates"\nseeds = [0, 7]\n{RATES}rollouts.horizon_years = [1, 2]')
    varied = [(run.settings.training.learning_rate, run.settings.rollouts.horizon_years, run.settings.seed) for run in state.runs]
    found = [(run.name, *values) for run, values in zip(state.runs, varied, strict=True)]
    assert found[:5] == [("rates-1", 1e-3, 1, 0), ("rates-2", 1e-3, 1, 7), ("rates-3", 1e-3, 2, 0), ("rates-4", 1e-3, 2, 7),
                         ("rates-5", 2e-3, 1, 0)]  # fmt: skip
    assert len(set(varied)) == 12
    assert {run.settings.telemetry.wandb_group for run in state.runs} == {"rates"}
    assert len({run.base_question for run in state.runs}) == 1


def test_a_random_search_draws_different_combinations_and_the_same_ones_again(tmp_path: Path):
    text = f'name = "rates"\nseeds = [0]\nsearch = "random"\nsamples = 5\n{RATES}rollouts.horizon_years = [1, 2]'
    points = state_of(tmp_path, text).points
    assert len({json.dumps(point) for point in points}) == 5 and points == state_of(tmp_path, text).points


WIDE = """
name = "wide"
seeds = [0, 1]
samples = 40
search_seed = 3
search = "{search}"
[settings]
training.learning_rate = {{low = 1e-5, high = 1e-1, log = true}}
storage.discount = {{low = 0.25, high = 1.0, step = 0.25}}
rollouts.start_groups = {{low = 2, high = 8, step = 2}}
rollouts.opponents = ["mover", "random"]
"""


def test_draws_stay_in_their_ranges_on_their_steps_and_a_logarithmic_one_has_equal_factors(tmp_path: Path):
    points = state_of(tmp_path, WIDE.format(search="random")).points
    rates = sorted(point["training.learning_rate"] for point in points)
    assert rates[0] >= 1e-5 and rates[-1] <= 1e-1
    assert 8 <= sum(rate < 1e-3 for rate in rates) <= 32, "half of the factors lie below; of the differences a hundredth"
    assert {point["storage.discount"] for point in points} == {0.25, 0.5, 0.75, 1.0}
    groups = {point["rollouts.start_groups"] for point in points}
    assert groups == {2, 4, 6, 8} and {type(each) for each in groups} == {int}
    assert {point["rollouts.opponents"] for point in points} == {"mover", "random"}


def finish(state: SweepState, score: Callable[[Point], float], stop_after: int = 10_000) -> int:
    """Give runs their scores as training would; the number of runs scored."""
    count = 0
    while due := state.due() or state.draw_next():
        for run, _ in due:
            if count == stop_after:
                return count
            state.done(run, score(state.points[run.point]))
            count += 1
    return count


def near(point: Point) -> float:
    """Best where the rate is a thousandth."""
    return -abs(math.log10(point["training.learning_rate"]) + 3)


def test_tpe_draws_by_the_scores_so_far_and_a_killed_sweep_draws_the_same(tmp_path: Path):
    text = WIDE.format(search="tpe").replace("40", "24")
    state = state_of(tmp_path, text)
    assert len(state.points) == 10 and state.undrawn == 14
    state.begin()
    assert finish(state, near) == 48
    assert len({json.dumps(point) for point in state.points}) == 24

    again = state_of(tmp_path, text.replace('"wide"', '"killed"'))
    again.begin()
    finish(again, near, stop_after=41)  # in the middle of a setting that was drawn by scores
    resumed = state_of(tmp_path, text.replace('"wide"', '"killed"'))
    resumed.resume()
    assert len(resumed.points) == 21 and [run.name for run, _ in resumed.due()] == ["killed-42"]
    finish(resumed, near)
    assert resumed.points == state.points
    other = state_of(tmp_path, text.replace('"wide"', '"worse"'))
    other.begin()
    finish(other, lambda point: -near(point))
    assert other.points[:10] == state.points[:10]
    assert sum(map(near, state.points[10:])) / 14 > sum(map(near, other.points[10:])) / 14 + 0.5


def test_the_file_tells_which_settings_were_drawn(tmp_path: Path):
    """Another version of optuna may draw otherwise."""
    text = f'name = "rates"\nseeds = [0]\nsearch = "random"\nsamples = 2\n{RATES}'
    state = state_of(tmp_path, text)
    drawn = [{"training.learning_rate": 4e-3}, {"training.learning_rate": 2e-3}]
    state.points, state.runs, state.scores = [], [], {}
    for point in drawn:
        state._add(point)
    state.begin()
    for first in (drawn, drawn[::-1]):
        resumed = state_of(tmp_path, text)
        resumed.points = first
        resumed.resume()
        assert resumed.points == drawn
        assert [run.settings.training.learning_rate for run in resumed.runs] == [4e-3, 2e-3]


def test_a_setting_whose_runs_all_failed_is_no_reason_to_draw_near_it_and_no_setting_is_drawn_twice(tmp_path: Path):
    few = f'name = "few"\nseeds = [0]\nsearch = "tpe"\nsamples = 12\n{RATES}rollouts.start_groups = [1, 2, 3, 4]'
    state = state_of(tmp_path, few)
    state.begin()
    while due := state.due() or state.draw_next():
        for run, _ in due:
            if run.settings.training.learning_rate == 1e-3:
                state.fail(run, "its loss was not finite")
            else:
                state.done(run, 1.0)
    assert len({json.dumps(point) for point in state.points}) == 12, "every combination, each once"


def test_values_that_settings_refuse_together_are_drawn_again(tmp_path: Path):
    text = DRAWN.replace("3", "4") + "evaluation.positions = [4, 9]\ncache.held_out_snapshots = [9, 20, 5]"
    state = state_of(tmp_path, f'name = "pairs"\n{text}')
    assert len(state.points) == 4 and {"evaluation.positions": 9, "cache.held_out_snapshots": 5} not in state.points
    with pytest.raises(InputError, match="only 5 combinations of values were found"):
        state_of(tmp_path, f'name = "pairs"\n{text.replace("samples = 4", "samples = 6")}')


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (f"seeds = []\n{RATES}", "seeds: "),
        (f"seeds = [1, 1]\n{RATES}", "name one twice"),
        ("seeds = [0]\n", "settings: "),
        ("seeds = [0]\n[settings]\nsteps = []", "settings.steps has no values"),
        ("seeds = [0]\n[settings]\nseed = [1, 2]", "settings cannot vary seed"),
        ("seeds = [0]\n[settings]\ntraining.learn_rate = [1]", "did you mean training.learning_rate?"),
        ("seeds = [0]\n[settings]\ntraining.learning_rate = [1e-3, 'fast']", "training.learning_rate: "),
        ("seeds = [0]\n[settings]\npipeline.buffer_depth = [0, 1]", "threads in different runs"),
        (f'seeds = [0]\nsearch = "random"\n{RATES}', "'random' and 'tpe' take samples"),
        (f'seeds = [0]\nsearch = "tpe"\nsamples = 10\n{RATES}', "draws its first 10 at random"),
        ("seeds = [0]\n[settings]\ntraining.learning_rate = {low = 1e-3, high = 1e-2}", "is a range: give samples"),
        (DRAWN + "training.learning_rate = {low = 1e-2, high = 1e-3}", "low must be below high"),
        (DRAWN + "training.learning_rate = {low = 0.0, high = 1e-3, log = true}", "takes a low above 0 and no step"),
        (DRAWN + "rollouts.start_groups = {low = 1, high = 8, step = 2}", "steps of 2 do not lead from 1 to 8"),
        (DRAWN + "training.learning_rate = {low = 1e-3, high = inf}", "has no end"),
        (DRAWN + "training.learning_rate = {low = 1e-3, high = 1e-2, logs = true}", "logs"),
        (DRAWN + "training.learning_rate = {low = -1.0, high = 1e-2}", "training.learning_rate: "),
        (DRAWN + "rollouts.start_groups = {low = 1.5, high = 8.5}", "rollouts.start_groups: "),
        (DRAWN + "rollouts.horizon_years = {low = 1, high = 2}", "samples 3 exceeds the 2 combinations"),
        (f'seeds = [0]\nsearch = "random"\nsamples = 4\n{RATES}', "exceeds the 3 combinations"),
        (f'seeds = [0]\nsearch = "halving"\nrungs = [4, 2]\n{RATES}', "in rising order"),
        (f"seeds = [0]\nspeed = 1\n{RATES}", "speed"),
    ],
)  # fmt: skip
def test_a_sweep_that_cannot_be_is_refused_in_one_sentence(tmp_path: Path, text: str, said: str):
    with pytest.raises(InputError, match=said) as refused:
        state_of(tmp_path, f'name = "rates"\n{text}')
    assert "\n" not in str(refused.value)


def test_halving_keeps_the_best_third_by_the_mean_over_seeds_and_a_killed_sweep_goes_on(tmp_path: Path):
    text = f'name = "rates"\nseeds = [0, 1]\nsearch = "halving"\nrungs = [2, 6]\n{RATES}'
    state = state_of(tmp_path, text)
    state.begin()
    assert [(run.name, steps) for run, steps in state.due()] == [(f"rates-{number}", 2) for number in range(1, 7)]
    for run, score in zip(state.runs[:5], (0.9, 0.1, 0.4, 0.8, 0.2), strict=True):
        state.done(run, score)
    state = state_of(tmp_path, text)
    state.resume()
    assert [run.name for run, _ in state.due()] == ["rates-6"]
    state.fail(state.runs[5], "its loss was not finite")  # the setting is judged by its other seed
    assert [(run.name, steps) for run, steps in state.due()] == [("rates-3", 6), ("rates-4", 6)]
    for run in state.runs[2:4]:
        state.done(run, 1.0)
    assert state.due() == []
    first, second, third = sweep_results(state)
    assert (first.steps, second.steps, third.steps) == (2, 6, 2)
    assert second.over_first is not None and second.over_first.mean == pytest.approx(((0.4 - 0.9) + (0.8 - 0.1)) / 2), (
        "after rung 1"
    )
    assert third.failed == {"rates-6": "its loss was not finite"} and third.score is not None and third.score.mean == 0.2


def test_the_best_third_is_at_least_one_and_ties_go_to_the_earlier():
    assert survivors({0: 1.0, 1: 1.0}) == {0} and survivors({3: 0.0, 4: 2.0, 5: 1.0, 6: 3.0}) == {4, 6} and survivors({}) == set()


def test_a_taken_name_or_another_plan_is_refused_and_a_damaged_file_said(tmp_path: Path):
    text = f'name = "rates"\nseeds = [0]\n{RATES}'
    state = state_of(tmp_path, text)
    with pytest.raises(InputError, match="leave out --resume"):
        state.resume()
    taken = state.runs[1].settings.paths
    taken.root.mkdir(parents=True)
    taken.settings.write_text("{}")
    with pytest.raises(InputError, match="run 'rates-2' exists already"):
        state.begin()
    taken.settings.unlink()
    state.begin()
    with pytest.raises(InputError, match="continue it with --resume"):
        state.begin()
    for other in (text.replace("4e-3", "5e-3"), text.replace("[0]", "[0, 1]"), text.replace(", 4e-3", "")):
        with pytest.raises(InputError, match="other runs or settings"):
            state_of(tmp_path, other).resume()
    state.file.write_text('{"runs": []}')
    with pytest.raises(DataError, match="is damaged"):
        state.resume()


@pytest.mark.parametrize("seeds", [5, 6])
def test_a_setting_is_compared_seed_by_seed_and_few_seeds_make_no_interval(tmp_path: Path, seeds: int):
    state = state_of(tmp_path, f'name = "rates"\nseeds = {list(range(seeds))}\n{RATES}')
    luck = [0.0, 3.0, -2.0, 5.0, 1.0, -4.0][:seeds]
    for run in state.runs[: 2 * seeds]:
        state.scores[run.name] = [luck[run.settings.seed] + (0.5 + 0.1 * (run.settings.seed % 2) if run.point else 0.0)]
    first, second, third = sweep_results(state)
    assert first.over_first is None and third.score is None and third.over_first is None
    assert second.over_first is not None and second.over_first.mean == pytest.approx(0.54 if seeds == 5 else 0.55)
    if seeds == 5:
        assert second.over_first.interval is None and second.seeds_to_show is None
        assert "5 seeds, and an interval takes 6" in seeds_wanted(state)
    else:
        low, high = second.over_first.interval or (0.0, 0.0)
        assert 0.4 < low < 0.55 < high < 0.7, "the luck of the seeds is gone from the difference"
        assert second.seeds_to_show == 6 and seeds_wanted(state) == ""


def test_only_scores_that_training_cannot_change_are_shared(tmp_path: Path):
    source, target = (RunPaths(tmp_path / name).create() for name in ("one", "two"))
    score = Score(mean=0.5, low=None, high=None, forks=1, positions=1, source_games=1, orders_rejected=0)
    for label, player, version in (("base", "policy", 0), ("random", "random", 0), ("trained", "policy", 3)):
        record = ScoreRecord(label=label, player=player, opponents="random", policy_version=version,
                             settings=EvaluationSettings(), score=score)  # fmt: skip
        write_score(source, record)
    share_base_scores(source, target)
    assert sorted(read_scores(target)) == ["base", "random"] and read_scores(target)["base"] == read_scores(source)["base"]
