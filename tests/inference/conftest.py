"""The engines that hold one contract, the reference model without and with adapters, and requests to draw."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from entente.decoding.table_builder import TableBuilder
from entente.game.board import Board
from entente.inference.engine import Engine
from entente.inference.host import EngineHost
from entente.inference.settings import InferenceSettings
from entente.inference.supervisor import EngineSupervisor
from entente.records.rows import GenerationRequest

KEY = "a key for the contract"


@pytest.fixture(scope="session")
def reference(model: Path) -> Any:
    """The small model as transformers runs it, in float32."""
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)


@pytest.fixture(scope="module")
def adapters(write_adapter, tmp_path_factory) -> list[Path]:
    """Two adapters that move the odds, differently."""
    root = tmp_path_factory.mktemp("adapters")
    return [write_adapter(root / f"adapter-{seed}", seed=seed, scale=0.3) for seed in (1, 2)]


@pytest.fixture(scope="module")
def adapted(model: Path, adapters: list[Path]) -> list[Any]:
    """The small model with each of them, as peft applies them."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    return [
        PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), str(adapter))
        for adapter in adapters
    ]


@pytest.fixture
def ask(positions, tokens, request) -> Callable[..., list[GenerationRequest]]:
    """Requests for all powers of some positions, with ids of their own: `ask("label", positions=3)`."""

    def build(
        label: str,
        *,
        positions_: int = 2,
        temperature: float = 1.0,
        version: int | None = None,
        tables: TableBuilder = tokens.tables,
    ) -> list[GenerationRequest]:
        found = []
        for snapshot in positions[:positions_]:
            board = Board.restore(snapshot)
            for legal in board.legal_orders().values():
                found.append(
                    GenerationRequest(
                        request_id=f"{request.node.name}/{label}/{len(found)}",
                        prompt_ids=tokens.prompt_ids(board, legal),
                        table=tables.table(legal),
                        seed=7000 + len(found),
                        temperature=temperature,
                        snapshot_id=snapshot.snapshot_id,
                        version=version,
                    )
                )
        return found

    return build


@dataclass
class Contender:
    """An engine under contract, ready to draw."""

    engine: Engine
    versions: Iterator[int] = field(default_factory=lambda: iter(range(100, 10_000)))
    """Numbers that it was never told."""


def _torch_contender(model: Path, host: EngineHost) -> Iterator[Contender]:
    from entente.inference.torch_engine import TorchEngine

    engine = TorchEngine(model, InferenceSettings(max_model_length=512, max_sequences=32))
    host.submit(engine.start()).result(timeout=60)
    yield Contender(engine)
    host.submit(engine.close()).result(timeout=30)


def _http_contender(model: Path, host: EngineHost) -> Iterator[Contender]:
    from entente.inference.vllm_client import VllmClient
    from tests.inference.vllm_double import VllmDouble

    server = VllmDouble(model, key=KEY)
    host.submit(server.start()).result(timeout=60)
    client = VllmClient((server.url,), InferenceSettings(max_model_length=512, max_sequences=32), model, KEY)
    host.submit(client.start()).result(timeout=60)
    yield Contender(client)
    host.submit(client.close()).result(timeout=30)
    host.submit(server.close()).result(timeout=30)


@pytest.fixture(scope="session")
def contract_torch(model: Path, host: EngineHost) -> Iterator[Contender]:
    yield from _torch_contender(model, host)


@pytest.fixture(scope="session")
def contract_http(model: Path, host: EngineHost) -> Iterator[Contender]:
    yield from _http_contender(model, host)


@pytest.fixture(params=["torch", "http"])
def fresh_contender(request: pytest.FixtureRequest, model: Path, host: EngineHost) -> Any:
    """An engine that may be closed."""
    if request.param == "torch":
        yield from _torch_contender(model, host)
    else:
        yield from _http_contender(model, host)


@pytest.fixture(scope="session")
def contract_served(model: Path, host: EngineHost, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Contender]:
    """vLLM's own server, as a run has it."""
    from entente.inference.served_vllm import ServedVllm

    settings = InferenceSettings(engine="vllm", max_model_length=512, max_sequences=32, adapter_slots=2, threads=1)
    log = tmp_path_factory.mktemp("served") / "vllm.log"
    engine = EngineSupervisor(lambda: ServedVllm(model, settings, log=log))
    host.submit(engine.start()).result(timeout=300)
    yield Contender(engine)
    host.submit(engine.close()).result(timeout=60)
