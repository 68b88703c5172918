"""The worker gives the same answers as the engine in this process, and lets nobody do what they should not."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from decoding.model_files import model_fingerprint
from inference.host import EngineHost
from inference.settings import InferenceSettings
from rollouts.fork import POLICY, ForkPlan, play_fork
from workers.pool import RemoteEngine

pytestmark = [pytest.mark.vllm, pytest.mark.system]
KEY = "a key for the tests"


@pytest.fixture(scope="module")
def worker(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """`entente serve` on a port of its own choosing; its address and the folder its adapters may come from."""
    root = tmp_path_factory.mktemp("worker")
    command = [
        sys.executable,
        "-m",
        "cli.main",
        "serve",
        "--model",
        str(model),
        "--port",
        "0",
        "--adapters-root",
        str(root),
    ]
    command += ["--max-model-length", "512", "--max-sequences", "32", "--adapters", "merge_reload", "--name", "embedded"]
    log = (root / "worker.log").open("w")
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=os.environ | {"ENTENTE_KEY": KEY})
    assert process.stdout is not None
    line = process.stdout.readline()
    found = re.search(r"http://\S+", line)
    assert found, (root / "worker.log").read_text()
    yield found[0], root
    process.send_signal(signal.SIGTERM)
    process.wait(timeout=30)
    process.stdout.close()
    log.close()


@pytest.fixture
def remote(worker, host: EngineHost, model: Path) -> Iterator[RemoteEngine]:
    engine = RemoteEngine(InferenceSettings(urls=(worker[0],), max_sequences=32), KEY, model_fingerprint(model))
    host.submit(engine.start()).result(timeout=60)
    yield engine
    host.submit(engine.close()).result(timeout=10)


def test_worker_and_embedded_engine_give_the_same_course(host, remote, vllm_engine, positions, tokens):
    """One fork for each of several positions, all seven powers played: same tokens, same logprobs, same boards."""
    from game.board import POWERS, Board

    async def play(engine, number: int):
        plan = ForkPlan(
            name=f"same/{number}",
            shared_name=f"same/{number}",
            seats=dict.fromkeys(POWERS, POLICY),
            horizon_years=1,
            temperature=1.0,
            snapshot_id=positions[number].snapshot_id,
        )
        return await play_fork(plan, Board.restore(positions[number]), engine, tokens)

    for number in range(3):
        here = host.submit(play(vllm_engine, number)).result(timeout=120)
        there = host.submit(play(remote, number)).result(timeout=120)
        assert there.status == "complete" and [ply.position for ply in there.plies] == [ply.position for ply in here.plies]
        for one, other in zip(here.decisions, there.decisions, strict=True):
            assert one.drawn.generation.token_ids.tolist() == other.drawn.generation.token_ids.tolist()
            assert abs(one.drawn.generation.logprobs - other.drawn.generation.logprobs).max() < 1e-5
