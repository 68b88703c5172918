"""`xgrammar_mask`: building and applying the legal mask with XGrammar, beside our tables and our automaton.

The decisions are those of whole start groups, in the order of a rollout, with a completion that is drawn beforehand; so both arms
mask the same tokens. Requests are masked in batches of BATCH: build what the request needs (table; or grammar and matcher), then
token by token advance, fill and apply the mask to the logits. Forced tokens are masked like all others, because a plain engine
masks them too. XGrammar keeps what it can keep in a run: its tokenizer, and the grammars that it has compiled.
"""

import asyncio
import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.decode_cases import InstantEngine, played_positions
from benchmarks.outcome import require_found
from benchmarks.peers.bench import OURS, ratio, take_turns
from benchmarks.peers.grammars import to_ebnf
from benchmarks.played_steps import RunInputs, record_step
from decoding.codec import Codec
from decoding.legal_table import TableBuilder
from decoding.model_files import make_whole
from game.legal import LegalOrders
from inference.legal_admission import TableCache
from inference.legal_arena import LegalArena
from rollouts.fork import Tokens
from rollouts.settings import RolloutSettings

BATCH = 32
VOCABULARY = 131_072
"""Ids of Tekken, which `mistral_common` ships."""
_TEKKEN = "tekken_240911.json"
ROLLOUTS = RolloutSettings(start_groups=1, forks_per_group=8, horizon_years=2, policy_powers="all")


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskCase:
    """One decision to mask."""

    legal: LegalOrders
    completion: list[int]


class OurMasker:
    """Legal tables, as at an engine's admission, and the flat automaton of its logits processor."""

    def __init__(self, folder: Path) -> None:
        self._builder, self._admitted = TableBuilder(Codec(folder)), TableCache()
        self._arena, self._slots = LegalArena(BATCH, "cpu"), torch.arange(BATCH)

    def admit(self, legal: Sequence[LegalOrders]) -> None:
        """Build what a batch needs, from the legal orders."""
        for slot, each in enumerate(legal):
            self._arena.assign(slot, self._admitted.decode(self._admitted.encode(self._builder.table(each))))
        self._arena.flush()

    def mask(self, logits: torch.Tensor, live: int) -> None:
        """Mask `logits` [live, vocabulary] of the first `live` requests in place."""
        self._arena.mask(logits, self._slots[:live])

    def advance(self, tokens: Sequence[int]) -> None:
        """Advance the first requests by the tokens that they drew."""
        self._arena.advance(self._slots[: len(tokens)], torch.tensor(tokens))


class XGrammarMasker:
    """The same methods with XGrammar: a grammar in EBNF, compiled on one thread; its compiler keeps compiled grammars."""

    def __init__(self, facts: Any) -> None:
        """`facts`: the tokenizer as XGrammar reads it."""
        import xgrammar

        self._xgrammar = xgrammar
        self._compiler = xgrammar.GrammarCompiler(facts, max_threads=1)
        self._text = lru_cache(maxsize=None)(to_ebnf)
        self._bits, self._matchers = xgrammar.allocate_token_bitmask(BATCH, VOCABULARY), []

    def admit(self, legal: Sequence[LegalOrders]) -> None:
        """As `OurMasker.admit`."""
        compiled = [self._compiler.compile_grammar(self._text(each)) for each in legal]
        self._matchers = [self._xgrammar.GrammarMatcher(each) for each in compiled]

    def mask(self, logits: torch.Tensor, live: int) -> None:
        """As `OurMasker.mask`."""
        for row, matcher in enumerate(self._matchers[:live]):
            matcher.fill_next_token_bitmask(self._bits, row)
        self._xgrammar.apply_token_bitmask_inplace(logits, self._bits[:live])

    def advance(self, tokens: Sequence[int]) -> None:
        """As `OurMasker.advance`."""
        for matcher, token in zip(self._matchers, tokens, strict=False):
            require_found(matcher.accept_token(token), "a drawn token in XGrammar's grammar")


