"""`xgrammar_mask`, `llguidance_mask`: building and applying the legal mask, beside our tables and our automaton.

The decisions are those of whole start groups, in the order of a rollout, with a completion that is drawn beforehand; so every arm
masks the same tokens. Requests are masked in batches of BATCH: build what the request needs (table; or grammar and matcher), then
token by token advance, fill and apply the mask to the logits. Forced tokens are masked like all others, because a plain engine
masks them too. A peer keeps what it can keep in a run: its tokenizer, and the grammars that it has compiled.
"""

import asyncio
import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from statistics import median
from typing import Any, Protocol

import torch

from benchmarks.decode_cases import InstantEngine, played_positions
from benchmarks.outcome import require_found
from benchmarks.peers.grammars import answer_rules, to_ebnf, to_lark
from benchmarks.peers.turns import OURS, Arm, ratio, take_turns
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
FORKS, YEARS = 8, 2
QUICK_FORKS, QUICK_YEARS = 2, 1


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskCase:
    """One decision to mask."""

    legal: LegalOrders
    completion: list[int]


class Masker(Protocol):
    """One arm: builds the masks of a batch and follows its completions."""

    def admit(self, legal: Sequence[LegalOrders]) -> None:
        """Build what the batch needs, from the legal orders."""
        ...

    def mask(self, logits: torch.Tensor, live: int) -> None:
        """Mask `logits` [live, vocabulary] of the first `live` requests in place."""
        ...

    def advance(self, tokens: Sequence[int]) -> None:
        """Advance the first requests by the tokens that they drew."""
        ...


class OurMasker:
    """Legal tables, as at an engine's admission, and the flat automaton of its logits processor."""

    def __init__(self, folder: Path) -> None:
        self._builder, self._admitted = TableBuilder(Codec(folder)), TableCache()
        self._arena, self._slots = LegalArena(BATCH, "cpu"), torch.arange(BATCH)

    def admit(self, legal: Sequence[LegalOrders]) -> None:
        for slot, each in enumerate(legal):
            self._arena.assign(slot, self._admitted.decode(self._admitted.encode(self._builder.table(each))))
        self._arena.flush()

    def mask(self, logits: torch.Tensor, live: int) -> None:
        self._arena.mask(logits, self._slots[:live])

    def advance(self, tokens: Sequence[int]) -> None:
        self._arena.advance(self._slots[: len(tokens)], torch.tensor(tokens))


class XGrammarMasker:
    """XGrammar: a grammar in EBNF, compiled on one thread; its compiler keeps compiled grammars."""

    @staticmethod
    def prepare(tokenizer: Any, vocabulary: int, eos_id: int) -> Callable[[], "XGrammarMasker"]:
        """Makes arms for one tokenizer of `transformers`."""
        import xgrammar

        facts = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocabulary, stop_token_ids=[eos_id])
        return lambda: XGrammarMasker(facts, vocabulary)

    def __init__(self, facts: Any, vocabulary: int) -> None:
        """`facts`: the tokenizer as XGrammar reads it."""
        import xgrammar

        self._xgrammar = xgrammar
        self._compiler = xgrammar.GrammarCompiler(facts, max_threads=1)
        self._text = lru_cache(maxsize=None)(lambda legal: to_ebnf(answer_rules(legal)))
        self._bits, self._matchers = xgrammar.allocate_token_bitmask(BATCH, vocabulary), []

    def admit(self, legal: Sequence[LegalOrders]) -> None:
        compiled = [self._compiler.compile_grammar(self._text(each)) for each in legal]
        self._matchers = [self._xgrammar.GrammarMatcher(each) for each in compiled]

    def mask(self, logits: torch.Tensor, live: int) -> None:
        for row, matcher in enumerate(self._matchers[:live]):
            matcher.fill_next_token_bitmask(self._bits, row)
        self._xgrammar.apply_token_bitmask_inplace(logits, self._bits[:live])

    def advance(self, tokens: Sequence[int]) -> None:
        for matcher, token in zip(self._matchers, tokens, strict=False):
            require_found(matcher.accept_token(token), "a drawn token in XGrammar's grammar")


class LlguidanceMasker:
    """llguidance: a grammar in Lark's notation. Equal grammars share a matcher, which is copied; XGrammar's kernel masks."""

    @staticmethod
    def prepare(tokenizer: Any, vocabulary: int, eos_id: int) -> Callable[[], "LlguidanceMasker"]:
        """Makes arms for one tokenizer of `transformers`."""
        import llguidance.hf

        facts = llguidance.hf.from_tokenizer(tokenizer, vocabulary, eos_token=eos_id)
        return lambda: LlguidanceMasker(facts, vocabulary)

    def __init__(self, facts: Any, vocabulary: int) -> None:
        """`facts`: the tokenizer as llguidance reads it."""
        import llguidance
        import xgrammar
        from llguidance.torch import fill_next_token_bitmask

        self._bits, self._matchers = xgrammar.allocate_token_bitmask(BATCH, vocabulary), []
        self._apply = xgrammar.apply_token_bitmask_inplace
        self._fill = fill_next_token_bitmask

        @cache
        def matcher(legal: LegalOrders) -> Any:
            grammar = llguidance.LLMatcher.grammar_from_lark(to_lark(answer_rules(legal)))
            return llguidance.LLMatcher(facts, grammar)

        self._matcher = matcher

    def admit(self, legal: Sequence[LegalOrders]) -> None:
        self._matchers = [self._matcher(each).deep_copy() for each in legal]

    def mask(self, logits: torch.Tensor, live: int) -> None:
        for row, matcher in enumerate(self._matchers[:live]):
            self._fill(matcher, self._bits, row)
        self._apply(logits, self._bits[:live])

    def advance(self, tokens: Sequence[int]) -> None:
        for matcher, token in zip(self._matchers, tokens, strict=False):
            require_found(matcher.consume_token(token), "a drawn token in llguidance's grammar")


