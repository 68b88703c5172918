"""The engine of the old way: vLLM behind whole generate calls, which end with their slowest completion.

As the old system's inference app: a call carries prompts and legal orders as values, the engine's side tokenises the texts,
`TrieProcessor` constrains them, at most 120 new tokens, log-probabilities of the unmasked distribution; a new adapter replaces
the previous one. Remote calls and volumes are left out; a call and its result are only converted to JSON and back.
"""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tokenizers import Tokenizer

from benchmarks.old_way import trie
from benchmarks.old_way.stages import StageClock
from benchmarks.old_way.trie import MOVES, RECORD, WANTED, TrieProcessor
from inference import embedded
from inference.settings import InferenceSettings
from records.generation import Generation

MAX_NEW_TOKENS = 120


class TimedEngine(embedded.EmbeddedEngine):
    """Our engine with its steps counted by a clock."""

    def __init__(self, model: Path, settings: InferenceSettings, *, name: str, clock: StageClock, raw_logprobs: bool = False):
        """`raw_logprobs`: log-probabilities of the unmasked distribution, which the old trainer uses."""
        super().__init__(model, settings, name=name)
        self.clock = clock
        self._changes: dict[str, Any] = {"logprobs_mode": "raw_logprobs"} if raw_logprobs else {}

    async def _start(self, *, slots: bool) -> None:
        # Replace the function that makes the engine's arguments, to add the changes to its result.
        plain = embedded.engine_arguments
        embedded.engine_arguments = lambda *given, **named: plain(*given, **named) | self._changes
        try:
            await super()._start(slots=slots)
        finally:
            embedded.engine_arguments = plain

    def _step(self) -> None:
        before = trie.trie_s
        with self.clock("inference"):
            super()._step()
        self.clock.move("inference", "mask", trie.trie_s - before)


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRequest:
    """One prompt of a generate call."""

    request_id: str
    prompt: str
    valid_moves: dict[str, list[str]]
    wanted: int
    """Number of orders after which the completion ends."""
    seed: int
    temperature: float


class OldEngine(TimedEngine):
    """The old engine; versions are published as in ours."""

    def __init__(self, model: Path, settings: InferenceSettings, *, name: str, clock: StageClock, raw_logprobs: bool = True):
        super().__init__(model, settings, name=name, clock=clock, raw_logprobs=raw_logprobs)
        self._tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        # vLLM draws here, so a logit is no log-probability.
        self._changes = {"logprobs_mode": "processed_logprobs"} | self._changes
        self._changes["logits_processors"] = [f"{TrieProcessor.__module__}:{TrieProcessor.__qualname__}"]
        TrieProcessor.tokenizer, TrieProcessor.eos = self._tokenizer, self._eos_id
        TrieProcessor.separator = self._tokenizer.encode("\n", add_special_tokens=False).ids[0]

    async def generate_call(self, requests: Sequence[TextRequest], *, record: bool) -> list[tuple[list[int], Generation, Any]]:
        """Draw all requests; returns prompt ids, generations and, with `record`, the ids allowed at each position."""
        with self.clock("call"):
            asked = json.loads(json.dumps([asdict(request) for request in requests]))
        with self.clock("tokenise"):
            ready = [self._ready(values, record) for values in asked]
        drawn = await asyncio.gather(*(self.generate(each) for each in ready))
        with self.clock("call"):
            json.loads(json.dumps([(each.token_ids.tolist(), each.logprobs.tolist()) for each in drawn]))
        return [
            (each.prompt_ids, generation, TrieProcessor.records.pop(each.request_id, None))
            for each, generation in zip(ready, drawn, strict=True)
        ]

    def _ready(self, values: dict[str, Any], record: bool) -> Any:
        ids = self._tokenizer.encode(values["prompt"], add_special_tokens=False).ids
        extra = {MOVES: values["valid_moves"], WANTED: values["wanted"]} | ({RECORD: values["request_id"]} if record else {})
        return SimpleNamespace(
            request_id=values["request_id"],
            prompt_ids=ids,
            table=SimpleNamespace(longest=MAX_NEW_TOKENS, is_sound=False),
            version=None,
            seed=values["seed"],
            temperature=values["temperature"],
            extra=extra,
        )

    def _submit(self, request: Any, served: Any) -> "asyncio.Future[Any]":
        # Our engine makes parameters from a table. Replace that function by one that returns the old parameters.
        from inference import sampling

        params = sampling.SamplingParams(
            temperature=request.temperature,
            top_p=1.0,
            top_k=0,
            seed=request.seed,
            max_tokens=min(MAX_NEW_TOKENS, request.table.longest),
            stop_token_ids=[self._eos_id],
            logprobs=0,
            detokenize=False,
            output_kind=sampling.RequestOutputKind.FINAL_ONLY,
            extra_args=getattr(request, "extra", {}),
        )
        plain = sampling.sampling_params
        sampling.sampling_params = lambda *_, **__: params
        try:
            return super()._submit(request, served)
        finally:
            sampling.sampling_params = plain

    async def draw(self, request: Any, served: Any) -> None:
        """Draw a throwaway request."""
        await self._submit(request, served)
