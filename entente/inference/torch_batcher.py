"""The batcher of one policy version in the torch engine: its requests and their rows of keys and values.

Row i belongs to the request `running[i]`. Later rows hold finished requests until overwritten, so that new prompts can copy their
prefixes. Every shared prefix is computed once: copied from a row, or from another new prompt in an earlier stage.
"""

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from entente.decoding.legal_table import END
from entente.inference.sampling import sample, seed_array
from entente.inference.torch_model import ForwardPlan, KeyValueRows, TorchModel
from entente.records.policy_version import BASE_HASH, PolicyVersion
from entente.records.rows import Generation, GenerationRequest
from entente.telemetry.errors import EngineError

_OPEN_LOGITS = 1 << 22
"""Logits of thought tokens per sampling pass, at most."""
LEAST_SHARED = 8
"""Fewest shared tokens for which a copy, or a later stage, pays off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fill:
    request: int
    """Index of the first new prompt equal to it."""
    stage: int
    """Stages are computed one after another; the fills of one stage together."""
    start: int
    """First computed column; the columns before it are copied."""
    source: int
    """Source of the copy: an existing row if stage is 0, else an index into `PrefixPlan.fills`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixPlan:
    fills: tuple[Fill, ...]
    """Sorted by stage, then by number of new tokens, so that neighbours have similar lengths."""
    fill_of: tuple[int, ...]
    """For each planned prompt, the index of its fill in `fills`."""


class PartialCompletion:
    def __init__(self, request: GenerationRequest, answer: asyncio.Future[Generation]) -> None:
        """Starts with the forced tokens. `answer` gets the whole generation, or the error that ends it."""
        self.request, self.answer = request, answer
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.forced = 0
        self._state = request.table.start
        self._take_forced()
        self.prefill_ids = np.asarray([*request.prompt_ids, *self.token_ids], np.int32)
        """int32 token ids of the prompt and the forced tokens after it; prefill computes these."""
        self.computed, self.cached = 0, 0
        """Columns of its row that hold keys and values; prompt tokens that were copied from other rows."""
        self.arrived, self.scheduled, self.first = time.monotonic(), 0.0, 0.0
        """Times of its arrival, its first scheduling and its first token; 0: not yet."""

    @property
    def done(self) -> bool:
        return self._state == END

    @property
    def finished(self) -> bool:
        return self.done or self.answer.done()

    def fail(self, error: EngineError) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)

    def allowed(self) -> np.ndarray:
        """The legal set of the next position: two or more tokens, or in a thought an open set."""
        return self.request.table.allowed(self._state)

    def take(self, token: int, logprob: float) -> None:
        """Append the sampled `token`, and the forced tokens after it, which use no random number and have log-probability 0."""
        self.token_ids.append(token)
        self.logprobs.append(logprob)
        self._state = self.request.table.advance(self._state, token)
        self._take_forced()

    def _take_forced(self) -> None:
        tokens, self._state = self.request.table.forced(self._state)
        self.token_ids += tokens
        self.logprobs += [0.0] * len(tokens)
        self.forced += len(tokens)


def sample_next(partials: Sequence[PartialCompletion], allowed: Sequence[np.ndarray], logits: np.ndarray) -> list[int]:
    """Sample the next token of each completion, as in `sample`; returns the unchanged ones, with a logit that is NaN or plus
    infinity."""
    tokens, logprobs, finite = sample(
        allowed,
        logits,
        [partial.request.temperature for partial in partials],
        seed_array([partial.request.seed for partial in partials]),
        np.fromiter((len(partial.token_ids) for partial in partials), np.int64, len(partials)),
    )
    for partial, token, logprob, can in zip(partials, tokens, logprobs, finite, strict=True):
        if can:
            partial.take(token, logprob)
    return np.flatnonzero(~finite).tolist()


