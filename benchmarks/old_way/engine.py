"""The engine of the old way: whole generate calls, which end with their slowest completion.

As the old system's inference app: a call carries prompts and legal orders as values, the engine's side tokenises the texts, and
an `OrderTrie` for each request constrains them, at most 120 new tokens. Kinder than the original, which was vLLM on a GPU behind
HTTP: our torch engine draws, whose prefix cache finds equal beginnings; only the allowed ids reach the model's head; a call and
its result are only converted to JSON and back.
"""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from benchmarks.old_way.trie import OrderTrie
from decoding.model_files import eos_token_id
from inference.settings import InferenceSettings
from inference.torch_engine import TorchEngine
from records.generation import Generation, GenerationRequest
from records.policy_version import PolicyVersion


class OldEngine:
    """Generate calls over a torch engine."""

    def __init__(self, model: Path, settings: InferenceSettings) -> None:
        longest = max(1024, settings.max_model_length)
        self.inner = TorchEngine(model, settings.model_copy(update={"max_model_length": longest}), name="old-way")
        self._tokenizer, self._eos = Tokenizer.from_file(str(model / "tokenizer.json")), eos_token_id(model)

    async def generate_call(self, requests: Sequence[dict[str, Any]]) -> list[tuple[list[int], Generation]]:
        """Draw all requests (see `play.ask`); returns prompt ids and generations once the last one is drawn."""
        ready = [self._ready(values) for values in json.loads(json.dumps(requests))]
        drawn = await asyncio.gather(*(self.inner.generate(request) for request in ready))
        json.loads(json.dumps([(each.token_ids.tolist(), each.logprobs.tolist()) for each in drawn]))
        return [(list(request.prompt_ids), generation) for request, generation in zip(ready, drawn, strict=True)]

    async def publish(self, policy: PolicyVersion) -> None:
        """Draw new requests from `policy`. Older versions stay, because requests may wait for them; a benchmark has few."""
        await self.inner.publish(policy)

    def _ready(self, values: dict[str, Any]) -> GenerationRequest:
        prompt = self._tokenizer.encode(values["prompt"], add_special_tokens=False).ids
        table: Any = OrderTrie(self._tokenizer, values["valid_moves"], values["wanted"], self._eos)
        return GenerationRequest(
            request_id=values["name"],
            prompt_ids=prompt,
            table=table,
            seed=values["seed"],
            temperature=values["temperature"],
            snapshot_id="",
        )
