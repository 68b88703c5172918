"""A training run of the old way, as a program of its own: `python -m benchmarks.old_way.run SPEC.json`.

Stands for the old system's loop: rollouts of `depth` steps in flight while the trainer, another process, computes; a step begins
when all of its rollouts are there; the new version replaces the one before. Its queue of handles lost order on a time-out and its
weights were published a step late: neither is repeated. Prints a line of JSON for each step, and the scores.

With a depth of 0 the two take turns and each may use every core; else they share the cores.
"""

import asyncio
import json
import multiprocessing
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.old_way.ways import OLD, Way

_STEPS_AT_LEAST = 2
_AFTER_ALL = 1_000_000
"""Number under which the version that is scored is served, whichever it was."""


def main(spec_file: Path) -> None:
    """Run what the file says, see `spec_of`; lines go to standard output."""
    spec = json.loads(spec_file.read_text())
    here, there = multiprocessing.Pipe()
    child = multiprocessing.get_context("spawn").Process(target=_train, args=(there, spec), daemon=True)
    child.start()  # before vLLM is imported, whose environment it would inherit
    there.close()
    try:
        asyncio.run(_run(spec, here))
    finally:
        here.close()
        child.join(timeout=20)


def _say(**values: Any) -> None:
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()


def _setting(spec: dict[str, Any]) -> Any:
    from benchmarks.old_way.arm import Setting
    from inference.settings import InferenceSettings
    from rollouts.settings import RolloutSettings
    from state_cache.store import open_cache
    from training.settings import TrainingSettings

    return Setting(
        compact_model=Path(spec["compact_model"]),
        json_model=Path(spec["json_model"]),
        positions=open_cache(Path(spec["cache"])).train,
        rollouts=RolloutSettings.model_validate(spec["rollouts"]),
        training=TrainingSettings.model_validate(spec["training"]),
        inference=InferenceSettings.model_validate(spec["inference"]),
        folder=Path(spec["folder"]),
        seed=spec["seed"],
    )


def _train(pipe: Connection, spec: dict[str, Any]) -> None:
    """The trainer's process: a step's number comes in, what was learned goes out; ends with the pipe."""
    from benchmarks.old_way.learn import Learner
    from benchmarks.old_way.stages import StageClock

    setting, way, clock = _setting(spec), Way(**spec["way"]), StageClock()
    training = setting.training.model_copy(update={"device": "cpu"})
    learner = Learner(setting.model(way), way, training, setting.folder / "run", clock)
    pipe.send("ready")
    while True:
        try:
            step = pipe.recv()
        except EOFError:
            return
        began, before = time.perf_counter(), time.process_time()
        learned = learner.learn(step)
        pipe.send((learned, time.perf_counter() - began, time.process_time() - before))


async def _run(spec: dict[str, Any], pipe: Connection) -> None:
    from benchmarks.old_way.arm import Arm
    from benchmarks.old_way.score import score
    from evaluation.settings import EvaluationSettings
    from state_cache.store import open_cache

    way, setting = Way(**spec["way"]), _setting(spec)
    arm = Arm("run", way, setting, trains=False)
    await arm.start()
    await asyncio.to_thread(pipe.recv)
    evaluation = EvaluationSettings.model_validate(spec["evaluation"])

    async def scored() -> dict[str, Any]:
        return await score(replace(arm.table), open_cache(Path(spec["cache"])).held_out, evaluation, evaluation.opponents[0])

    try:
        base = await scored() if spec["scores"] else {}
        newest = await _steps(spec, arm, pipe)
        if spec["scores"]:
            if newest is not None:
                await arm.serve(_AFTER_ALL, newest)
            _say(base=base, trained=base if newest is None else await scored())
    finally:
        await arm.close()


async def _steps(spec: dict[str, Any], arm: Any, pipe: Connection) -> Any:
    """Steps until the budget is spent, and two at least, so that one is measured after the first; what was learned within it."""
    depth, most, budget_s, newest = spec["depth"], spec["steps"], spec["budget_s"], None
    in_flight: dict[int, asyncio.Task[Any]] = {}
    done = _clock()
    began = time.perf_counter()
    for step in range(1, most + 1):
        for ahead in range(step, min(step + depth, most) + 1):
            if ahead not in in_flight:
                in_flight[ahead] = asyncio.create_task(arm.roll_out(ahead))
        asked = time.perf_counter()
        rows = await in_flight.pop(step)
        waited_s = time.perf_counter() - asked
        arm.publish_rows(step, rows)
        if depth and step + depth + 1 <= most:
            in_flight[step + depth + 1] = asyncio.create_task(arm.roll_out(step + depth + 1))
        pipe.send(step)
        learned, train_s, cpu_s = await asyncio.to_thread(pipe.recv)
        published = time.perf_counter()
        await arm.serve(step, learned)
        counts, stages = arm.fresh_counts(), dict(arm.clock.cpu_s)
        wall_s, own_s = done()
        spent_s = time.perf_counter() - began
        newest = learned if spent_s <= budget_s else newest
        _say(
            step=step,
            in_budget=spent_s <= budget_s,
            wall_s=wall_s,
            cpu_s=own_s + cpu_s,
            rollout_wait_s=waited_s,
            train_s=train_s,
            publish_s=time.perf_counter() - published,
            lag=min(depth, step - 1),
            stages_cpu_s=stages,
            counts=asdict(counts),
            **{name: getattr(learned, name) for name in ("rolled", "trained", "realigned", "tokens", "return_mean")},
        )
        if spent_s >= budget_s and step >= _STEPS_AT_LEAST:
            break
    for task in in_flight.values():
        task.cancel()
    await asyncio.gather(*in_flight.values(), return_exceptions=True)
    return newest


def _clock() -> Callable[[], tuple[float, float]]:
    """Wall and CPU seconds since the last call."""
    last = [time.perf_counter(), time.process_time()]

    def since() -> tuple[float, float]:
        now = [time.perf_counter(), time.process_time()]
        gone = now[0] - last[0], now[1] - last[1]
        last[:] = now
        return gone

    return since


def spec_of(
    *,
    setting: Any,
    cache: Path,
    evaluation: Any,
    steps: int,
    budget_s: float,
    depth: int,
    scores: bool,
    way: Way = OLD,
) -> dict[str, Any]:
    """What `main` reads.

    Args:
        setting: a `Setting`; its positions are those of `cache`.
        depth: steps of rollouts in flight while the trainer computes.
        budget_s: seconds after which no further step begins.
    """
    return {
        "compact_model": str(setting.compact_model),
        "json_model": str(setting.json_model),
        "cache": str(cache),
        "rollouts": setting.rollouts.model_dump(mode="json"),
        "training": setting.training.model_dump(mode="json"),
        "inference": setting.inference.model_dump(mode="json"),
        "evaluation": evaluation.model_dump(mode="json"),
        "folder": str(setting.folder),
        "seed": setting.seed,
        "way": asdict(way),
        "steps": steps,
        "budget_s": budget_s,
        "depth": depth,
        "scores": scores,
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]))
