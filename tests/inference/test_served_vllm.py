"""vLLM's own server, as a run starts it: it draws the masked policy of every version, and a killed one is replaced unnoticed."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import psutil
import pytest

from entente.game.board import Board
from entente.inference.host import EngineHost
from entente.inference.settings import InferenceSettings
from entente.inference.supervisor import EngineSupervisor
from entente.records.policy_version import PolicyVersion, version_in
from entente.records.rows import Generation, GenerationRequest
from tests.inference.conftest import Contender
from tests.telemetry.test_child import is_gone

pytestmark = [pytest.mark.vllm, pytest.mark.system]
START_S = 300
SETTINGS = InferenceSettings(engine="torch", max_model_length=512, max_sequences=32)


@pytest.fixture
def versions(contract_served: Contender, write_adapter, tmp_path: Path) -> list[PolicyVersion]:
    """Two adapters that move the odds, differently."""
    return [
        version_in(write_adapter(tmp_path / f"v{seed}", seed=seed, scale=0.3), next(contract_served.versions)) for seed in (1, 2)
    ]


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


def sample(host: EngineHost, engine: EngineSupervisor, requests: Sequence[GenerationRequest]) -> list[Generation]:
    async def all_at_once() -> list[Generation]:
        return await asyncio.gather(*(engine.generate(request) for request in requests))

    return host.submit(all_at_once()).result(timeout=2 * START_S)


def child_of(engine: EngineSupervisor) -> int:
    """Process id of the server."""
    return engine._engine.server.pid  # type: ignore[attr-defined]


def test_it_draws_what_the_torch_engine_draws_for_the_base_and_two_adapters_also_after_its_core_was_killed(
    contract_served: Contender, host: EngineHost, model: Path, ask, versions: list[PolicyVersion]
):
    from entente.inference.torch_engine import TorchEngine

    served = contract_served.engine
    assert isinstance(served, EngineSupervisor)

    async def publish(engine) -> None:
        for version in versions:
            await engine.publish(version)

    torch_engine = TorchEngine(model, SETTINGS)
    host.submit(torch_engine.start()).result(timeout=60)
    for engine in served, torch_engine:
        host.submit(publish(engine)).result(timeout=60)
    requests = [request for version in (0, *(each.version for each in versions)) for request in ask(version)]
    expected = sample(host, torch_engine, requests)  # type: ignore[arg-type]
    host.submit(torch_engine.close()).result(timeout=30)
    assert len({tuple(each.token_ids) for each in expected}) > len(expected) / 2, "the versions draw differently"

    first, before = sample(host, served, requests), child_of(served)
    (core,) = [each for each in psutil.Process(before).children(recursive=True) if "EngineCore" in "".join(each.cmdline())]
    waiting = host.submit(served.generate(requests[-1]))
    core.kill()
    again = sample(host, served, requests)
    assert waiting.result(timeout=60).token_ids.tolist() == expected[-1].token_ids.tolist()
    assert served.restarts == 1 and is_gone(before), "the server ends with its core, and both are replaced"
    for answers in first, again:
        for one, other, request in zip(answers, expected, requests, strict=True):
            assert one.token_ids.tolist() == other.token_ids.tolist() and one.policy.version == request.version
            assert np.abs(one.logprobs - other.logprobs).max() < 1e-4
