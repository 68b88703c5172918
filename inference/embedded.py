"""vLLM inside this process: no other process, eager, one worker, stepped by the event loop that also plays the games.

One `step` of the engine runs whenever requests are pending and no coroutine is ready to add another, so batches fill themselves
and a run on one thread is repeatable. A policy version is served as merged weights: publishing waits until requests in flight
are done, reloads, and empties the prefix cache; requests that arrive meanwhile wait their few milliseconds.
"""

import asyncio
import os
import shutil
import tempfile
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from decoding.model_files import eos_token_id
from inference.engine import BASE_HASH, BASE_VERSION, EngineStats, Generation, GenerationRequest
from inference.settings import InferenceSettings
from telemetry.errors import EngineError

_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
}
"""Read by vLLM when it is imported: one process, the runner that knows our logits processor, and quiet."""


_COUNTED = (
    "requests",
    "prompt_tokens",
    "cached_tokens",
    "completion_tokens",
    "engine_steps",
    "forced_tokens",
    "preemptions",
)


@dataclass(slots=True)
class _Pending:
    answer: asyncio.Future[Generation]
    arrived: float
    version: int
    adapter_hash: str


class EmbeddedEngine:
    """The `Engine` contract over vLLM's synchronous `LLMEngine`."""

    def __init__(self, model: Path, settings: InferenceSettings, *, name: str = "embedded") -> None:
        self.name = name
        self._model = model
        self._settings = settings
        self._eos_id = eos_token_id(model)
        self._version, self._adapter_hash = BASE_VERSION, BASE_HASH
        self._pending: dict[str, _Pending] = {}
        self._stepping = False
        self._idle = asyncio.Event()
        self._open = asyncio.Event()
        self._publishing = asyncio.Lock()
        self._counts = dict.fromkeys(_COUNTED, 0)
        self._engine: Any = None
        self._base: dict[str, Any] = {}
        self._scratch = Path(tempfile.mkdtemp(prefix="entente-merged-"))

    async def start(self) -> None:
        """Load vLLM and the base model, then draw one throw-away completion with logprobs, which compiles what is lazy."""
        os.environ.update(_ENVIRONMENT)
        # A compiled kernel per shape of a product, and batches have any shape: 1,024 of them, oneDNN's own bound, are 150 MB.
        os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "128")
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(self._settings.kv_cache_gib)
        from vllm import EngineArgs
        from vllm.platforms import current_platform
        from vllm.v1.engine.llm_engine import LLMEngine

        from inference.legal_processor import LegalOrderProcessor

        arguments = EngineArgs(
            model=str(self._model),
            skip_tokenizer_init=True,
            dtype=self._settings.dtype,
            enforce_eager=True,
            distributed_executor_backend="uni",
            max_model_len=self._settings.max_model_length,
            max_num_seqs=self._settings.max_sequences,
            max_num_batched_tokens=self._settings.max_batched_tokens,
            block_size=self._settings.block_size,
            gpu_memory_utilization=self._settings.gpu_memory_share,
            enable_prefix_caching=True,
            # A prompt cut in two rewinds its seeded generator, which torch's CPU generators cannot.
            enable_chunked_prefill=not current_platform.is_cpu(),
            logprobs_mode="processed_logprobs",
            logits_processors=[LegalOrderProcessor],
            generation_config="vllm",
            use_tqdm_on_load=False,
            seed=0,
        )
        try:
            self._engine = LLMEngine.from_engine_args(arguments)
        except (RuntimeError, ValueError) as error:
            raise EngineError(f"vLLM could not load '{self._model}': {str(error).splitlines()[0]}") from error
        self._idle.set()
        self._open.set()
        try:
            self._warm_up()
        except Exception as error:
            if "C++ compiler" not in str(error) and type(error).__name__ != "InvalidCxxCompiler":
                raise
            raise EngineError("vLLM could not compile its kernel: install g++; `entente doctor` shows what is there") from error

    async def generate(self, request: GenerationRequest) -> Generation:
        """Draw one completion under the newest version; see `Engine.generate`."""
        await self._open.wait()
        self._admit(request)
        pending = _Pending(asyncio.get_running_loop().create_future(), time.monotonic(), self._version, self._adapter_hash)
        self._pending[request.request_id] = pending
        self._idle.clear()
        if not self._stepping:
            self._stepping = True
            asyncio.get_running_loop().call_soon(self._step)
        try:
            return await pending.answer
        except asyncio.CancelledError:
            self._abort([request.request_id])
            raise

    async def publish(self, version: int, adapter: Path, adapter_hash: str) -> None:
        """Drain, reload base plus `adapter`, forget cached prefixes, go on."""
        from inference.merge import load_base, merge_adapter

        async with self._publishing:
            if not self._base:
                self._base = load_base(self._model)
            target = self._scratch / f"v{version:06d}"
            merge_adapter(self._base, adapter, target)
            self._open.clear()
            try:
                await self._idle.wait()
                self._engine.collective_rpc("reload_weights", kwargs={"weights_path": str(target)})
                self._engine.reset_prefix_cache()
                self._version, self._adapter_hash = version, adapter_hash
            finally:
                self._open.set()
            shutil.rmtree(target)

    async def retire(self, oldest: int, keep: Collection[int] = ()) -> None:
        """Merged weights serve one version at a time: the newest."""

    async def stats(self) -> EngineStats:
        """Counts since the start, warm-up excluded."""
        return EngineStats(policy_version=self._version, running=len(self._pending), **self._counts)

    async def close(self) -> None:
        """Shut vLLM down and fail whatever is in flight."""
        self._fail_all(EngineError(f"engine '{self.name}' was closed"))
        shutil.rmtree(self._scratch, ignore_errors=True)
        if self._engine is not None:
            from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

            self._engine.engine_core.shutdown()
            self._engine = None
            cleanup_dist_env_and_memory()

    def _admit(self, request: GenerationRequest) -> None:
        from inference.sampling import sampling_params

        if self._engine is None:
            raise EngineError(f"engine '{self.name}' is not running")
        if request.request_id in self._pending:
            raise EngineError(f"request '{request.request_id}' is already in flight")
        length = len(request.prompt_ids) + request.table.longest
        if length > self._settings.max_model_length:
            raise EngineError(
                f"request '{request.request_id}' needs {length} tokens but max_model_length is "
                f"{self._settings.max_model_length}: raise inference.max_model_length"
            )
        try:
            self._engine.add_request(
                request.request_id,
                {"prompt_token_ids": list(request.prompt_ids)},
                sampling_params(request, self._eos_id),
            )
        except ValueError as error:
            raise EngineError(f"request '{request.request_id}' was refused: {error}") from error
        self._counts["requests"] += 1
        self._counts["prompt_tokens"] += len(request.prompt_ids)

    def _step(self) -> None:
        """One engine step; then again after whatever became ready, for as long as requests are pending."""
        if not self._pending:
            self._stepping = False
            return
        try:
            outputs = self._engine.step()
        except Exception as error:
            # The failing batch would stay unfinished for ever: every waiter is told, none is left hanging.
            self._stepping = False
            self._abort(list(self._pending))
            self._fail_all(EngineError(f"engine '{self.name}' failed in a step: {error}"))
            return
        self._counts["engine_steps"] += 1
        for output in outputs:
            if output.finished:
                self._finish(output)
        if not self._pending:
            self._idle.set()
        asyncio.get_running_loop().call_soon(self._step)

    def _finish(self, output: Any) -> None:
        pending = self._pending.pop(output.request_id, None)
        if pending is None or pending.answer.done():
            return
        completion = output.outputs[0]
        token_ids = np.asarray(completion.token_ids, np.int32)
        logprobs = np.fromiter(
            (position[token].logprob for position, token in zip(completion.logprobs, completion.token_ids, strict=True)),
            np.float32,
        )
        self._counts["completion_tokens"] += len(token_ids)
        self._counts["cached_tokens"] += output.num_cached_tokens or 0
        self._counts["forced_tokens"] += int(np.count_nonzero(logprobs == 0))
        scheduled, first, last = _clocks(output, pending.arrived)
        pending.answer.set_result(
            Generation(
                token_ids=token_ids,
                logprobs=logprobs,
                policy_version=pending.version,
                adapter_hash=pending.adapter_hash,
                worker=self.name,
                cached_tokens=output.num_cached_tokens or 0,
                queue_ms=1e3 * (scheduled - pending.arrived),
                prefill_ms=1e3 * (first - scheduled),
                decode_ms=1e3 * (last - first),
            )
        )

    def _abort(self, request_ids: list[str]) -> None:
        known = [request_id for request_id in request_ids if request_id in self._pending]
        if known and self._engine is not None:
            self._engine.abort_request(known)
        for request_id in known:
            if self._pending[request_id].answer.done():
                del self._pending[request_id]
        if not self._pending:
            self._idle.set()

    def _fail_all(self, error: EngineError) -> None:
        for pending in self._pending.values():
            if not pending.answer.done():
                pending.answer.set_exception(error)
        self._pending.clear()
        self._idle.set()

    def _warm_up(self) -> None:
        from vllm import SamplingParams

        parameters = SamplingParams(max_tokens=2, logprobs=0, detokenize=False, temperature=1.0, seed=0, ignore_eos=True)
        self._engine.add_request("warm-up", {"prompt_token_ids": [self._eos_id] * 4}, parameters)
        while self._engine.has_unfinished_requests():
            self._engine.step()
        self._engine.reset_prefix_cache()


def _clocks(output: Any, arrived: float) -> tuple[float, float, float]:
    """Monotonic times of first scheduling, first token and last, by vLLM's own record; never before the arrival."""
    times, latest = [], arrived
    for name in ("scheduled_ts", "first_token_ts", "last_token_ts"):
        latest = max(latest, getattr(output.metrics, name, 0.0) if output.metrics is not None else 0.0)
        times.append(latest)
    return times[0], times[1], times[2]
