"""A run with real rows: forks played by the small model's own probabilities, as an engine would draw them."""

import asyncio
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from entente.decoding.legal_table import END
from entente.game.snapshot import Snapshot
from entente.players.opponents import POLICY
from entente.players.policy import PolicyPlayer, Tokens
from entente.records.policy_version import BASE
from entente.records.rows import Decision, Generation, GenerationRequest, PlayedPhase
from entente.rollouts.groups import decisions_of, phases_of, plan_start_groups, roll_out
from entente.rollouts.settings import RolloutSettings
from storage.runs import RunPaths
from storage.shards import open_phases, open_shard, publish_shard
from tests.made_once import made_once

MOST = (4, 4)
"""Start groups, and forks of each, that `exact_run` can give."""


class ExactEngine:
    """Draws token by token from a transformers forward in float32 over the legal set: the policy itself, slowly.

    `temperature` and `forget_mask` make it lie: rows then say one thing and were drawn by another.
    """

    name = "exact"

    def __init__(self, model: Path, *, temperature: float | None = None, forget_mask: bool = False) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        self._temperature, self._forget_mask = temperature, forget_mask

    async def generate(self, request: GenerationRequest) -> Generation:
        rng, node, ids, logprobs = torch.Generator().manual_seed(request.seed % 2**31), 0, [], []
        past, fed = None, torch.tensor([list(request.prompt_ids)])
        while node != END:
            with torch.no_grad():
                out = self._model(input_ids=fed, past_key_values=past, use_cache=True)
            past, logits = out.past_key_values, out.logits[0, -1] / (self._temperature or request.temperature)
            allowed = torch.tensor(request.table.allowed(node).tolist())
            masked = torch.log_softmax(logits[allowed], 0)
            chosen = int(torch.multinomial(masked.exp(), 1, generator=rng))
            ids.append(int(allowed[chosen]))
            logprobs.append(float(torch.log_softmax(logits, 0)[ids[-1]] if self._forget_mask else masked[chosen]))
            node, fed = request.table.advance(node, ids[-1]), torch.tensor([[ids[-1]]])
        return Generation(
            token_ids=np.array(ids, np.int32),
            logprobs=np.array(logprobs, np.float32),
            policy=BASE,
            worker=self.name,
        )


@pytest.fixture(scope="session")
def exact_engine(model: Path) -> Callable[..., ExactEngine]:
    """Make an exact engine, or a lying one."""
    return lambda **lies: ExactEngine(model, **lies)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Beside other work, two threads would wait for one another longer than they compute."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _play(paths: RunPaths, engine: Any, tokens: Tokens, positions: Sequence[Snapshot], groups: int, forks: int) -> RunPaths:
    settings = RolloutSettings(start_groups=groups, forks_per_group=forks, horizon_years=1)
    plan = plan_start_groups([(positions[index], "FRANCE") for index in range(groups)], 0, settings)
    played = asyncio.run(roll_out(plan, {POLICY: PolicyPlayer(engine, tokens)}, settings, producer="local", seed=5))
    publish_shard(paths, "local", 0, decisions_of(played), phases_of(played), {}, next_start_group=groups)
    return paths


@pytest.fixture
def run_with_rows(tmp_path: Path, tokens: Tokens, positions: Sequence[Snapshot]) -> Callable[..., RunPaths]:
    """A run whose shard holds some start groups played by the given engine: `run_with_rows(engine, groups=3)`."""

    def make(engine: object, *, groups: int = 3, name: str = "run", forks: int = 4) -> RunPaths:
        return _play(RunPaths(tmp_path / name).create(), engine, tokens, positions, groups, forks)

    return make


@pytest.fixture(scope="session")
def exact_run(
    exact_engine: Callable[..., ExactEngine],
    tokens: Tokens,
    positions: Sequence[Snapshot],
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[..., RunPaths]:
    """A new run with rows that the exact engine drew: `exact_run(folder, groups=4, forks=3)`.

    They are the rows of the first start groups and forks of MOST, which are played once for all.
    """
    groups, forks = MOST

    def play(folder: Path) -> None:
        _play(RunPaths(folder).create(), exact_engine(), tokens, positions, groups, forks)

    shard = RunPaths(made_once(tmp_path_factory, "exact_rows", play)).shards / "local" / "000000.arrow"
    decisions, phases = open_shard(shard).to_pylist(), open_phases(shard).to_pylist()

    def make(root: Path, *, groups: int, forks: int) -> RunPaths:
        assert groups <= MOST[0] and forks <= MOST[1]
        paths = RunPaths(root).create()
        some = [[row for row in rows if row["start_group"] < groups and row["fork"] < forks] for rows in (decisions, phases)]
        publish_shard(
            paths,
            "local",
            0,
            [Decision(**row) for row in some[0]],
            [PlayedPhase(**row) for row in some[1]],
            {},
            next_start_group=groups,
        )
        return paths

    return make


@pytest.fixture(scope="module")
def played(exact_run: Callable[..., RunPaths], tmp_path_factory: pytest.TempPathFactory) -> RunPaths:
    """One run with rows, to be copied."""
    return exact_run(tmp_path_factory.mktemp("played") / "run", groups=4, forks=4)


@pytest.fixture
def paths(played: RunPaths, tmp_path: Path) -> RunPaths:
    """A copy of it to change."""
    return RunPaths(Path(shutil.copytree(played.root, tmp_path / "copy")))
