"""The trainer of the stage `shared-card`: its process trains made-up rows while another one draws.

    python -m smoke.beside --folder FOLDER --device cpu|cuda --model MODEL --shape SHAPE

It warms up, prints `{"ready": ...}` with the time of a step alone, and waits for a line. Then it trains until the standard input
closes, and prints its figures.
"""

import json
import os
import select
import sys
import time
from statistics import median
from typing import Any

from smoke.job import figures_so_far
from smoke.recommend import recommend
from smoke.stage import parse_job


def main() -> None:
    """Train beside the engine."""
    channel = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    job = parse_job(sys.argv[1:])
    import psutil
    import torch

    from benchmarks.trainer_arms import Arms
    from smoke.models import RANK, model_folder, shape_of
    from smoke.training_step import CASES, wall_s

    model, device = model_folder(job), torch.device(job.device)
    arms = Arms(shape_of(model), device, getattr(torch, job.dtype), RANK, model)
    batch = arms.batch(next(iter(CASES[job.device].values())))
    advised = {each.name: each.value for each in recommend(job.device, figures_so_far(job))}
    how: dict[str, Any] = {"token_budget": advised.get("training.token_budget", 2048)}
    step = arms.ours(**how, recompute=bool(advised.get("training.recompute", False)))
    step(batch)
    alone = median(wall_s(lambda: step(batch), device) for _ in range(3))
    channel.write(json.dumps({"ready": True, "step_alone_s": alone}) + "\n")
    sys.stdin.readline()
    times, began = [], time.monotonic()
    while not times or not select.select([sys.stdin], [], [], 0)[0]:
        times.append(wall_s(lambda: step(batch), device))
    peak = torch.cuda.max_memory_reserved(device) if job.device == "cuda" else psutil.Process().memory_info().rss
    found = {"step_beside_s": median(times), "trainer_bytes": peak, "steps": len(times), "trained_s": time.monotonic() - began}
    channel.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
