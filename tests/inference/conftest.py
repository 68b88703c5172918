"""The engines that hold one contract, and the reference model."""

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from decoding.model_files import model_fingerprint
from inference.adapter_check import version_in
from inference.engine import Engine
from inference.host import EngineHost
from inference.settings import InferenceSettings

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
    many_versions: bool
    """It can draw under two versions at the same time."""
    versions: Iterator[int] = field(default_factory=lambda: iter(range(100, 10_000)))
    """Numbers that it was never told."""


class OneWorker:
    """A worker over a torch engine in this process, on a socket, and a client of it."""

    def __init__(self, model: Path, adapters_root: Path, host: EngineHost, vocabulary_size: int) -> None:
        import uvicorn

        from inference.torch_engine import TorchEngine
        from workers.pool import RemoteEngine
        from workers.worker import bind, worker_app

        self._host = host
        self._inner = TorchEngine(model, InferenceSettings(max_model_length=512, max_sequences=32), name="behind-http")
        host.submit(self._inner.start()).result(timeout=60)
        listener = bind("127.0.0.1", 0, KEY)
        app = worker_app(self._inner, host, model, adapters_root, KEY, vocabulary_size)
        self._server = uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False))
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [listener]}, daemon=True)
        self._thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        self.client = RemoteEngine(InferenceSettings(urls=(url,), max_sequences=32), KEY, model_fingerprint(model))
        host.submit(self.client.start()).result(timeout=60)

    def close(self) -> None:
        self._host.submit(self.client.close()).result(timeout=30)
        self._server.should_exit = True
        self._thread.join(timeout=30)
        self._host.submit(self._inner.close()).result(timeout=30)


def _torch_contender(model: Path, host: EngineHost) -> Iterator[Contender]:
    from inference.torch_engine import TorchEngine

    engine = TorchEngine(model, InferenceSettings(max_model_length=512, max_sequences=32))
    host.submit(engine.start()).result(timeout=60)
    yield Contender(engine, many_versions=True)
    host.submit(engine.close()).result(timeout=30)


def _http_contender(model: Path, host: EngineHost, vocabulary_size: int, adapters_root: Path) -> Iterator[Contender]:
    worker = OneWorker(model, adapters_root, host, vocabulary_size)
    yield Contender(worker.client, many_versions=True)
    worker.close()


@pytest.fixture(scope="session")
def contract_torch(model: Path, host: EngineHost) -> Iterator[Contender]:
    yield from _torch_contender(model, host)


@pytest.fixture(scope="session")
def contract_http(model: Path, host: EngineHost, tokens: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Contender]:
    yield from _http_contender(model, host, tokens.codec.vocabulary_size, tmp_path_factory.getbasetemp())


@pytest.fixture(params=["torch", "http"])
def fresh_contender(request: pytest.FixtureRequest, model: Path, host: EngineHost, tokens: Any, tmp_path: Path) -> Any:
    """An engine that may be closed."""
    if request.param == "torch":
        yield from _torch_contender(model, host)
    else:
        yield from _http_contender(model, host, tokens.codec.vocabulary_size, tmp_path)


@pytest.fixture(scope="session")
def contract_vllm(vllm_engine: Engine) -> Contender:
    return Contender(vllm_engine, many_versions=False)


@pytest.fixture(scope="session")
def contract_slots(model: Path, host: EngineHost) -> Iterator[Contender]:
    from inference.embedded import EmbeddedEngine

    settings = InferenceSettings(max_model_length=512, max_sequences=32, adapters="slots", adapter_slots=32)
    engine = EmbeddedEngine(model, settings, name="slots")
    host.submit(engine.start()).result(timeout=300)
    yield Contender(engine, many_versions=True)
    host.submit(engine.close()).result(timeout=60)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("contract_torch", id="torch"),
        pytest.param("contract_http", id="http"),
        pytest.param("contract_vllm", id="vllm", marks=[pytest.mark.vllm, pytest.mark.system]),
        pytest.param("contract_slots", id="vllm-slots", marks=[pytest.mark.vllm, pytest.mark.system]),
    ],
)
def contender(request: pytest.FixtureRequest, host: EngineHost, write_adapter: Any, tmp_path_factory: Any) -> Iterator[Contender]:
    """Each engine in turn; afterwards it plays like the base again, under version 0."""

    found: Contender = request.getfixturevalue(request.param)
    yield found
    idle = write_adapter(tmp_path_factory.mktemp("idle") / "adapter", seed=0, scale=0.0)
    host.submit(found.engine.publish(version_in(idle, 0))).result(timeout=60)