MASKERS: dict[str, Callable[[Any, int, int], Callable[[], Masker]]] = {
    "xgrammar_mask": XGrammarMasker.prepare,
    "llguidance_mask": LlguidanceMasker.prepare,
}
"""Figure -> what makes its arm, from a tokenizer, the size of its vocabulary and the end of sequence."""


def mask_figures(figures: Sequence[str], models_root: Path, *, rounds: int, seed: int, quick: bool) -> dict[str, float]:
    """The ratios of `figures`, and milliseconds a decision of each arm: build and fill."""
    measured = _Measured(tekken_folder(models_root), figures, seed=seed, quick=quick)
    turns = take_turns(measured.turns(), rounds, "masks")
    return {figure: ratio(turns, figure) for figure in figures} | measured.milliseconds()


def tekken_folder(root: Path) -> Path:
    """A folder with Tekken's tokenizer and a model config under `root`; made if missing. It holds no weights."""
    import mistral_common
    from transformers import Qwen3Config
    from transformers.integrations.mistral.tokenizer import convert_tekken_tokenizer

    def make(folder: Path) -> None:
        convert_tekken_tokenizer(str(Path(mistral_common.__file__).parent / "data" / _TEKKEN)).save_pretrained(str(folder))
        Qwen3Config(vocab_size=VOCABULARY, eos_token_id=2, bos_token_id=1).save_pretrained(folder)

    return make_whole(root / "tekken-131k", "config.json", make)


class _Measured:
    """The arms, and the times of each."""

    def __init__(self, folder: Path, figures: Sequence[str], *, seed: int, quick: bool) -> None:
        from transformers import AutoTokenizer

        codec, tokenizer = Codec(folder), AutoTokenizer.from_pretrained(folder)
        self._warm_up, self._cases = decisions(codec, seed=seed, quick=quick)
        self._logits = torch.zeros(BATCH, VOCABULARY)
        self.arms: dict[str, Callable[[], Masker]] = {OURS: lambda: OurMasker(folder)}
        self.arms |= {figure: MASKERS[figure](tokenizer, VOCABULARY, codec.eos_id) for figure in figures}
        self._times: dict[str, list[tuple[float, float]]] = {arm: [] for arm in self.arms}

    def turns(self) -> dict[str, Arm]:
        """The arms for `take_turns`."""
        return {arm: lambda _, arm=arm: self.run(arm) for arm in self.arms}

    def run(self, arm: str) -> float:
        """CPU seconds of one round of `arm`. Its caches hold the decisions of another start group."""
        masker = self.arms[arm]()
        follow(masker, self._warm_up, self._logits)
        gc.collect()
        self._times[arm].append(follow(masker, self._cases, self._logits))
        return sum(self._times[arm][-1])

    def milliseconds(self) -> dict[str, float]:
        """CPU milliseconds a decision of building and of filling, by arm: medians over the rounds that count."""
        found = {}
        for arm, times in self._times.items():
            build, fill = zip(*times[1:], strict=True)
            found[f"{arm.removesuffix('_mask')}_build_ms"] = 1e3 * median(build) / len(self._cases)
            found[f"{arm.removesuffix('_mask')}_fill_ms"] = 1e3 * median(fill) / len(self._cases)
        return found


def decisions(codec: Codec, *, seed: int, quick: bool) -> tuple[list[MaskCase], list[MaskCase]]:
    """The decisions of two whole start groups, with the policy as all seven powers: one to warm up, one to measure."""
    forks, years = (QUICK_FORKS, QUICK_YEARS) if quick else (FORKS, YEARS)
    rollouts = RolloutSettings(start_groups=1, forks_per_group=forks, horizon_years=years, policy_powers="all")
    groups = []
    for snapshot in played_positions(2, seed):
        inputs = RunInputs(positions=[snapshot], rollouts=rollouts, seed=seed)
        played = asyncio.run(record_step(inputs, 1, InstantEngine(), Tokens(codec)))  # type: ignore[arg-type]
        pairs = zip(played.cases, played.drawn, strict=True)
        groups.append([MaskCase(legal=case.legal, completion=drawn.token_ids.tolist()) for case, (_, drawn) in pairs])
    return groups[0], groups[1]


def follow(masker: Masker, cases: Sequence[MaskCase], logits: torch.Tensor) -> tuple[float, float]:
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
