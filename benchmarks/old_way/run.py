"""A training run of the old way in its own process: `python -m benchmarks.old_way.run SPEC.json`.

As the old system's loop: rollouts of `depth` steps are in flight while the trainer, another process, computes; a step begins when
all of its rollouts are done; the new version replaces the previous one. Two bugs are not repeated: its queue lost the order of
rollouts on a time-out, and its weights were published a step late. Prints one line of JSON for each step, then the scores.

With a depth of 0 rollouts and training alternate and each may use all cores; else they share the cores. The engine's threads are
those of `OMP_NUM_THREADS`, the trainer's those of the specification.

The run ends after its budget of seconds, but not before MEASURED_AT_LEAST steps after the first, which warms up, and not before
the scored step. Scored are the base, the newest version within the budget, and the version of the scored step. The budget counts
from the start of the first step, as the seconds of the other arm do.
"""

import asyncio
import itertools
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.old_way.ways import Way

MEASURED_AT_LEAST = 5
"""Least number of steps after the first, which warms up."""
_AFTER_ALL = 1_000_000
"""Number under which the first scored version is served."""


def main(spec_file: Path) -> None:
    """Run the specification in a file (see `spec_of`)."""
    spec = json.loads(spec_file.read_text())
    here, there = multiprocessing.Pipe()
    child = multiprocessing.get_context("spawn").Process(target=_train, args=(there, spec), daemon=True)
    child.start()  # before vLLM is imported and changes the environment
    there.close()
    try:
        asyncio.run(_run(spec, here))
    finally:
        here.close()
        child.join(timeout=20)


def _print(**values: Any) -> None:
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
    """The trainer process: receives step numbers, sends what it learned with wall and CPU seconds; ends with the pipe."""
    os.environ["OMP_NUM_THREADS"] = str(spec["trainer_threads"])  # before torch is imported
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

    arm = Arm("run", Way(**spec["way"]), _setting(spec), trains=False)
    await arm.start()
    await asyncio.to_thread(pipe.recv)
    try:
        scored = spec["scored_step"]
        found = {"base": await _score(spec, arm)} if scored else {}
        ended = await _steps(spec, arm, pipe)
        if scored:
            versions = {"span": newest_within(spec["budget_s"], ended), "steps_scored": ended[scored - 1][1]}
            for number, (name, learned) in enumerate(versions.items()):
                if learned is not None:
                    await arm.serve(_AFTER_ALL + number, learned)
                found[name] = found["base"] if learned is None else await _score(spec, arm)
            _print(**found)
    finally:
        await arm.close()


async def _score(spec: dict[str, Any], arm: Any) -> dict[str, Any]:
    """Mean centres gained on held-out positions, measured as for a run, and the interval (`ci`; None for too few games)."""
    from benchmarks.old_way.play import Ask
    from evaluation.settings import EvaluationSettings
    from evaluation.strength import measure_strength
    from state_cache.store import open_cache

    class OldWay:
        async def decide(self, request: Any) -> list[str]:
            name = f"{request.game}/0/{request.ply}/{request.power}"
            (answer,) = await arm.table.draw([Ask(name=name, board=request.board, legal=request.legal)])
            return answer.orders

    settings = EvaluationSettings.model_validate(spec["evaluation"])
    held_out = open_cache(Path(spec["cache"])).held_out
    found = await measure_strength("old way", settings.opponents[0], held_out, settings, decider=OldWay())
    return {"mean": found.mean, "ci": found.estimate.rounded()}


async def _steps(spec: dict[str, Any], arm: Any, pipe: Connection) -> list[tuple[float, Any]]:
    """Steps until the run may end; returns what each learned, with the seconds from the start of the first step to its end."""
    depth, ended = spec["depth"], []
    in_flight: dict[int, asyncio.Task[Any]] = {}
    seconds = _clock()
    began = time.perf_counter()
    for step in itertools.count(1):
        for ahead in range(step, step + depth + 1):
            if ahead not in in_flight:
                in_flight[ahead] = asyncio.create_task(arm.roll_out(ahead))
        arm.publish_rows(step, await in_flight.pop(step))
        if depth:
            in_flight[step + depth + 1] = asyncio.create_task(arm.roll_out(step + depth + 1))
        pipe.send(step)
        learned, train_s, cpu_s = await asyncio.to_thread(pipe.recv)
        await arm.serve(step, learned)
        wall_s, own_cpu_s = seconds()
        spent_s = time.perf_counter() - began
        ended.append((spent_s, learned))
        _print(
            step=step,
            ended_s=spent_s,
            wall_s=wall_s,
            cpu_s=own_cpu_s + cpu_s,
            train_s=train_s,
            start_groups=arm.setting.rollouts.start_groups,
            trained=learned.trained,
        )
        if may_end(step, spent_s, budget_s=spec["budget_s"], scored_step=spec["scored_step"]):
            break
    for task in in_flight.values():
        task.cancel()
    await asyncio.gather(*in_flight.values(), return_exceptions=True)
    return ended


def may_end(step: int, spent_s: float, *, budget_s: float, scored_step: int) -> bool:
    """Whether the run may end after `step`, `spent_s` seconds after the start of its first step."""
    return spent_s >= budget_s and step >= max(1 + MEASURED_AT_LEAST, scored_step)


def newest_within(budget_s: float, ended: Sequence[tuple[float, Any]]) -> Any:
    """What the last step within the budget learned; None if no step ended within it.

    Args:
        ended: for each step the seconds from the start of the first step to its end, and what it learned.
    """
    return next((learned for spent_s, learned in reversed(ended) if spent_s <= budget_s), None)


def _clock() -> Callable[[], tuple[float, float]]:
    """Wall and CPU seconds since the last call."""
    last = [time.perf_counter(), time.process_time()]

    def since() -> tuple[float, float]:
        now = [time.perf_counter(), time.process_time()]
        spent = now[0] - last[0], now[1] - last[1]
        last[:] = now
        return spent

    return since


def spec_of(
    *,
    setting: Any,
    cache: Path,
    evaluation: Any,
    budget_s: float,
    depth: int,
    scored_step: int,
    way: Way,
    trainer_threads: int,
) -> dict[str, Any]:
    """The specification that `main` reads, as JSON.

    Args:
        setting: a `Setting`, whose positions are those of `cache`.
        budget_s: seconds from the start of the first step after which the run ends, once it has all steps that it needs.
        depth: steps of rollouts in flight while the trainer computes.
        scored_step: step whose version is scored, beside the base and the newest version within the budget; 0: no scores.
        trainer_threads: CPU threads of the trainer's process.
    """
    return {
        **{name: str(getattr(setting, name)) for name in ("compact_model", "json_model", "folder")},
        **{name: getattr(setting, name).model_dump(mode="json") for name in ("rollouts", "training", "inference")},
        "cache": str(cache),
        "evaluation": evaluation.model_dump(mode="json"),
        "seed": setting.seed,
        "way": asdict(way),
        "budget_s": budget_s,
        "depth": depth,
        "scored_step": scored_step,
        "trainer_threads": trainer_threads,
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]))
