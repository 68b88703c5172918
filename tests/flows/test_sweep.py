"""A sweep's runs and its result, without training anything."""

import asyncio
import json
import os
from pathlib import Path

import pytest

from entente.evaluation.score_files import write_score
from entente.evaluation.strength import Gain
from entente.settings.run_settings import RunSettings
from entente.telemetry.errors import EngineError, InputError, TrainingError
from flows.sweep import (
    SweepPoint,
    base_question,
    check_name_of_sweep,
    read_sweep,
    score_of,
    scored_by_others,
    scored_elsewhere,
    sweep_points,
    sweep_results,
    trained_elsewhere,
)
from flows.train_sweep import train_sweep
from storage.control import code_of_play
from storage.json_files import write_json
from storage.run_base import new_base
from storage.runs import RunPaths
from tests.damage import flip
from tests.made_scores import made_record, made_score

RATES = '[settings]\n"training.learning_rate" = [1e-3, 2e-3, 4e-3]\n'


def points_of(folder: Path, text: str) -> list[SweepPoint]:
    (folder / "sweep.toml").write_text(f'name = "rates"\n{text}')
    return sweep_points(read_sweep(folder / "sweep.toml"), folder / "runs")


def done(run: RunSettings, score: float) -> None:
    """The run's settings and summary, as training writes them."""
    run.paths.root.mkdir(parents=True, exist_ok=True)
    run.paths.settings.write_text(run.model_dump_json())
    run.paths.summary.write_text(json.dumps({"steps": run.steps, "trained_score": score}))


def test_every_setting_is_trained_with_every_seed_and_nothing_else_differs(tmp_path: Path):
    points = points_of(tmp_path, f"seeds = [0, 7]\n{RATES}rollouts.horizon_years = [1, 2]")
    runs = [run for point in points for run in point.runs]
    varied = [(run.training.learning_rate, run.rollouts.horizon_years, run.seed) for run in runs]
    found = [(run.run, *values) for run, values in zip(runs, varied, strict=True)]
    assert found[:5] == [("rates-1", 1e-3, 1, 0), ("rates-2", 1e-3, 1, 7), ("rates-3", 1e-3, 2, 0), ("rates-4", 1e-3, 2, 7),
                         ("rates-5", 2e-3, 1, 0)]  # fmt: skip
    assert len(set(varied)) == 12
    assert len(set(map(base_question, runs))) == 1


def test_the_folder_of_runs_is_that_of_the_settings_unless_another_is_named(tmp_path: Path):
    (tmp_path / "mine.toml").write_text('runs_root = "/elsewhere"')
    (tmp_path / "sweep.toml").write_text(f'name = "a"\nconfig = ["{tmp_path}/mine.toml"]\nseeds = [0]\n{RATES}')
    sweep = read_sweep(tmp_path / "sweep.toml")
    roots = [sweep_points(sweep, root)[0].runs[0].runs_root for root in (None, tmp_path)]
    assert roots == [Path("/elsewhere"), tmp_path]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (f"seeds = []\n{RATES}", "seeds: "),
        ("seeds = [0]\n[settings]\nseed = [1, 2]", "settings cannot vary seed"),
        ("seeds = [0]\n[settings]\ntraining.seed = [0, 1]", "settings cannot vary training.seed"),
        ("seeds = [0]\n[settings]\ntraining.learn_rate = [1]", "did you mean training.learning_rate?"),
        ("seeds = [0]\n[settings]\npipeline.buffer_depth = [0, 1]", "threads in different runs"),
        ("seeds = [0]\n[settings]\nevaluation.horizon_years = [1, 2]", "measured alike"),
        ("seeds = [0]\n[settings]\ntraining.learning_rate = [1e-3, 1e-3]", "or one twice"),
        ('seeds = [0]\n[settings]\ntraining.lora_rank = [8]\n"training.lora_rank" = [4]', "training.lora_rank is given twice"),
        ('seeds = [0]\n[settings]\ntraining.learning_rate = [0, "fast"]', "training.learning_rate"),
    ],
)
def test_a_sweep_that_cannot_be_is_refused_in_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, said: str):
    monkeypatch.setattr("entente.settings.run_settings.usable_cores", lambda: 2)
    with pytest.raises(InputError, match=said) as refused:
        points_of(tmp_path, text)
    assert "\n" not in str(refused.value)


def test_a_run_that_exists_is_refused_with_what_a_sweep_can_do(tmp_path: Path):
    (run,) = points_of(tmp_path, "seeds = [0]\n[settings]\ntraining.learning_rate = [1e-3]")[0].runs
    done(run.model_copy(update={"seed": 1}), 0.5)
    for resume, said in (
        (False, "continue the sweep with --resume, or choose"),
        (True, "restore it in the sweep's file, or choose"),
    ):
        with pytest.raises(InputError, match=f"run 'rates-1' .*{said} another name than 'rates'") as refused:
            asyncio.run(train_sweep("rates", [run], resume=resume))
        assert "--run" not in str(refused.value) and "--init-from" not in str(refused.value)


