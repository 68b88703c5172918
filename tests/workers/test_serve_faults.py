"""Two real workers, vLLM and all, in processes of their own: an engine that dies, a version that comes, a kill half-way.

Whatever happened, each row's log-probabilities are those of a plain float32 forward under the adapter that the row names.
"""

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from decoding.model_files import model_fingerprint
from game.board import POWERS
from inference.adapter_check import adapter_hash_of, version_in
from inference.settings import InferenceSettings
from records.generation import GenerationRequest
from rollouts.roll_out import RolledOut, plan_start_groups, roll_out
from rollouts.settings import RolloutSettings
from tests.command import ROOT
from workers.pool import RemoteEngine
from workers.pool_worker import PoolTimes

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
MORTAL = """
import os
from inference.embedded import EmbeddedEngine

plain = EmbeddedEngine._step

def step(self):
    mark = os.environ["DEATH_MARK"]
    if self._answers and self._engine is not None and os.path.exists(mark):
        os.unlink(mark)
        def fails():
            raise RuntimeError("struck by the test")
        self._engine.step = fails
    plain(self)

EmbeddedEngine._step = step
from cli.main import main
main()
"""
"""`entente`, whose vLLM engine dies in a step, with its requests in flight, as soon as a file appears."""


class Served:
    """`entente serve` in a process."""

    def __init__(self, model: Path, root: Path, name: str) -> None:
        self.name, self.mark, self._log = name, root / f"{name}-dies", (root / f"{name}.log").open("w")
        words = ["serve", "--model", str(model), "--port", "0", "--adapters-root", str(root), "--name", name]
        words += ["--max-model-length", "512", "--max-sequences", "16", "--adapters", "merge_reload", "--threads", "1"]
        self.process = subprocess.Popen(
            [sys.executable, "-c", MORTAL, *words],
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=os.environ | {"PYTHONPATH": str(ROOT), "DEATH_MARK": str(self.mark)},
        )
        self.url = ""

    def wait(self) -> "Served":
        assert self.process.stdout is not None
        found = re.search(r"http://\S+", self.process.stdout.readline())
        assert found, Path(self._log.name).read_text()
        self.url = found[0]
        return self

    def close(self) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(timeout=60)
        assert self.process.stdout is not None
        self.process.stdout.close()
        self._log.close()
        return code


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory, write_adapter: Callable[..., Path]) -> Path:
    root = tmp_path_factory.mktemp("served")
    for version in (1, 2):
        write_adapter(root / f"v{version}", seed=version, scale=0.3)
    return root


@pytest.fixture(scope="module")
def served(model: Path, adapters: Path) -> Iterator[list[Served]]:
    both = [Served(model, adapters, name) for name in ("one", "other")]
    yield [one.wait() for one in both]
    codes = [one.close() for one in both]
    assert codes == [-signal.SIGKILL, 0], "one was killed, the other was told to end"


@pytest.fixture
def pool(served: list[Served], host, model: Path) -> Iterator[RemoteEngine]:
    settings = InferenceSettings(urls=tuple(one.url for one in served))
    pool = RemoteEngine(settings, None, model_fingerprint(model), times=PoolTimes(heartbeat=20.0))
    host.submit(pool.start()).result(timeout=120)
    yield pool
    host.submit(pool.close()).result(timeout=20)


@pytest.fixture(scope="module")
def policies(model: Path, adapters: Path) -> dict[int, Any]:
    """The policy of each version as transformers and peft run it, in float32."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    def base() -> Any:
        return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()

    return {0: base()} | {version: PeftModel.from_pretrained(base(), str(adapters / f"v{version}")) for version in (1, 2)}


async def publish(pool: RemoteEngine, adapters: Path, version: int) -> None:
    await pool.publish(version_in(adapters / f"v{version}", version))


def largest_gap(played: RolledOut, policies: dict[int, Any]) -> float:
    """Between the rows' log-probabilities and those of plain forwards, masked by the rows' own legal sets."""
    import torch

    worst = 0.0
    for row in played.decisions:
        with torch.no_grad():
            logits = policies[row.policy_version](input_ids=torch.tensor([row.input_ids.tolist()])).logits[0].double()
        for position, token in enumerate(row.input_ids[row.prompt_len :].tolist()):
            legal = row.legal_ids[row.legal_offsets[position] : row.legal_offsets[position + 1]].tolist()
            at = logits[row.prompt_len + position - 1]
            expected = float(at[token] - torch.logsumexp(at[legal], 0))
            worst = max(worst, abs(expected - float(row.behaviour_logprobs[position])))
    return worst


def play(host, pool, tokens, positions, events: dict[int, Callable[[], Any]]) -> RolledOut:
    """Roll out, and have something happen at the start of some requests, by number."""
    settings = RolloutSettings(start_groups=len(positions), policy_powers="all", forks_per_group=3, horizon_years=1)
    groups = plan_start_groups([(snapshot, POWERS[0]) for snapshot in positions], 0, settings)
    asked, ask, begun = 0, pool.generate, []

    async def watched(request: GenerationRequest):
        nonlocal asked
        asked += 1
        if asked in events and (work := events[asked]()) is not None:
            begun.append(asyncio.ensure_future(work))
        return await ask(request)

    async def all_of_it() -> RolledOut:
        pool.generate = watched
        try:
            played = await roll_out(groups, pool, tokens, settings, producer="local", seed=len(events))
        finally:
            pool.generate = ask
        await asyncio.gather(*begun)
        return played

    return host.submit(all_of_it()).result(timeout=300)


def check_rows(played: RolledOut, policies: dict[int, Any], adapters: Path) -> Counter[int]:
    assert played.failed_forks == 0 and len(played.decisions) > 80
    assert len({row.decision_id for row in played.decisions}) == len(played.decisions)
    hashes = {0: "base"} | {version: adapter_hash_of(adapters / f"v{version}") for version in (1, 2)}
    assert all(row.adapter_hash == hashes[row.policy_version] for row in played.decisions)
    assert sum(np.count_nonzero(row.behaviour_logprobs) for row in played.decisions) > 500
    assert largest_gap(played, policies) < 1e-4
    return Counter(row.policy_version for row in played.decisions)


def test_an_engine_that_dies_in_a_worker_comes_back_with_its_version_and_every_row_is_right(
    host, pool, served, tokens, positions, adapters, policies
):
    host.submit(publish(pool, adapters, 1)).result(timeout=60)
    played = play(host, pool, tokens, positions[:2], {40: served[1].mark.touch})
    assert not served[1].mark.exists(), "no engine died"
    assert set(check_rows(played, policies, adapters)) == {1}
    told = host.submit(pool._roster.workers[1].health(pool._roster.session, 10)).result(timeout=10)
    assert told["restarts"] == 1 and told["ready"] and told["policy_version"] == 1


def test_a_version_comes_and_a_worker_is_killed_half_way_and_every_row_is_right(
    host, pool, served, tokens, positions, adapters, policies
):
    """This pool knows of no version at first, so its workers go back to the base before they draw."""
    played = play(host, pool, tokens, positions[:3], {80: lambda: publish(pool, adapters, 2), 110: served[0].process.kill})
    versions = check_rows(played, policies, adapters)
    assert set(versions) == {0, 2} and min(versions.values()) > 10
    events = pool.events()
    assert events["ejections"] >= 3 and events["retries"] >= 1 and events["rejected_answers"] == 0
    assert [worker.state for worker in pool._roster.workers] == ["ejected", "living"]
    assert {row.worker for row in played.decisions} == {"one", "other"}
