"""The engine of the old way: vLLM behind whole generate calls, which end with their slowest completion.

As the old system's inference app: a call carries prompts and legal orders as values, the engine's side tokenises the texts,
`TrieProcessor` constrains them, at most 120 new tokens, log-probabilities of the unmasked distribution; a new adapter replaces
the previous one. Remote calls and volumes are left out; a call and its result are only converted to JSON and back.
"""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tokenizers import Tokenizer

from benchmarks.old_way.trie import MOVES, WANTED, TrieProcessor
from inference import embedded
from inference.settings import InferenceSettings
from records.generation import Generation

MAX_NEW_TOKENS = 120


def engine_settings(settings: InferenceSettings, *, jump: bool) -> InferenceSettings:
    """The settings of both ways' engines: on a CPU the old system's LoRA slots would take ten times as long as the base model."""
    length = max(1024, settings.max_model_length)
    changes = {"adapters": "merge_reload", "max_model_length": length, "jump_forced": "on" if jump else "off"}
    return settings.model_copy(update=changes)


class OldEngine(embedded.EmbeddedEngine):
    """The old engine; versions are published as in ours."""

    def __init__(self, model: Path, settings: InferenceSettings) -> None:
        super().__init__(model, engine_settings(settings, jump=False), name="old-way")  # a trie does not know forced tokens
        self._tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        TrieProcessor.tokenizer, TrieProcessor.eos = self._tokenizer, self._eos_id
        TrieProcessor.separator = self._tokenizer.encode("\n", add_special_tokens=False).ids[0]

    async def generate_call(self, requests: Sequence[dict[str, Any]]) -> list[tuple[list[int], Generation]]:
        """Draw all requests (see `play.ask`); returns prompt ids and generations once the last one is drawn."""
        ready = [self._ready(values) for values in json.loads(json.dumps(requests))]
        drawn = await asyncio.gather(*(self.generate(each) for each in ready))
        json.loads(json.dumps([(each.token_ids.tolist(), each.logprobs.tolist()) for each in drawn]))
        return [(each.prompt_ids, generation) for each, generation in zip(ready, drawn, strict=True)]

    def _ready(self, values: dict[str, Any]) -> Any:
        return SimpleNamespace(
            request_id=values["name"],
            prompt_ids=self._tokenizer.encode(values["prompt"], add_special_tokens=False).ids,
            table=SimpleNamespace(longest=MAX_NEW_TOKENS, is_sound=False),
            version=None,
            seed=values["seed"],
            temperature=values["temperature"],
            extra={MOVES: values["valid_moves"], WANTED: values["wanted"]},
        )

    async def _start(self, *, slots: bool) -> None:
        # Our engine makes its arguments with a function. Replace it to add those of the old one, which lets vLLM draw.
        plain, processor = embedded.engine_arguments, f"{TrieProcessor.__module__}:{TrieProcessor.__qualname__}"
        changes = {"logprobs_mode": "raw_logprobs", "logits_processors": [processor]}
        embedded.engine_arguments = lambda *given, **named: plain(*given, **named) | changes
        try:
            await super()._start(slots=slots)
        finally:
            embedded.engine_arguments = plain

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
