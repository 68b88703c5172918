"""`structured_outputs`: decisions a CPU second of vLLM with grammars of its own, beside our engine.

Requests are those of a whole start group, another in each round, IN_FLIGHT at a time, with an empty prefix cache. Model, release
of vLLM and engine settings are the same. Our arm builds its legal tables and draws with our logits processor, with and without
the jump over forced tokens. Their arm is a process of its own: `LLM.generate` with `StructuredOutputsParams(grammar=...)`, and
XGrammar as vLLM chooses it. Its grammars are written beforehand. Their decisions must be legal order sets.
"""

import asyncio
import gc
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.decode_cases import PROMPTS, InstantEngine, played_positions, roll_out_group
from benchmarks.outcome import require_found
from benchmarks.peers.child import Child
from benchmarks.peers.grammars import answer_rules, to_ebnf
from benchmarks.peers.turns import OURS, Arm, ratio, take_turns
from benchmarks.peers.vocabularies import SIZES, tokenizer_folder
from decoding.codec import Codec
from decoding.legal_table import TableBuilder
from game.legal import WAIVE, LegalOrders
from inference.settings import InferenceSettings
from records.generation import GenerationRequest
from rollouts.fork import Tokens

IN_FLIGHT = 64
FORKS, YEARS = 8, 2
QUICK_FORKS, QUICK_YEARS = 2, 1
_PASSED_ON = (
    "model",
    "dtype",
    "enforce_eager",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "block_size",
    "gpu_memory_utilization",
    "enable_prefix_caching",
    "generation_config",
    "seed",
)
"""Arguments of our engine that their engine gets too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One request of both arms."""

    prompt_ids: list[int]
    legal: LegalOrders
    seed: int


def structured_figures(tiny: Path, models_root: Path, *, rounds: int, seed: int, quick: bool) -> dict[str, float]:
    """The ratio with the model of the laptop preset, and with 131,072 ids and random weights."""
    found = {}
    for suffix, folder in (("", tiny), ("_131k", tokenizer_folder(models_root, SIZES["131k"]))):
        measured = _measure(folder, rounds=rounds, seed=seed, quick=quick)
        found |= {name + suffix: value for name, value in measured.items()}
    return found


def _measure(folder: Path, *, rounds: int, seed: int, quick: bool) -> dict[str, float]:
    settings = InferenceSettings(dtype="float32", adapters="merge_reload", max_sequences=IN_FLIGHT)
    with asyncio.Runner() as runner:
        ours = _Ours(runner, folder, settings)
        try:
            groups = requests_of(folder, rounds + 1, seed=seed, quick=quick)
            with Child(Path(sys.executable), "structured_outputs", environment=ours.environment()) as child:
                child.request("start", ours.passed_on())
                theirs = _Theirs(child, groups)
                arms: dict[str, Arm] = {OURS: lambda number: ours.draw(groups[number], jump=True)}
                if ours.jumps:
                    arms["ours_one_by_one"] = lambda number: ours.draw(groups[number], jump=False)
                turns = take_turns(arms | {"theirs": theirs.draw}, rounds, f"structured outputs, {folder.name}")
        finally:
            ours.close()
    sizes = [len(asked) for asked in groups[1:]]
    rates = {arm: median(size / spent[arm] for size, spent in zip(sizes, turns, strict=True)) for arm in (OURS, "theirs")}
    found = {
        "structured_outputs": ratio(turns, "theirs"),
        "structured_outputs_decisions_per_s": rates["theirs"],
        "structured_outputs_tokens_per_decision": theirs.tokens / sizes[-1],
        "ours_decisions_per_s": rates[OURS],
        "ours_tokens_per_decision": ours.tokens / sizes[-1],
    }
    return found | ({"structured_outputs_one_by_one": ratio(turns, "theirs", "ours_one_by_one")} if ours.jumps else {})


