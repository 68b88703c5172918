"""The program that measures what LoRA slots cost: engines that differ in one thing, passes over them in turn.

    python -m tuning.lora_tax JOB

Where memory allows, all engines stand at once and the arms alternate pass by pass; else each round starts them one after another.
On a CPU its CPU seconds are compared, on a GPU the clock's. Adapters have random weights: their size is what costs.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from inference.settings import InferenceSettings
from records.generation import GenerationRequest
from tuning.candidate import Say, main
from tuning.lora_arms import ARMS, VERSIONS, Arm, costs


async def tax(told: dict[str, Any], say: Say) -> None:
    """Measure the arms of a job: model, requests, settings of each engine, rank of the adapters, rounds."""
    from tuning.requests import read_requests

    model, requests = Path(told["model"]), read_requests(Path(told["requests"]), Path(told["model"]))
    settings = {name: InferenceSettings.model_validate(each) for name, each in told["engines"].items()}
    clock = time.perf_counter if told["on_gpu"] else time.process_time
    adapters = _adapters(Path(told["scratch"]), model, told["adapter_rank"])
    seconds: dict[str, list[float]] = {}
    first: dict[str, float] = {}
    measure = _together if told["together"] else _one_by_one
    await measure(model, settings, requests, adapters, told["rounds"], clock, seconds, first, say)
    say({"costs": costs(seconds, first), "seconds": seconds, "clock": "clock" if told["on_gpu"] else "CPU"})


async def _together(
    model: Path,
    settings: dict[str, InferenceSettings],
    requests: Sequence[GenerationRequest],
    adapters: list[Path],
    rounds: int,
    clock: Callable[[], float],
    seconds: dict[str, list[float]],
    first: dict[str, float],
    say: Say,
) -> None:
    """All engines at once, arms in turn."""
    async with AsyncExitStack() as stack:
        engines = {name: await _started(stack, model, each, name) for name, each in settings.items()}
        say({"ready": 0.0})
        arms = [arm for arm in ARMS if arm.engine in engines]
        for number in range(rounds + 1):
            for arm in arms if number % 2 else reversed(arms):
                spent = _pass(engines[arm.engine], requests, arm, adapters, f"{arm.name}/{number}", clock)
                _note(arm, spent, number, seconds, first)
            say({"round": number})


async def _one_by_one(
    model: Path,
    settings: dict[str, InferenceSettings],
    requests: Sequence[GenerationRequest],
    adapters: list[Path],
    rounds: int,
    clock: Callable[[], float],
    seconds: dict[str, list[float]],
    first: dict[str, float],
    say: Say,
) -> None:
    """One engine at a time, each round anew; every arm is warmed up in each."""
    for number in range(1, rounds + 1):
        for name, each in settings.items():
            async with AsyncExitStack() as stack:
                engine = await _started(stack, model, each, name)
                say({"ready": 0.0})
                for arm in (arm for arm in ARMS if arm.engine == name):
                    for turn in (0, number):
                        spent = _pass(engine, requests, arm, adapters, f"{arm.name}/{turn}", clock)
                        _note(arm, spent, turn, seconds, first)
        say({"round": number})


def _note(arm: Arm, spent: float, number: int, seconds: dict[str, list[float]], first: dict[str, float]) -> None:
    """The first pass of an arm is its warm-up."""
    if number:
        seconds.setdefault(arm.name, []).append(spent)
    else:
        first.setdefault(arm.name, spent)


async def _started(stack: AsyncExitStack, model: Path, settings: InferenceSettings, name: str) -> Any:
    from inference.embedded import EmbeddedEngine

    engine = EmbeddedEngine(model, settings, name=name)
    await engine.start()
    stack.push_async_callback(engine.close)
    return engine


def _adapters(scratch: Path, model: Path, rank: int) -> list[Path]:
    """A folder for each version, from version 1 on."""
    from inference.calibrate import write_noise

    found = []
    for version in range(1, VERSIONS + 1):
        folder = scratch / f"v{version}"
        folder.mkdir()
        found.append(write_noise(folder, model, rank))
    return found


def _pass(
    engine: Any, requests: Sequence[GenerationRequest], arm: Arm, adapters: list[Path], label: str, clock: Callable[[], float]
) -> float:
    """Seconds of all requests of an arm, by vLLM's own calls: our engine neither loads in place nor takes too many versions."""
    from vllm.lora.request import LoRARequest

    from inference.sampling import prompt_ids, sampling_params

    vllm = engine._engine
    vllm.reset_prefix_cache()
    began = clock()
    for number, request in enumerate(requests):
        version = arm.versions[number % len(arm.versions)]
        lora = LoRARequest(f"v{version}", version, str(adapters[version - 1]), load_inplace=arm.in_place) if version else None
        prompt = {"prompt_token_ids": prompt_ids(request)}
        vllm.add_request(f"{label}/{number}", prompt, sampling_params(request, engine._eos_id), lora_request=lora)
    left = len(requests)
    while left:
        left -= sum(output.finished for output in vllm.step())
    return clock() - began


if __name__ == "__main__":
    main(tax)
