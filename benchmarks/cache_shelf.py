"""`cache`: the cost of building a state cache and of reading it."""

import tempfile
from pathlib import Path
from statistics import mean

from benchmarks.outcome import Outcome, Target, cpu_seconds, median_ms
from state_cache.build import build
from state_cache.settings import CacheSettings
from state_cache.store import open_cache, write_cache
from telemetry.errors import InputError

HELD_OUT_SHARE = 0.1
"""Share of held-out positions."""
MEASURED = 1000
"""Number of positions for which times are stated."""
TARGETS = {
    "build_cpu_s": Target(at_most=60.0),
    "load_ms": Target(at_most=50.0),
    "bytes_per_snapshot": Target(at_most=2500.0),
}


def bench_cache(*, positions: int = MEASURED, rounds: int = 5, seed: int = 0) -> Outcome:
    """Build, write and read a cache of `positions` positions of random and `mover` players; times are for 1,000 positions.

    Raises:
        InputError: there are too few positions for two parts, or no rounds.
    """
    held_out = round(positions * HELD_OUT_SHARE)
    if held_out < 1 or rounds < 1:
        raise InputError(f"There is nothing to measure in {positions} positions and {rounds} rounds: at least 10 and 1.")
    settings = CacheSettings(
        train_snapshots=positions - held_out,
        held_out_snapshots=held_out,
        first_year=1902,
        last_year=1907,
        players=("random", "mover"),
        seed=seed,
    )
    sides = []
    build_s = cpu_seconds(lambda: sides.extend(build(settings)))
    train, kept = sides
    with tempfile.TemporaryDirectory() as folder:
        path = write_cache(Path(folder), settings, train, kept)
        on_disk = sum(file.stat().st_size for file in path.iterdir())
        load_ms = median_ms(lambda: open_cache(path), rounds=rounds, calls=1)
    scale = MEASURED / positions
    metrics = {
        "positions": float(positions),
        "build_cpu_s": build_s * scale,
        "load_ms": load_ms * scale,
        "bytes_per_snapshot": mean(len(snapshot.position.encode()) for snapshot in (*train, *kept)),
        "disk_bytes_per_snapshot": on_disk / positions,
    }
    # Times of fewer positions are only scaled up, although opening a cache has a fixed cost too.
    scaled_down = {"build_cpu_s", "load_ms"} if positions < MEASURED else set()
    targets = {name: target for name, target in TARGETS.items() if name not in scaled_down}
    return Outcome(benchmark="cache", metrics=metrics, targets=targets)