def requests_of(folder: Path, groups: int, *, seed: int, quick: bool) -> list[list[Asked]]:
    """The decisions of whole start groups, with prompts for the model in `folder`."""
    forks, years = (QUICK_FORKS, QUICK_YEARS) if quick else (FORKS, YEARS)
    tokens, found = Tokens(Codec(folder), PROMPTS), []
    for number, snapshot in enumerate(played_positions(groups, seed)):
        played = roll_out_group(snapshot, InstantEngine(), tokens, number=number, forks=forks, years=years)
        drawn, asked = asyncio.run(played)
        legal_of = {tokens.tables.table(legal).to_bytes(): legal for legal in asked}
        found.append(
            [
                Asked(prompt_ids=list(request.prompt_ids), legal=legal_of[request.table.to_bytes()], seed=request.seed % 2**31)
                for request, _ in drawn
            ]
        )
    return found


class _Ours:
    """Our engine in this process."""

    def __init__(self, runner: asyncio.Runner, folder: Path, settings: InferenceSettings) -> None:
        from inference.embedded import EmbeddedEngine
        from inference.vllm_arguments import may_jump

        self._runner, self._folder, self._settings = runner, folder, settings
        self._engine = EmbeddedEngine(folder, settings, name="peers")
        runner.run(self._engine.start())
        self.jumps = may_jump(settings)
        self.tokens = 0
        """Tokens of the last round."""

    def environment(self) -> dict[str, str]:
        """Environment variables of their process: their engine in one process, with as large a cache."""
        return {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"} | {
            name: value for name, value in os.environ.items() if name.startswith("VLLM_") and name != "VLLM_PLUGINS"
        }

    def passed_on(self) -> dict[str, Any]:
        """The arguments of our engine that their engine gets too."""
        from inference.vllm_arguments import engine_arguments

        arguments = engine_arguments(self._folder, self._settings, slots=False)
        return {name: arguments[name] for name in _PASSED_ON}

    def draw(self, asked: Sequence[Asked], *, jump: bool) -> float:
        """CPU seconds to build the tables and draw all decisions, without tables from before."""
        return self._runner.run(self._draw(asked, jump))

    async def _draw(self, asked: Sequence[Asked], jump: bool) -> float:
        if self.jumps:
            await self._engine.jump_forced(jump)
        self._engine._engine.reset_prefix_cache()
        tables, limit = TableBuilder(Codec(self._folder)), asyncio.Semaphore(IN_FLIGHT)

        async def draw(number: int, each: Asked) -> int:
            async with limit:
                request = GenerationRequest(
                    request_id=f"peers/{number}", prompt_ids=each.prompt_ids, table=tables.table(each.legal), seed=each.seed
                )
                return len((await self._engine.generate(request)).token_ids)

        gc.collect()
        began = time.process_time()
        lengths = await asyncio.gather(*(draw(number, each) for number, each in enumerate(asked)))
        spent = time.process_time() - began
        self.tokens = sum(lengths)
        return spent

    def close(self) -> None:
        """Stop the engine."""
        self._runner.run(self._engine.close())


class _Theirs:
    """vLLM's own structured outputs in a child process."""

    def __init__(self, child: Child, groups: Sequence[Sequence[Asked]]) -> None:
        self._child, self._groups = child, groups
        self.tokens = 0
        """Tokens of the last round."""

    def draw(self, number: int) -> float:
        """CPU seconds to draw all decisions of a start group, whose grammars are new to the engine."""
        asked = self._groups[number]
        given = [
            {
                "prompt_ids": each.prompt_ids,
                "grammar": to_ebnf(answer_rules(each.legal)),
                "seed": each.seed,
                "max_tokens": longest_text(each.legal) + 1,
            }
            for each in asked
        ]
        answer = self._child.request("draw", given)
        texts = answer["texts"]
        require_found(all(spells_orders(text, each.legal) for text, each in zip(texts, asked, strict=True)), "legal orders")
        self.tokens = answer["tokens"]
        return answer["cpu_s"]


def longest_text(legal: LegalOrders) -> int:
    """Bytes of the longest answer at most: no completion that spells an answer has more tokens."""
    return sum(sorted((max(map(len, own)) + 1 for own in (*legal.options, (WAIVE,))), reverse=True)[: legal.picks])


def spells_orders(text: str, legal: LegalOrders) -> bool:
    """True if `text` is a legal answer in full notation."""
    return legal.admits(text.split("\n"))
