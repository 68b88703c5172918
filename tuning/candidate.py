"""The program of a candidate's process: starts an engine, measures both arms and writes messages as lines of JSON.

    python -m tuning.candidate JOB

JOB is a file that `process.run_program` wrote. Messages go to the original standard output; the output of vLLM goes to the log.
The standard input closes when the parent process ends; then this process group ends as well.
"""

import asyncio
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from records.policy_version import PolicyVersion
from telemetry.errors import EntenteError
from telemetry.parent import end_with_pipe
from tuning.figures import ARMS, arm_figures
from tuning.job import Job

Say = Callable[[dict[str, Any]], None]


def main(work: Callable[[dict[str, Any], Say], Any]) -> None:
    """Run `work` on the job of the command line and send its messages to the parent process."""
    channel = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    end_with_pipe()

    def say(message: dict[str, Any]) -> None:
        channel.write(json.dumps(message) + "\n")
        channel.flush()

    try:
        asyncio.run(work(json.loads(Path(sys.argv[1]).read_text()), say))
    except Exception as error:
        traceback.print_exc()
        say({"failed": _in_a_sentence(error)})
        sys.exit(1)
    # Threads of vLLM may still run, so end the process without waiting for them.
    sys.stderr.flush()
    os._exit(0)


def _in_a_sentence(error: BaseException) -> str:
    """The error and its cause as one sentence; the cause is also written to the end of the log."""
    sentence = str(error) if isinstance(error, EntenteError) else f"{type(error).__name__}: {error}"
    if (cause := error.__cause__) is not None:
        sys.stderr.write(f"{type(cause).__name__}: {cause}\n")
        sentence += f" ({cause})"
    return " ".join(sentence.split())[:500]


async def measure(given: dict[str, Any], say: Say) -> None:
    """Measure the candidate of a job."""
    from inference.choose_engine import choose_engine, engine_here
    from tuning.measure import both_arms
    from tuning.requests import read_requests

    job = Job.from_object(given)
    requests = read_requests(job.requests, job.model)
    began = time.perf_counter()
    engine = choose_engine(job.settings, job.model, name="candidate")
    await engine.start()
    mode = str(getattr(engine, "adapters", "slots"))
    say({"ready": time.perf_counter() - began, "engine": engine_here(job.settings)[0], "adapters": mode})

    async def publish() -> None:
        await engine.publish(policy_of(job, Path(given["scratch"])))

    load = {"concurrency": job.concurrency, "request_rate": job.request_rate, "seed": job.seed}
    passes = await both_arms(
        engine,
        requests,
        publish,
        interleaved=mode == "slots",
        rounds=job.rounds,
        load=load,
        on_pass=lambda arm, done: say({"pass": done, "arm": arm}),
    )
    say({"arms": {arm: asdict(arm_figures(passes[arm])) for arm in ARMS}, "cpu_s": time.process_time()})


def policy_of(job: Job, scratch: Path) -> PolicyVersion:
    """The adapter to serve as version 1: that of the run, or random weights written to `scratch`."""
    from inference.adapter_check import version_in
    from inference.calibrate import write_random_adapter

    if job.policy is not None:
        return replace(job.policy, version=1)
    return version_in(write_random_adapter(scratch, job.model, job.adapter_rank), 1)


if __name__ == "__main__":
    main(measure)