class Batcher:
    def __init__(self, model: TorchModel, max_rows: int, policy: PolicyVersion) -> None:
        self.policy = policy
        self.adapter = "" if policy.adapter_hash == BASE_HASH else policy.adapter_hash
        """Name of the adapter in the model; empty: none."""
        self.waiting: deque[PartialCompletion] = deque()
        self.running: list[PartialCompletion] = []
        self.steps = 0
        self._model, self._max_rows = model, max_rows
        self._rows: KeyValueRows = model.new_rows(max_rows)
        self._row_tokens: list[np.ndarray] = []
        """Prefilled tokens of each row, including those of ended requests."""

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running)

    def clear(self) -> None:
        self._rows, self._row_tokens = self._model.new_rows(self._max_rows), []
        self.waiting.clear()
        self.running.clear()

    def advance(self, room: int, budget: int) -> list[PartialCompletion]:
        """Run one prefill of at most `budget` new tokens if requests wait and `room` rows of the engine are free, else one
        decoding pass. Returns requests that ended, complete or not."""
        ended = [pending for pending in self.waiting if pending.finished]
        if ended:
            self.waiting = deque(pending for pending in self.waiting if not pending.finished)
        ended += self._release()
        self._model.activate(self.adapter)
        if self.waiting and room > 0:
            self._prefill(list(islice(self.waiting, room)), budget)
        elif self.running:
            self._decode()
        return ended + self._release()

    def _prefill(self, batch: list[PartialCompletion], budget: int) -> None:
        now = time.monotonic()
        plan = plan_prefixes([pending.prefill_ids for pending in batch], self._row_tokens, budget)
        batch = batch[: len(plan.fill_of)]
        for _ in batch:
            self.waiting.popleft()
        fillers = [fill.request for fill in plan.fills]
        order = fillers + sorted(set(range(len(batch))).difference(fillers))
        first = len(self.running)
        self._rows.reserve(
            first + len(batch),
            max(len(pending.prefill_ids) + pending.request.table.longest for pending in batch),
        )
        states = self._fill(plan, batch, first, budget)
        copied = [plan.fill_of[number] for number in order[len(fillers) :]]
        if copied:
            targets = range(first + len(fillers), first + len(order))
            self._rows.copy([first + fill for fill in copied], list(targets), max(len(pending.prefill_ids) for pending in batch))
        self._row_tokens[first : first + len(order)] = [batch[number].prefill_ids for number in order]
        for number in order:
            pending, fill = batch[number], plan.fills[plan.fill_of[number]]
            pending.scheduled, pending.computed = now, len(pending.prefill_ids)
            pending.cached = min(
                fill.start if fill.request == number else len(pending.prefill_ids), len(pending.request.prompt_ids)
            )
            self.running.append(pending)
        self._sample([batch[number] for number in order], states[[plan.fill_of[number] for number in order]])
        now = time.monotonic()
        for pending in batch:
            pending.first = now

    def _fill(self, plan: PrefixPlan, batch: list[PartialCompletion], first: int, budget: int) -> Tensor:
        """Compute the fills of `plan` in rows from `first` on; returns the state of each last token [fills, hidden]."""
        states: list[Tensor] = []
        starts = [fill.start for fill in plan.fills]
        prefill_ids = [batch[fill.request].prefill_ids[fill.start :] for fill in plan.fills]
        for stage in range(plan.fills[-1].stage + 1):
            places = [place for place, fill in enumerate(plan.fills) if fill.stage == stage]
            continued = [place for place in places if starts[place]]
            if continued:
                sources = [plan.fills[place].source + first * (stage > 0) for place in continued]
                self._rows.copy(sources, [first + place for place in continued], max(starts[place] for place in continued))
            done, end = places[0], places[-1] + 1
            while done < end:
                # Attention pads all rows to the longest, which is the last; the budget bounds the padded size.
                until = done + 1
                while until < end and (until + 1 - done) * len(prefill_ids[until]) <= budget:
                    until += 1
                states.append(self._forward(first + done, starts[done:until], prefill_ids[done:until]))
                done = until
        return torch.cat(states)

    def _decode(self) -> None:
        starts, fresh = [], []
        for pending in self.running:
            starts.append(pending.computed)
            tail = pending.token_ids[pending.computed - len(pending.request.prompt_ids) :]
            fresh.append(np.array(tail, np.int32))
            pending.computed += len(tail)
        self._sample(self.running, self._forward(0, starts, fresh))

    def _forward(self, first: int, starts: list[int], fresh: list[np.ndarray]) -> Tensor:
        self.steps += 1
        lengths = np.fromiter((len(tokens) for tokens in fresh), np.int64, len(fresh))
        step = ForwardPlan(self._rows, first, np.array(starts, np.int64), lengths, self._model.device)
        return self._model.forward(np.concatenate(fresh), step)

    def _sample(self, batch: list[PartialCompletion], states: Tensor) -> None:
        allowed = [pending.allowed() for pending in batch]
        if any(legal[0] < 0 for legal in allowed):
            batch, allowed, states = self._sample_thoughts(batch, allowed, states)
        if batch:
            counts = np.fromiter((len(tokens) for tokens in allowed), np.int64, len(allowed))
            self._take(batch, allowed, self._model.legal_logits(states, counts, np.concatenate(allowed)))

    def _sample_thoughts(
        self, batch: list[PartialCompletion], allowed: list[np.ndarray], states: Tensor
    ) -> tuple[list[PartialCompletion], list[np.ndarray], Tensor]:
        """Sample the next token of the requests in a thought; returns the others, with their legal sets and states."""
        thoughts: dict[tuple[int, ...], list[int]] = {}
        for place, legal in enumerate(allowed):
            if legal[0] < 0:
                thoughts.setdefault(tuple(legal.tolist()), []).append(place)
        for (first_excluded, end, *excluded), places in thoughts.items():
            most = max(1, _OPEN_LOGITS // end)
            for some in (places[first : first + most] for first in range(0, len(places), most)):
                logits = self._model.open_logits(states[some], [-1 - first_excluded, *excluded], end)
                self._take([batch[place] for place in some], [allowed[place] for place in some], logits.ravel())
        others = [place for place, legal in enumerate(allowed) if legal[0] >= 0]
        return [batch[place] for place in others], [allowed[place] for place in others], states[others]

    @staticmethod
    def _take(batch: list[PartialCompletion], allowed: list[np.ndarray], logits: np.ndarray) -> None:
        for place in sample_next(batch, allowed, logits):
            batch[place].fail(
                EngineError(
                    f"request '{batch[place].request.request_id}' was refused: the model's logits for it are not finite, so "
                    "no token can be sampled; its weights or its adapter may be broken"
                )
            )

    def _release(self) -> list[PartialCompletion]:
        left = [place for place, pending in enumerate(self.running) if not pending.finished]
        if len(left) == len(self.running):
            return []
        ended = [pending for pending in self.running if pending.finished]
        gaps = sorted(set(range(len(left))).difference(left))
        movers = [place for place in left if place >= len(left)]
        if movers:
            self._rows.copy(movers, gaps, max(self.running[place].computed for place in movers))
        for gap, mover in zip(gaps, movers, strict=True):
            self.running[gap], self._row_tokens[gap] = self.running[mover], self._row_tokens[mover]
        del self.running[len(left) :]
        return ended


def plan_prefixes(prompts: Sequence[np.ndarray], row_prompts: Sequence[np.ndarray], budget: int) -> PrefixPlan:
    """Plan as many `prompts`, in order, as `budget` new tokens allow, and at least one. `row_prompts`: token ids whose keys
    and values each row holds."""
    width = max(len(prompt) for prompt in prompts)
    tokens = np.full((len(row_prompts) + len(prompts), width), -1, np.int32)
    for row, prompt in enumerate(row_prompts):
        tokens[row, : min(len(prompt), width)] = prompt[:width]
    stages = np.full(len(tokens), -1)
    drafts: list[Fill] = []
    draft_of: list[int] = []
    by_content: dict[bytes, int] = {}
    for number, prompt in enumerate(prompts):
        content = prompt.tobytes()
        if content not in by_content:
            filled = len(row_prompts) + len(drafts)
            shared, row = _best_source(prompt, tokens[:filled], stages[:filled])
            budget -= len(prompt) - shared
            if budget < 0 and number:
                break
            tokens[filled, : len(prompt)] = prompt
            stages[filled] = stages[row] + 1 if shared else 0
            source = row - len(row_prompts) if row >= len(row_prompts) else row
            by_content[content] = len(drafts)
            drafts.append(Fill(request=number, stage=int(stages[filled]), start=shared, source=source))
        draft_of.append(by_content[content])
    return _sort_fills(drafts, draft_of, [len(prompt) for prompt in prompts])


def _best_source(prompt: np.ndarray, tokens: np.ndarray, stages: np.ndarray) -> tuple[int, int]:
    """Number of tokens that `prompt` can copy, and the source row: the earliest stage among about equally long matches."""
    if not len(tokens):
        return 0, 0
    differs = tokens[:, : len(prompt) - 1] != prompt[:-1]  # the last token is always computed: its state gives the logits
    shared = np.where(differs.any(1), differs.argmax(1), len(prompt) - 1) if len(prompt) > 1 else np.zeros(len(tokens), np.int64)
    best = int(shared.max())
    if best < LEAST_SHARED:
        return 0, 0
    near = np.flatnonzero(shared > best - LEAST_SHARED)
    earliest = near[stages[near] == stages[near].min()]
    row = int(earliest[shared[earliest].argmax()])
    return int(shared[row]), row


def _sort_fills(drafts: list[Fill], draft_of: list[int], lengths: list[int]) -> PrefixPlan:
    def rank(place: int) -> tuple[int, int]:
        return drafts[place].stage, lengths[drafts[place].request] - drafts[place].start

    order = sorted(range(len(drafts)), key=rank)
    place_of = {draft: place for place, draft in enumerate(order)}
    fills = tuple(
        Fill(
            request=drafts[draft].request,
            stage=drafts[draft].stage,
            start=drafts[draft].start,
            source=place_of[drafts[draft].source] if drafts[draft].stage else drafts[draft].source,
        )
        for draft in order
    )
    return PrefixPlan(fills=fills, fill_of=tuple(place_of[draft] for draft in draft_of))
