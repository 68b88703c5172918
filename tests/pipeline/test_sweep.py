"""A sweep's plan, its draws, its file and its result, without training anything."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.run_settings import RunSettings
from pipeline.sweep import Point, SweepState, base_question, read_sweep, score_of, sweep_results
from telemetry.errors import DataError, InputError

DRAWN = 'seeds = [0]\nsearch = "random"\nsamples = 3\n[settings]\n'
RATES = '[settings]\n"training.learning_rate" = [1e-3, 2e-3, 4e-3]\n'


def state_of(folder: Path, text: str) -> SweepState:
    (folder / "sweep.toml").write_text(text)
    return SweepState(read_sweep(folder / "sweep.toml"), folder / "runs")


def done(run: RunSettings, score: float) -> None:
    """The run's summary, as training writes it."""
    run.paths.root.mkdir(parents=True, exist_ok=True)
    run.paths.summary.write_text(json.dumps({"steps": run.steps, "trained_score": score}))


def test_every_setting_is_trained_with_every_seed_and_nothing_else_differs(tmp_path: Path):
    state = state_of(tmp_path, f'name = "rates"\nseeds = [0, 7]\n{RATES}rollouts.horizon_years = [1, 2]')
    varied = [(run.training.learning_rate, run.rollouts.horizon_years, run.seed) for run in state.runs]
    found = [(run.run, *values) for run, values in zip(state.runs, varied, strict=True)]
    assert found[:5] == [("rates-1", 1e-3, 1, 0), ("rates-2", 1e-3, 1, 7), ("rates-3", 1e-3, 2, 0), ("rates-4", 1e-3, 2, 7),
                         ("rates-5", 2e-3, 1, 0)]  # fmt: skip
    assert len(set(varied)) == 12
    assert len(set(map(base_question, state.runs))) == 1


WIDE = """
name = "wide"
seeds = [0, 1]
samples = 16
search_seed = 3
search = "{search}"
[settings]
training.learning_rate = {{low = 1e-5, high = 1e-1, log = true}}
storage.discount = {{low = 0.25, high = 1.0, step = 0.25}}
rollouts.start_groups = {{low = 2, high = 8, step = 2}}
rollouts.opponents = ["mover", "random"]
"""


def test_draws_are_new_and_stay_in_their_ranges_on_their_steps_and_a_logarithmic_one_has_equal_factors(tmp_path: Path):
    points = state_of(tmp_path, WIDE.format(search="random")).points
    assert len({json.dumps(point) for point in points}) == 16
    assert points == state_of(tmp_path, WIDE.format(search="random")).points
    rates = sorted(point["training.learning_rate"] for point in points)
    assert rates[0] >= 1e-5 and rates[-1] <= 1e-1
    assert 3 <= sum(rate < 1e-3 for rate in rates) <= 13, "half of the factors lie below; of the differences a hundredth"
    assert {point["storage.discount"] for point in points} == {0.25, 0.5, 0.75, 1.0}
    groups = {point["rollouts.start_groups"] for point in points}
    assert groups == {2, 4, 6, 8} and {type(each) for each in groups} == {int}
    assert {point["rollouts.opponents"] for point in points} == {"mover", "random"}