def test_a_value_added_before_others_does_not_give_a_run_another_value_than_it_was_trained_with(tmp_path: Path):
    """A resumed run may change max_policy_lag, so a sweep over it labelled the score of one value with another."""
    name = "storage.max_policy_lag"
    (_, old) = points_of(tmp_path, f"seeds = [0]\n[settings]\n{name} = [2, 8]")
    done(old.runs[0], 0.5)
    (_, new, _) = points_of(tmp_path, f"seeds = [0]\n[settings]\n{name} = [2, 4, 8]")
    with pytest.raises(InputError, match=rf"run 'rates-2' was started with {name} 8, and the sweep has 4 for it: restore it"):
        asyncio.run(train_sweep("rates", new.runs, resume=True, varied=new.values))
    longer = [run.model_copy(update={"steps": run.steps + 1}) for run in old.runs]
    check_name_of_sweep(longer[0], "rates", resume=True, varied=[name, "steps"])


def test_a_row_limit_changed_between_two_runs_is_refused_although_the_sweep_does_not_vary_it(tmp_path: Path):
    """A config that was edited before --resume gave the later runs another staleness budget, and the table compared them."""
    text = f"seeds = [0]\nconfig = ['{tmp_path}/mine.toml']\n{RATES}"
    (tmp_path / "mine.toml").write_text("[storage]\nmax_policy_lag = 2")
    done(points_of(tmp_path, text)[0].runs[0], 0.5)
    (tmp_path / "mine.toml").write_text("[storage]\nmax_policy_lag = 8\n[retention]\nkeep_adapters = 5")
    (run,) = points_of(tmp_path, text)[0].runs
    with pytest.raises(InputError, match=r"run 'rates-1' was started with storage.max_policy_lag 2, and the sweep has 8"):
        check_name_of_sweep(run, "rates", resume=True, varied=["training.learning_rate"])


def test_a_sweep_whose_model_was_replaced_after_some_runs_is_refused(
    tmp_path: Path, stored_run: RunPaths, monkeypatch: pytest.MonkeyPatch
):
    trained = []

    async def train(run: RunSettings, *, resume: bool) -> None:
        trained.append(run.run)

    monkeypatch.setattr("flows.train_sweep.train_policy", train)
    (model,) = (stored_run.root.parent / "_models").iterdir()
    (tmp_path / "model.toml").write_text(f"[inference]\nmodel = '{model}'")
    first, second = points_of(tmp_path, f"seeds = [0, 1]\nconfig = ['{tmp_path}/model.toml']\n{RATES}")[0].runs
    done(first, 0.5)
    write_json(first.paths.base, new_base(first.paths, model))
    asyncio.run(train_sweep("rates", [first, second], resume=True))
    assert trained == ["rates-2"]
    flip(model / "model.safetensors")
    with pytest.raises(InputError, match="the base model of run 'rates-1' was replaced"):
        asyncio.run(train_sweep("rates", [first, second], resume=True))
    assert trained == ["rates-2"]


@pytest.mark.parametrize("error", [TrainingError("the loss is not finite"), EngineError("9 of 16 forks failed")], ids=str)
def test_a_run_that_fails_leaves_the_others_to_be_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception):
    trained = []

    async def train(run: RunSettings, *, resume: bool) -> None:
        if run.seed == 0:
            raise error
        trained.append(run.run)

    monkeypatch.setattr("flows.train_sweep.train_policy", train)
    monkeypatch.setattr("flows.train_sweep.check_inputs", lambda *_, **__: None)
    runs = points_of(tmp_path, f"seeds = [0, 7]\n{RATES}")[0].runs
    with pytest.raises(TrainingError, match=f"1 of 2 runs failed; .*run rates-1 failed: {error}"):
        asyncio.run(train_sweep("rates", runs, resume=False))
    assert trained == ["rates-2"]


def test_wandb_groups_the_runs_of_each_sweep_unless_the_user_groups_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    groups = []

    async def train(run: RunSettings, *, resume: bool) -> None:
        groups.append(os.environ["WANDB_RUN_GROUP"])

    monkeypatch.setattr("flows.train_sweep.train_policy", train)
    monkeypatch.setattr("flows.train_sweep.check_inputs", lambda *_, **__: None)
    monkeypatch.delenv("WANDB_RUN_GROUP", raising=False)
    (run,) = points_of(tmp_path, "seeds = [0]\n[settings]\ntraining.learning_rate = [1e-3]")[0].runs
    for name in ("rates", "depths"):
        asyncio.run(train_sweep(name, [run], resume=False))
    monkeypatch.setenv("WANDB_RUN_GROUP", "paper")
    asyncio.run(train_sweep("rates", [run], resume=False))
    assert groups == ["rates", "depths", "paper"]


