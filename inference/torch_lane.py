"""The requests of one policy version in the torch engine: which row each has, and what is computed for them next.

Rows stand without gaps: those in flight first, each at its place in `running`; rows of requests that ended stay behind them until
they are overwritten, so that later prompts can go on from their beginnings. One call is one prefill or one decoding step.
"""

import asyncio
import time
from collections import deque
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from inference.legal_draw import Course, draw
from inference.prefix_plan import PrefixPlan, plan_prefixes
from inference.torch_model import KeyValueRows, Step, TorchModel
from records.generation import Generation, GenerationRequest
from records.policy_version import BASE_HASH, PolicyVersion
from telemetry.errors import EngineError


@dataclass(slots=True, eq=False)
class Draw:
    """One request on its way."""

    request: GenerationRequest
    course: Course
    answer: asyncio.Future[Generation]
    known: np.ndarray
    """int32 token ids that prefill computes: the prompt, and what must follow it."""
    arrived: float
    scheduled: float = 0.0
    first: float = 0.0
    computed: int = 0
    """Columns of its row that hold keys and values."""
    cached: int = 0
    """Prompt tokens that were taken over from other rows."""

    @property
    def over(self) -> bool:
        """Nothing is left to do: it is whole, or nobody waits for it any more."""
        return self.course.done or self.answer.done()


class Lane:
    """One policy version's rows and queue."""

    def __init__(self, model: TorchModel, most: int, policy: PolicyVersion) -> None:
        """A lane of at most `most` rows that draws under `policy`."""
        self.policy = policy
        self.adapter = "" if policy.adapter_hash == BASE_HASH else policy.adapter_hash
        """Name of the adapter in the model; empty: none."""
        self.waiting: deque[Draw] = deque()
        self.running: list[Draw] = []
        self.steps = 0
        """Forward passes so far."""
        self._model, self._most = model, most
        self._rows: KeyValueRows = model.new_rows(most)
        self._standing: list[np.ndarray] = []
        """What the rows were filled with, those of requests that ended too."""

    @property
    def busy(self) -> bool:
        """Somebody waits for something here."""
        return bool(self.waiting or self.running)

    def forget(self) -> None:
        """Give the rows' memory back; nothing may be in flight."""
        self._rows, self._standing = self._model.new_rows(self._most), []
        self.waiting.clear()
        self.running.clear()

    def advance(self, room: int, budget: int) -> list[Draw]:
        """Prefill some of what waits, if `room` rows are free, else decode what runs; returns what has ended, whole or not."""
        ended = [task for task in self.waiting if task.over]
        if ended:
            self.waiting = deque(task for task in self.waiting if not task.over)
        ended += self._release()
        self._model.choose(self.adapter)
        if self.waiting and room > 0:
            self._prefill(list(islice(self.waiting, room)), budget)
        elif self.running:
            self._decode()
        return ended + self._release()

    def _prefill(self, tasks: list[Draw], budget: int) -> None:
        now = time.monotonic()
        plan = plan_prefixes([task.known for task in tasks], self._standing, budget)
        tasks = tasks[: len(plan.fill_of)]
        for _ in tasks:
            self.waiting.popleft()
        fillers = [fill.request for fill in plan.fills]
        order = fillers + sorted(set(range(len(tasks))).difference(fillers))
        first = len(self.running)
        self._rows.reserve(first + len(tasks), max(len(task.known) + task.request.table.longest for task in tasks))
        states = self._fill(plan, tasks, first, budget)
        copied = [plan.fill_of[number] for number in order[len(fillers) :]]
        if copied:
            targets = range(first + len(fillers), first + len(order))
            self._rows.copy([first + fill for fill in copied], list(targets), max(len(task.known) for task in tasks))
        self._standing[first : first + len(order)] = [tasks[number].known for number in order]
        for number in order:
            task, fill = tasks[number], plan.fills[plan.fill_of[number]]
            task.scheduled, task.computed = now, len(task.known)
            task.cached = min(fill.start if fill.request == number else len(task.known), len(task.request.prompt_ids))
            self.running.append(task)
        self._draw([tasks[number] for number in order], states[[plan.fill_of[number] for number in order]])
        now = time.monotonic()
        for task in tasks:
            task.first = now

    def _fill(self, plan: PrefixPlan, tasks: list[Draw], first: int, budget: int) -> Tensor:
        """Compute the fills of `plan` in rows from `first` on; the state after each one's last token, [fills, hidden]."""
        states: list[Tensor] = []
        starts = [fill.start for fill in plan.fills]
        known = [tasks[fill.request].known[fill.start :] for fill in plan.fills]
        for stage in range(plan.fills[-1].stage + 1):
            places = [place for place, fill in enumerate(plan.fills) if fill.stage == stage]
            continued = [place for place in places if starts[place]]
            if continued:
                sources = [plan.fills[place].source + first * (stage > 0) for place in continued]
                self._rows.copy(sources, [first + place for place in continued], max(starts[place] for place in continued))
            done, end = places[0], places[-1] + 1
            while done < end:
                # Attention pads to the longest, which is the last: what it pads is bounded as what is computed is.
                until = done + 1
                while until < end and (until + 1 - done) * len(known[until]) <= budget:
                    until += 1
                states.append(self._forward(first + done, starts[done:until], known[done:until]))
                done = until
        return torch.cat(states)

    def _decode(self) -> None:
        starts, fresh = [], []
        for task in self.running:
            starts.append(task.computed)
            tail = task.course.token_ids[task.computed - len(task.request.prompt_ids) :]
            fresh.append(np.array(tail, np.int32))
            task.computed += len(tail)
        self._draw(self.running, self._forward(0, starts, fresh))

    def _forward(self, first: int, starts: list[int], fresh: list[np.ndarray]) -> Tensor:
        self.steps += 1
        lengths = np.fromiter((len(tokens) for tokens in fresh), np.int64, len(fresh))
        step = Step(self._rows, first, np.array(starts, np.int64), lengths, self._model.device)
        return self._model.forward(np.concatenate(fresh), step)

    def _draw(self, tasks: list[Draw], states: Tensor) -> None:
        allowed = [task.course.allowed() for task in tasks]
        counts = np.fromiter((len(tokens) for tokens in allowed), np.int64, len(allowed))
        logits = self._model.legal_logits(states, counts, np.concatenate(allowed))
        for place in draw([task.course for task in tasks], allowed, logits):
            if not tasks[place].answer.done():
                tasks[place].answer.set_exception(
                    EngineError(
                        f"request '{tasks[place].request.request_id}' was refused: the model's logits for it are not finite, so "
                        "nothing can be drawn; its weights or its adapter may be broken"
                    )
                )

    def _release(self) -> list[Draw]:
        """Take what has ended out of its rows, and close the gaps with rows from the end."""
        left = [place for place, task in enumerate(self.running) if not task.over]
        if len(left) == len(self.running):
            return []
        ended = [task for task in self.running if task.over]
        gaps = sorted(set(range(len(left))).difference(left))
        movers = [place for place in left if place >= len(left)]
        if movers:
            self._rows.copy(movers, gaps, max(self.running[place].computed for place in movers))
        for gap, mover in zip(gaps, movers, strict=True):
            self.running[gap], self._standing[gap] = self.running[mover], self._standing[mover]
        del self.running[len(left) :]
        return ended