def finish(state: SweepState, score: Callable[[Point], float | None], stop_after: int = 10_000) -> None:
    """Give runs their scores as training would; one without a score fails."""
    count = 0
    while state.left or state.draw_next():
        for run in state.left:
            if count == stop_after:
                return
            if (found := score(state.points[state.runs.index(run) // len(state.sweep.seeds)])) is None:
                state.failed[run.run] = "its loss was not finite"
            else:
                done(run, found)
            count += 1


def near(point: Point) -> float:
    """Best where the rate is a thousandth."""
    return -abs(math.log10(point["training.learning_rate"]) + 3)


def test_tpe_draws_by_the_scores_so_far_and_a_killed_sweep_draws_the_same(tmp_path: Path):
    text = WIDE.format(search="tpe")
    state = state_of(tmp_path, text)
    assert state.undrawn == 15
    state.begin()
    finish(state, near)
    assert len({json.dumps(point) for point in state.points}) == 16 and not state.undrawn

    killed = text.replace('"wide"', '"killed"')
    again = state_of(tmp_path, killed)
    again.begin()
    finish(again, near, stop_after=25)  # in the middle of a setting that was drawn by scores
    resumed = state_of(tmp_path, killed)
    resumed.resume()
    assert len(resumed.points) == 13 and [run.run for run in resumed.left] == ["killed-26"]
    finish(resumed, near)
    assert resumed.points == state.points
    other = state_of(tmp_path, text.replace('"wide"', '"worse"'))
    other.begin()
    finish(other, lambda point: -near(point))
    assert other.points[:10] == state.points[:10]
    assert sum(map(near, state.points[10:])) / 6 > sum(map(near, other.points[10:])) / 6 + 0.5


def test_the_file_tells_which_settings_were_drawn(tmp_path: Path):
    """Another version of optuna may draw otherwise."""
    text = f'name = "rates"\nseeds = [0]\nsearch = "random"\nsamples = 2\n{RATES}'
    state = state_of(tmp_path, text)
    state.begin()
    for places in ((2, 1), (1, 2)):
        record = json.loads(state.file.read_text()) | {"drawn": [{"training.learning_rate": place} for place in places]}
        state.file.write_text(json.dumps(record))
        state.resume()
        assert [run.training.learning_rate for run in state.runs] == [[1e-3, 2e-3, 4e-3][place] for place in places]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (f"seeds = []\n{RATES}", "seeds: "),
        ("seeds = [0]\n[settings]\nseed = [1, 2]", "settings cannot vary seed"),
        ("seeds = [0]\n[settings]\ntraining.learn_rate = [1]", "did you mean training.learning_rate?"),
        ("seeds = [0]\n[settings]\npipeline.buffer_depth = [0, 1]", "threads in different runs"),
        (f'seeds = [0]\nsearch = "random"\n{RATES}', "'random' and 'tpe' take samples"),
        ("seeds = [0]\n[settings]\ntraining.learning_rate = {low = 1e-3, high = 1e-2}", "is a range: give search"),
        (DRAWN + "rollouts.start_groups = {low = 1, high = 8, step = 2}", "not divisible by `step`"),
        (f'seeds = [0]\nsearch = "random"\nsamples = 4\n{RATES}', "only 3 combinations"),
    ],
)  # fmt: skip
def test_a_sweep_that_cannot_be_is_refused_in_one_sentence(tmp_path: Path, text: str, said: str):
    with pytest.raises(InputError, match=said) as refused:
        state_of(tmp_path, f'name = "rates"\n{text}')
    assert "\n" not in str(refused.value)


def test_a_taken_name_or_another_plan_is_refused_and_a_damaged_file_said(tmp_path: Path):
    text = f'name = "rates"\nseeds = [0]\n{RATES}'
    state = state_of(tmp_path, text)
    with pytest.raises(InputError, match="leave out --resume"):
        state.resume()
    taken = state.runs[1].paths
    taken.root.mkdir(parents=True)
    taken.settings.write_text("{}")
    with pytest.raises(InputError, match="run 'rates-2' exists already"):
        state.begin()
    taken.settings.unlink()
    state.begin()
    with pytest.raises(InputError, match="continue it with --resume"):
        state.begin()
    for other in (text.replace("4e-3", "5e-3"), text.replace("[0]", "[0, 1]"), text.replace(", 4e-3", "")):
        with pytest.raises(InputError, match="other settings"):
            state_of(tmp_path, other).resume()
    state.file.write_text('{"runs": []}')
    with pytest.raises(DataError, match="is damaged"):
        state.resume()


@pytest.mark.parametrize("seeds", [5, 6])
def test_a_setting_is_compared_seed_by_seed_and_few_seeds_make_no_interval(tmp_path: Path, seeds: int):
    state = state_of(tmp_path, f'name = "rates"\nseeds = {list(range(seeds))}\n{RATES}')
    luck = [0.0, 3.0, -2.0, 5.0, 1.0, -4.0][:seeds]
    for point in (0, 1):
        for run in state.of_point(point):
            done(run, luck[run.seed] + (0.5 + 0.1 * (run.seed % 2) if point else 0.0))
    longer = state.runs[0].model_copy(update={"steps": 10 * state.runs[0].steps})
    assert score_of(state.runs[0]) == 0.0 and score_of(longer) is None, "a score counts after all steps"
    first, second, third = sweep_results(state)
    assert first["over_first"] is None and third["score"] is None and third["over_first"] is None
    assert second["over_first"]["mean"] == pytest.approx(0.54 if seeds == 5 else 0.55)
    if seeds == 5:
        assert second["over_first"]["interval"] is None and second["seeds_to_show"] is None
    else:
        low, high = second["over_first"]["interval"]
        assert 0.4 < low < 0.55 < high < 0.7, "the luck of the seeds is gone from the difference"
        assert second["seeds_to_show"] == 6
