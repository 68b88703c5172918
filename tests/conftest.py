"""What tests of several rooms share: a small real model, positions to play, an engine whose odds are known, a real
vLLM, a Prefect server.
"""

import asyncio
import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from decoding.codec import Codec
from decoding.legal_table import END
from game.board import Board
from game.players import player
from game.snapshot import Snapshot
from inference.engine import BASE_HASH, EngineStats, Generation, GenerationRequest
from inference.host import EngineHost
from rollouts.fork import Tokens
from telemetry.errors import EngineError

SMALL_MODEL = {"hidden": 64, "layers": 2, "source_games": 6, "imitation_steps": 12, "imitation_positions": 2}
"""Recipe of the model of the tests: real in every part, made in a few seconds, and no good at the game."""


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a small model."""
    from training.settings import TinyModelSettings
    from training.tiny_model import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("models"), TinyModelSettings(**SMALL_MODEL))


@pytest.fixture(scope="session")
def tokens(model: Path) -> Tokens:
    """Codec and table builder of the small model."""
    return Tokens(Codec(model))


def _positions(games: int, phases: int) -> list[Snapshot]:
    found = []
    for game in range(games):
        dice, board = random.Random(game), Board.start()
        while board.phase_type != "M" or (len(found) == game and board.year < 1901 + phases):
            board.step({power: player("mover")(legal, dice) for power, legal in board.legal_orders().items()})
        found.append(board.snapshot(game_id=f"game-{game}", seed=game, source="test"))
    return found


@pytest.fixture(scope="session")
def positions() -> list[Snapshot]:
    """Eight movement phases of 1903, each from a game of its own."""
    return _positions(games=8, phases=2)


class UniformEngine:
    """An `Engine` that draws every legal token with the same probability, so that each logprob is known exactly."""

    name = "uniform"

    def __init__(self, *, fails: Callable[[GenerationRequest], bool] = lambda request: False) -> None:
        self._fails = fails
        self.requests: list[GenerationRequest] = []
        self.version = 0

    async def start(self) -> None:
        return

    async def generate(self, request: GenerationRequest) -> Generation:
        self.requests.append(request)
        await asyncio.sleep(0)
        if self._fails(request):
            raise EngineError(f"request {request.request_id} was made to fail")
        dice, node, ids, logprobs = random.Random(request.seed), 0, [], []
        while node != END:
            allowed = request.table.allowed(node).tolist()
            ids.append(dice.choice(allowed))
            logprobs.append(-math.log(len(allowed)))
            node = request.table.advance(node, ids[-1])
        return Generation(
            token_ids=np.array(ids, np.int32),
            logprobs=np.array(logprobs, np.float32),
            policy_version=self.version,
            adapter_hash=BASE_HASH,
            worker=self.name,
            cached_tokens=0,
            queue_ms=0.0,
            generate_ms=0.0,
        )

    async def publish(self, version: int, adapter: Path, adapter_hash: str) -> None:
        self.version = version

    async def stats(self) -> EngineStats:
        return EngineStats(
            requests=len(self.requests),
            prompt_tokens=0,
            cached_tokens=0,
            completion_tokens=0,
            engine_steps=0,
            policy_version=self.version,
        )

    async def close(self) -> None:
        return


@pytest.fixture
def uniform_engine() -> type[UniformEngine]:
    """The class, so that a test may make one that fails."""
    return UniformEngine


@pytest.fixture(scope="session")
def host() -> Iterator[EngineHost]:
    """The engine client's thread."""
    host = EngineHost("test-engine")
    yield host
    host.close()


@pytest.fixture(scope="session")
def vllm_engine(model: Path, host: EngineHost):
    """One real vLLM in this process, on the small model, for the whole session."""
    from inference.embedded import EmbeddedEngine
    from inference.settings import InferenceSettings

    engine = EmbeddedEngine(model, InferenceSettings(max_model_length=512, max_sequences=32), name="embedded")
    host.submit(engine.start()).result(timeout=300)
    yield engine
    host.submit(engine.close()).result(timeout=60)


@pytest.fixture(scope="session")
def prefect_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A temporary Prefect server and database for flows run in this process."""
    from prefect.testing.utilities import prefect_test_harness

    with prefect_test_harness(server_startup_timeout=120):
        yield
