"""The engines that hold one contract, and the reference model."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from entente.inference.engine import Engine
from entente.inference.host import EngineHost
from entente.inference.settings import InferenceSettings
from entente.inference.supervisor import EngineSupervisor

KEY = "a key for the contract"


@pytest.fixture(scope="session")
def reference(model: Path) -> Any:
    """The small model as transformers runs it, in float32."""
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)


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

    settings = InferenceSettings(engine="vllm", max_model_length=512, max_sequences=32, adapter_slots=32, threads=1)
    log = tmp_path_factory.mktemp("served") / "vllm.log"
    engine = EngineSupervisor(lambda: ServedVllm(model, settings, log=log))
    host.submit(engine.start()).result(timeout=300)
    yield Contender(engine)
    host.submit(engine.close()).result(timeout=60)
