"""A long run does not eat the machine."""

import json

import pytest

from storage.runs import RunPaths

pytestmark = pytest.mark.slow


def test_resident_memory_grows_by_less_than_100_mib_from_step_30_to_step_300(workplace, trained):
    """With start positions that are new at every step, so that no shape of a batch comes twice in a row."""
    words = ["--steps", "300", "--cache.train-snapshots", "200", "--cache.last-year", "1903"]
    done = workplace.process("train", "--config", "small.toml", "--run", "long", *words, timeout=3000)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in RunPaths(workplace.folder / "runs" / "long").metrics.read_text().splitlines()]
    flow = {line["step"]: line["memory/flow_mib"] for line in lines if "memory/flow_mib" in line}
    trainer = {line["step"]: line["memory/trainer_mib"] for line in lines if "memory/trainer_mib" in line}
    assert flow[300] - flow[30] < 100 and trainer[300] - trainer[30] < 100, (flow, trainer)
