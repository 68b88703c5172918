"""A run with real rows: forks played by the small model's own probabilities, as an engine would draw them."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from decoding.legal_table import END
from records.generation import Generation, GenerationRequest
from records.policy_version import BASE
from rollouts.fork import Tokens
from rollouts.roll_out import plan_start_groups, roll_out
from rollouts.settings import RolloutSettings
from storage.runs import RunPaths
from storage.shards import publish_shard


class ExactEngine:
    """Draws token by token from a transformers forward in float32 over the legal set: the policy itself, slowly.

    `temperature` and `forget_mask` make it lie: rows then say one thing and were drawn by another.
    """

    name = "exact"

    def __init__(self, model: Path, *, temperature: float | None = None, forget_mask: bool = False) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        self._temperature, self._forget_mask = temperature, forget_mask

    async def generate(self, request: GenerationRequest) -> Generation:
        dice, node, ids, logprobs = torch.Generator().manual_seed(request.seed % 2**31), 0, [], []
        past, fed = None, torch.tensor([list(request.prompt_ids)])
        while node != END:
            with torch.no_grad():
                out = self._model(input_ids=fed, past_key_values=past, use_cache=True)
            past, logits = out.past_key_values, out.logits[0, -1] / (self._temperature or request.temperature)
            allowed = torch.tensor(request.table.allowed(node).tolist())
            masked = torch.log_softmax(logits[allowed], 0)
            chosen = int(torch.multinomial(masked.exp(), 1, generator=dice))
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


@pytest.fixture
def run_with_rows(tmp_path: Path, tokens: Tokens, positions: Sequence) -> Callable[..., RunPaths]:
    """A run whose shard holds some start groups played by the given engine: `run_with_rows(engine, groups=3)`."""
    import asyncio

    def make(engine: object, *, groups: int = 3, name: str = "run", forks: int = 4) -> RunPaths:
        paths = RunPaths(tmp_path / name).create()
        settings = RolloutSettings(start_groups=groups, forks_per_group=forks, horizon_years=1)
        plan = plan_start_groups([(positions[index], "FRANCE") for index in range(groups)], 0, settings)
        played = asyncio.run(roll_out(plan, engine, tokens, settings, producer="local", seed=5))  # type: ignore[arg-type]
        publish_shard(paths, "local", 0, played.decisions, played.plies, {"run": name}, next_start_group=groups)
        return paths

    return make