def mask_figures(models_root: Path, *, rounds: int, seed: int) -> dict[str, float]:
    """The ratio, and milliseconds a decision of each arm: build and fill."""
    import xgrammar
    from transformers import AutoTokenizer

    folder = tekken_folder(models_root)
    codec, tokenizer = Codec(folder), AutoTokenizer.from_pretrained(folder)
    facts = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=VOCABULARY, stop_token_ids=[codec.eos_id])
    arms: dict[str, Callable[[], OurMasker | XGrammarMasker]] = {
        OURS: lambda: OurMasker(folder),
        "xgrammar": lambda: XGrammarMasker(facts),
    }
    warm_up, cases = decisions(codec, seed=seed)
    logits = torch.zeros(BATCH, VOCABULARY)
    times: dict[str, list[tuple[float, float]]] = {arm: [] for arm in arms}

    def run(arm: str) -> float:
        masker = arms[arm]()
        follow(masker, warm_up, logits)  # its caches then hold the decisions of another start group
        gc.collect()
        times[arm].append(follow(masker, cases, logits))
        return sum(times[arm][-1])

    turns = take_turns({arm: lambda arm=arm: run(arm) for arm in arms}, rounds, "masks")
    found = {"xgrammar_mask": ratio(turns, "xgrammar")}
    for arm, spent in times.items():
        for part, seconds in zip(("build", "fill"), zip(*spent[1:], strict=True), strict=True):
            found[f"{arm}_{part}_ms"] = 1e3 * median(seconds) / len(cases)
    return found


def tekken_folder(root: Path) -> Path:
    """A folder with Tekken's tokenizer and a model config under `root`; made if missing. It holds no weights."""
    import mistral_common
    from transformers import Qwen3Config
    from transformers.integrations.mistral.tokenizer import convert_tekken_tokenizer

    def make(folder: Path) -> None:
        convert_tekken_tokenizer(str(Path(mistral_common.__file__).parent / "data" / _TEKKEN)).save_pretrained(str(folder))
        Qwen3Config(vocab_size=VOCABULARY, eos_token_id=2, bos_token_id=1).save_pretrained(folder)

    return make_whole(root / "tekken-131k", "config.json", make)


def decisions(codec: Codec, *, seed: int) -> tuple[list[MaskCase], list[MaskCase]]:
    """The decisions of two whole start groups, with the policy as all seven powers: one to warm up, one to measure."""
    groups = []
    for snapshot in played_positions(2, seed):
        inputs = RunInputs(positions=[snapshot], rollouts=ROLLOUTS, seed=seed)
        played = asyncio.run(record_step(inputs, 1, InstantEngine(), Tokens(codec)))  # type: ignore[arg-type]
        pairs = zip(played.cases, played.drawn, strict=True)
        groups.append([MaskCase(legal=case.legal, completion=drawn.token_ids.tolist()) for case, (_, drawn) in pairs])
    return groups[0], groups[1]


def follow(masker: OurMasker | XGrammarMasker, cases: Sequence[MaskCase], logits: torch.Tensor) -> tuple[float, float]:
    """CPU seconds of building and of filling for `cases`, BATCH at a time; a batch ends with its longest completion."""
    build = fill = 0.0
    for first in range(0, len(cases), BATCH):
        # The longest first, so that the requests that still draw are always the first ones.
        batch = sorted(cases[first : first + BATCH], key=lambda case: -len(case.completion))
        began = time.process_time()
        masker.admit([case.legal for case in batch])
        admitted = time.process_time()
        for position in range(len(batch[0].completion)):
            tokens = [case.completion[position] for case in batch if position < len(case.completion)]
            masker.mask(logits[: len(tokens)], len(tokens))
            masker.advance(tokens)
        build, fill = build + admitted - began, fill + time.process_time() - admitted
    return build, fill
