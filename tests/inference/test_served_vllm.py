"""vLLM's own server, as a run starts it: it draws the masked policy of every version, and a killed one is replaced unnoticed."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import psutil
import pytest

from game.board import Board
from inference.adapter_check import version_in
from inference.host import EngineHost
from inference.settings import InferenceSettings
from inference.supervisor import EngineSupervisor
from records.generation import Generation, GenerationRequest
from records.policy_version import PolicyVersion
from telemetry.errors import EngineError
from tests.telemetry.test_child import ROOT, is_gone

pytestmark = [pytest.mark.vllm, pytest.mark.system]
START_S = 300
SETTINGS = InferenceSettings(engine="vllm", max_model_length=512, max_sequences=32, adapter_slots=2, threads=1)


@pytest.fixture(scope="module")
def served(model: Path, host: EngineHost, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineSupervisor]:
    """A supervised server on the small model."""
    pytest.importorskip("vllm", reason="vLLM is not installed")
    from inference.served_vllm import ServedVllm

    log = tmp_path_factory.mktemp("served") / "vllm.log"
    engine = EngineSupervisor(lambda: ServedVllm(model, SETTINGS, log=log))
    try:
        host.submit(engine.start()).result(timeout=START_S)
        yield engine
    finally:
        host.submit(engine.close()).result(timeout=60)


@pytest.fixture(scope="module")
def versions(write_adapter, tmp_path_factory: pytest.TempPathFactory) -> list[PolicyVersion]:
    """Two adapters that move the odds, differently."""
    root = tmp_path_factory.mktemp("adapters")
    return [version_in(write_adapter(root / f"v{seed}", seed=seed, scale=0.3), seed) for seed in (1, 2)]


@pytest.fixture
def ask(positions, tokens) -> Callable[[int | None], list[GenerationRequest]]:
    """Requests for all powers of two positions, to be drawn under a version."""

    def build(version: int | None) -> list[GenerationRequest]:
        boards = [Board.restore(snapshot) for snapshot in positions[:2]]
        asked = [(board, legal) for board in boards for legal in board.legal_orders().values()]
        return [
            GenerationRequest(
                request_id=f"{version}/{place}",
                prompt_ids=tokens.prompt_ids(board, legal),
                table=tokens.tables.table(legal),
                seed=900 + place,
                temperature=0.8,
                version=version,
            )
            for place, (board, legal) in enumerate(asked)
        ]

    return build


def draw(host: EngineHost, engine: EngineSupervisor, requests: Sequence[GenerationRequest]) -> list[Generation]:
    async def all_at_once() -> list[Generation]:
        return await asyncio.gather(*(engine.generate(request) for request in requests))

    return host.submit(all_at_once()).result(timeout=2 * START_S)


def child_of(engine: EngineSupervisor) -> int:
    """Process id of the server."""
    return engine._engine.server.pid  # type: ignore[attr-defined]


def test_it_draws_what_the_torch_engine_draws_for_the_base_and_two_adapters_also_after_a_kill(
    served: EngineSupervisor, host: EngineHost, model: Path, ask, versions: list[PolicyVersion]
):
    from inference.torch_engine import TorchEngine

    async def publish(engine) -> None:
        for version in versions:
            await engine.publish(version)

    torch_engine = TorchEngine(model, SETTINGS.model_copy(update={"engine": "torch"}))
    host.submit(torch_engine.start()).result(timeout=60)
    for engine in served, torch_engine:
        host.submit(publish(engine)).result(timeout=60)
    requests = [request for version in (0, 1, 2) for request in ask(version)]
    expected = draw(host, torch_engine, requests)  # type: ignore[arg-type]
    host.submit(torch_engine.close()).result(timeout=30)
    assert len({tuple(each.token_ids) for each in expected}) > len(expected) / 2, "the versions draw differently"

    first, before = draw(host, served, requests), child_of(served)
    waiting = host.submit(served.generate(requests[-1]))
    os.kill(before, signal.SIGKILL)
    again = draw(host, served, requests)
    assert waiting.result(timeout=60).token_ids.tolist() == expected[-1].token_ids.tolist()
    assert served.restarts == 1 and child_of(served) != before
    for answers in first, again:
        for one, other, request in zip(answers, expected, requests, strict=True):
            assert one.token_ids.tolist() == other.token_ids.tolist() and one.policy.version == request.version
            assert np.abs(one.logprobs - other.logprobs).max() < 1e-4


def test_an_engine_core_that_is_killed_ends_its_server_and_both_are_replaced(served: EngineSupervisor, host: EngineHost, ask):
    before, restarts = child_of(served), served.restarts
    (expected, *_) = draw(host, served, ask(0)[:1])
    (core,) = [each for each in psutil.Process(before).children(recursive=True) if "EngineCore" in "".join(each.cmdline())]
    core.kill()
    (answer,) = draw(host, served, ask(0)[:1])
    assert answer.token_ids.tolist() == expected.token_ids.tolist()
    assert served.restarts == restarts + 1 and is_gone(before)


def test_a_model_that_vllm_cannot_load_is_refused_with_the_end_of_the_log(tmp_path: Path, host: EngineHost):
    from inference.served_vllm import ServedVllm

    (tmp_path / "config.json").write_text('{"model_type": "none", "eos_token_id": 0}')
    engine = ServedVllm(tmp_path, SETTINGS, log=tmp_path / "vllm.log")
    with pytest.raises(EngineError, match=r"(?s)ended with exit code 1; the last lines of its log.*model"):
        host.submit(engine.start()).result(timeout=START_S)
    host.submit(engine.close()).result(timeout=30)


def test_a_server_and_its_core_end_when_the_run_is_killed(model: Path, tmp_path: Path):
    seen = tmp_path / "seen"
    program = f"""
import asyncio
from pathlib import Path
from inference.served_vllm import ServedVllm
from inference.settings import InferenceSettings
async def play():
    engine = ServedVllm(Path({str(model)!r}), InferenceSettings.model_validate_json({SETTINGS.model_dump_json()!r}))
    await engine.start()
    Path({str(seen)!r}).write_text(f"{{engine.server.pid}};")
    await asyncio.sleep(600)
asyncio.run(play())
"""
    with subprocess.Popen([sys.executable, "-c", program], cwd=ROOT) as process:
        while not (seen.is_file() and seen.read_text().endswith(";")):
            assert process.poll() is None
        server = psutil.Process(int(seen.read_text()[:-1]))
        everyone = [server, *server.children(recursive=True)]
        process.send_signal(signal.SIGKILL)
    assert len(everyone) >= 2 and all(is_gone(each.pid) for each in everyone)
