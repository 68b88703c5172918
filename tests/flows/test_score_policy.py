"""What a run's scores are measured on."""

import asyncio
import os
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from entente.evaluation.score_files import read_score, read_track, track_label, write_score
from entente.evaluation.strength import Score
from entente.settings.layers import layered_settings
from entente.telemetry.metrics import check
from entente.telemetry.timing import Spans
from flows import score_policy as scores
from state_cache.settings import CacheSettings
from state_cache.store import StateCache
from storage.ledger import Totals
from storage.runs import RunPaths, last_change
from tasks.evaluation import evaluate_player
from tests.made_scores import made_record, made_score


@pytest.mark.parametrize(
    "who", [lambda *given: scores.score_policy(*given, "base"), scores.score_scripted], ids=["policy", "scripted"]
)
def test_a_version_is_scored_on_held_out_positions_alone(tmp_path: Path, positions, monkeypatch: pytest.MonkeyPatch, who: Any):
    measured = []

    async def measure(label: str, player: str, opponents: str, played_on: Any, *others: Any, **more: Any) -> Score:
        measured.append(tuple(played_on))
        return made_score()

    monkeypatch.setattr(scores, "evaluate_player", measure)
    cache = StateCache(path=tmp_path, settings=CacheSettings(), train=tuple(positions[:5]), held_out=tuple(positions[5:]))
    resources: Any = SimpleNamespace(
        cache=cache, paths=RunPaths(tmp_path).create(), host=None, engine=None, tokens=None, engine_alone=nullcontext
    )
    found = asyncio.run(who(resources, layered_settings("laptop")))
    assert found and measured == [cache.held_out] * len(found)


def test_a_version_between_is_scored_once_by_a_program_and_its_point_is_logged_again_after_a_kill(tmp_path: Path, monkeypatch):
    measured = []

    async def measure(label: str, *_: Any, **more: Any) -> Score:
        measured.append(label)
        return made_score()

    monkeypatch.setattr(scores, "evaluate_player", measure)
    cache = SimpleNamespace(held_out=())
    resources: Any = SimpleNamespace(
        cache=cache,
        paths=RunPaths(tmp_path).create(),
        host=None,
        engine=None,
        tokens=None,
        spans=Spans(),
        engine_alone=nullcontext,
    )
    for _ in range(2):
        point = asyncio.run(scores.score_version(resources, layered_settings("laptop"), 10))
        check(point)
        assert point["score/eval_version"] == 10 and point["score/eval"] == 0.5
    assert measured == ["track/v000010"] and [each.version for each in read_track(resources.paths)] == [10]
    monkeypatch.setattr(scores, "code_of_play", lambda players: dict.fromkeys(players, "another release"))
    for _ in range(2):
        asyncio.run(scores.score_version(resources, layered_settings("laptop"), 10))
    assert measured == ["track/v000010"] * 2  # once more, because the games may go differently
    record = read_score(resources.paths, "track/v000010")
    assert record is not None and record.code.keys() == {"policy", record.opponents}


def test_a_score_gives_signs_of_life_long_before_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    paths, quiet_s = RunPaths(tmp_path).create(), []
    paths.settings.touch()
    for each in (paths.root, *paths.root.iterdir()):
        os.utime(each, (time.time() - 7200, time.time() - 7200))

    async def measure(*given: Any) -> Score:
        for done in (1, 2):
            given[5](done, 100)
            quiet_s.append(time.time() - last_change(paths))
            os.utime(paths.scores, (time.time() - 30, time.time() - 30))
        return made_score()

    monkeypatch.setattr(scores, "evaluate_player", evaluate_player.fn)
    monkeypatch.setattr("tasks.evaluation.measure_strength", measure)
    host = SimpleNamespace(run=lambda work: work)
    resources: Any = SimpleNamespace(
        cache=SimpleNamespace(held_out=()),
        paths=paths,
        host=host,
        engine=None,
        tokens=None,
        spans=Spans(),
        engine_alone=nullcontext,
    )
    asyncio.run(scores.score_version(resources, layered_settings("laptop"), 10))
    assert quiet_s[0] < 20 < quiet_s[1] < 60, "once a minute is enough"


@pytest.mark.parametrize(("step_done", "scored", "missed"), [(10, [], True), (10, [10], False), (11, [], False), (20, [], False)])
def test_a_resumed_run_scores_the_version_that_a_kill_left_without_its_score(
    tmp_path: Path, step_done: int, scored: list[int], missed: bool
):
    settings = layered_settings("laptop", overrides={"steps": 20, "evaluation": {"every": 10}})
    paths = RunPaths(tmp_path).create()
    for version in scored:
        write_score(paths, made_record(track_label(version), policy_version=version, settings=settings.evaluation))
    resources: Any = SimpleNamespace(paths=paths, resume_point=SimpleNamespace(step_done=step_done))
    assert scores.missed(resources, settings) is missed


def test_the_time_of_a_resumed_run_includes_the_steps_of_the_processes_before(tmp_path: Path):
    paths, settings = RunPaths(tmp_path).create(), layered_settings("laptop")
    paths.settings.write_text(settings.model_dump_json())
    paths.metrics.write_text("".join(f'{{"step": {step}, "time/step_s": {10.0 * step}}}\n' for step in (1, 2, 3)))
    assert scores.earlier_seconds(paths, 2) == 30.0 and scores.earlier_seconds(paths, 0) == 0.0
    paths.metrics.write_text('{"step": 1, "time/step_s": 10.0}\n{"step": 2, "time/train_s": 5.0}\n')
    assert scores.earlier_seconds(paths, 2) == 10.0, "a resume logs the figures of a step from its checkpoint, without its time"


def test_a_run_that_is_resumed_for_its_scores_alone_has_the_share_of_orchestration_of_all_its_steps(tmp_path: Path):
    settings = layered_settings("laptop", overrides={"run": "mine", "runs_root": tmp_path})
    paths = settings.paths.create()
    paths.settings.write_text(settings.model_dump_json())
    counted, logged = (
        Totals(decisions=1, orders_rejected=0, max_policy_lag=0),
        '{"step": 1, "time/orchestration_s": 1.0, "time/step_s": 4.0}\n',
    )
    assert "orchestration_share" not in scores.run_summary(settings, counted, {}, 1.0), "no step was measured"
    paths.metrics.write_text(logged)
    assert scores.run_summary(settings, counted, {}, 1.0)["orchestration_share"] == 0.25