@pytest.mark.parametrize("seeds", [5, 6])
def test_a_setting_is_compared_seed_by_seed_and_few_seeds_make_no_interval(tmp_path: Path, seeds: int):
    points = points_of(tmp_path, f"seeds = {list(range(seeds))}\n{RATES}")
    luck = [0.0, 3.0, -2.0, 5.0, 1.0, -4.0][:seeds]
    for place in (0, 1):
        for run in points[place].runs:
            done(run, luck[run.seed] + (0.5 + 0.1 * (run.seed % 2) if place else 0.0))
    run = points[0].runs[0]
    assert score_of(run) == 0.0 and score_of(run.model_copy(update={"steps": 10 * run.steps})) is None, "after all steps only"
    first, second, third = sweep_results(points)
    assert first["over_first"] is None and third["score"] is None and third["over_first"] is None
    assert second["over_first"]["mean"] == pytest.approx(0.54 if seeds == 5 else 0.55)
    if seeds == 5:
        assert second["over_first"]["interval"] is None and second["seeds_to_show"] is None
    else:
        low, high = second["over_first"]["interval"]
        assert 0.4 < low < 0.55 < high < 0.7, "the luck of the seeds is gone from the difference"
        assert second["seeds_to_show"] == 6


def test_a_run_that_was_scored_otherwise_is_not_done_and_never_mixed_with_others(tmp_path: Path):
    before = points_of(tmp_path, f"seeds = [0, 7]\n{RATES}")[0]
    done(before.runs[0], 0.5)
    text = f"seeds = [0, 7]\nconfig = ['{tmp_path}/longer.toml']\n{RATES}"
    (tmp_path / "longer.toml").write_text("[evaluation]\nhorizon_years = 2\nevery = 5")
    point = points_of(tmp_path, text)[0]
    done(point.runs[1], 2.0)
    assert before.scores == {0: 0.5} and point.scores == {7: 2.0}
    seldom = point.runs[1].evaluation.model_copy(update={"every": 0})
    assert score_of(point.runs[1].model_copy(update={"evaluation": seldom})) == 2.0, "scored alike, however often"


def test_scores_of_programs_that_may_play_differently_are_named_with_what_mends_them(tmp_path: Path):
    runs = points_of(tmp_path, f"seeds = [0, 7]\n{RATES}")[0].runs
    for run, code in zip(runs, ({"entente.game": "as it was"}, code_of_play()), strict=True):
        done(run, 0.5)
        write_score(run.paths, made_record(policy_version=run.steps, settings=run.evaluation, code=code))
    points = [SweepPoint(values={}, runs=[run]) for run in runs]
    assert "remove summary.json of rates-1, and" in scored_by_others(points)
    assert scored_by_others(points[:1]) == scored_by_others(points[1:]) == ""


def test_runs_that_an_edited_program_trained_are_said_to_differ_by_more_than_settings(tmp_path: Path):
    """After an edit of a loss and --resume the table compared the runs before with those after without a word."""
    points = points_of(tmp_path, f"seeds = [0]\n{RATES}")
    for point, loss in zip(points, ("1f", "1f", "2e"), strict=True):
        done(point.runs[0], 0.5)
        write_json(point.runs[0].paths.environment, {"torch": "2.9", "my_losses": loss})
    write_json(points[0].runs[0].paths.environment, {"torch": "2.9"})  # a run with a loss of Entente's
    assert trained_elsewhere(points[:2]) == ""
    assert trained_elsewhere(points).startswith("the runs were trained with different my_losses, so")
    caches = points_of(tmp_path, "seeds = [0]\n[settings]\ncache.seed = [0, 1]")
    for point, positions in zip(caches, ("3a", "4b"), strict=True):
        done(point.runs[0], 0.5)
        write_json(point.runs[0].paths.environment, {"positions": positions})
    assert trained_elsewhere(caches) == "", "a setting of the sweep"


def test_scores_of_different_held_out_positions_are_said_to_differ_by_more_than_settings(tmp_path: Path):
    """As where a sweep varies cache.seed: its table named the gain of other positions as that of the setting."""
    points = points_of(tmp_path, "seeds = [0]\n[settings]\ncache.seed = [0, 1, 2]")
    for point, position in zip(points, ("here", "here", "elsewhere"), strict=True):
        (run,) = point.runs
        done(run, 0.5)
        gains = (Gain(snapshot_id=position, game_id="game", power="FRANCE", centres=0.5),)
        write_score(run.paths, made_record(score=made_score(gains=gains), policy_version=1, settings=run.evaluation))
    assert "different held-out positions" in scored_elsewhere(points)
    assert scored_elsewhere(points[:2]) == ""
