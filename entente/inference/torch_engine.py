"""A small engine without vLLM: for platforms without vLLM, and as the reference in parity tests.

The event loop of its requests steps it: one prefill or decoding pass of one policy version, then other coroutines run. Forced
tokens are computed together with the sampled token before them. A prefix that a row in memory holds is not computed again.
"""

import asyncio
import time
from collections.abc import Collection
from pathlib import Path

import numpy as np
import torch

from entente.decoding.model_files import max_position
from entente.inference.adapter_check import check_adapter
from entente.inference.engine import Engine, EngineStats, check_request
from entente.inference.engine_cards import engine_cards
from entente.inference.settings import InferenceSettings
from entente.inference.torch_batcher import Batcher, PartialCompletion
from entente.inference.torch_model import TorchModel
from entente.records.policy_version import BASE, BASE_HASH, BASE_VERSION, PolicyVersion
from entente.records.rows import Generation, GenerationRequest
from entente.telemetry.cards import take_cards
from entente.telemetry.errors import EngineError, EngineLostError, VersionGoneError, first_line

_COUNTED = ("requests", "prompt_tokens", "cached_tokens", "completion_tokens", "sampled_tokens", "forced_tokens")
MAX_RANK = 512


def best_device() -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda")
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")


class TorchEngine(Engine):
    name = "torch"

    def __init__(self, model: Path, settings: InferenceSettings, *, device: torch.device | None = None) -> None:
        self._folder, self._settings = model, settings
        self._device = device
        self._model: TorchModel | None = None
        self._positions = 0
        self._served: dict[int, Batcher] = {}
        self._newest = BASE_VERSION
        self._batchers: list[Batcher] = []
        """Served batchers, and replaced ones with requests in flight; the next to step comes first."""
        self._requests: dict[str, PartialCompletion] = {}
        self._stepping = False
        self._publishing = asyncio.Lock()
        self._counts = dict.fromkeys(_COUNTED, 0)
        self._steps = 0

    async def start(self) -> None:
        take_cards(engine_cards(self._settings))
        try:
            self._model = await asyncio.to_thread(TorchModel, self._folder, self._settings.dtype, self._device or best_device())
        except (OSError, RuntimeError, ValueError) as error:
            raise EngineError(f"torch could not load '{self._folder}': {first_line(error)}") from error
        self._positions = max_position(self._folder)
        self._add_batcher(BASE)

    async def generate(self, request: GenerationRequest) -> Generation:
        answer: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
        pending = self._admit(request, answer)
        if not self._stepping:
            self._stepping = True
            asyncio.get_running_loop().call_soon(self._step)
        try:
            return await answer
        finally:
            if self._requests.get(request.request_id) is pending:
                del self._requests[request.request_id]

    async def publish(self, policy: PolicyVersion) -> None:
        async with self._publishing:
            model = self._running_model()
            batcher = self._served.get(policy.version)
            if batcher is None or batcher.policy != policy:
                if policy.adapter_hash != BASE_HASH:
                    facts = await asyncio.to_thread(check_adapter, policy, self._folder, MAX_RANK)
                    model.add_adapter(policy.adapter_hash, policy.folder, facts)
                self._add_batcher(policy)
            self._newest = policy.version
            self._free_unused()

    async def retire(self, oldest: int, keep: Collection[int] = ()) -> None:
        for version in [v for v in self._served if v < oldest and v not in keep and v != self._newest]:
            del self._served[version]
            gone = VersionGoneError(f"policy version {version} was retired from engine '{self.name}': ask for a newer one")
            for batcher in [batcher for batcher in self._batchers if batcher.policy.version == version]:
                for pending in (*batcher.waiting, *batcher.running):
                    pending.fail(gone)
                batcher.clear()
        self._free_unused()

    async def forget_prefixes(self) -> None:
        if not any(batcher.busy for batcher in self._batchers):
            for batcher in self._batchers:
                batcher.clear()
            # Lanes that take turns change their order, and which requests share a pass depends on it.
            self._batchers.sort(key=lambda batcher: batcher.policy.version)

    async def use_threads(self, count: int) -> None:
        torch.set_num_threads(count)  # OpenMP keeps the number by thread, and the engine steps on this one

    async def stats(self) -> EngineStats:
        running = len(self._requests)
        return EngineStats(policy_version=self._newest, running=running, engine_steps=self._steps, **self._counts)

    async def close(self) -> None:
        self._fail_all(EngineLostError(f"engine '{self.name}' was closed"))
        self._served.clear()
        self._batchers.clear()
        self._model = None

    def _running_model(self) -> TorchModel:
        if self._model is None:
            raise EngineLostError(f"engine '{self.name}' is not running")
        return self._model

    def _add_batcher(self, policy: PolicyVersion) -> None:
        batcher = Batcher(self._running_model(), self._settings.max_sequences, policy)
        self._served[policy.version] = batcher
        self._batchers.append(batcher)

    def _admit(self, request: GenerationRequest, answer: asyncio.Future[Generation]) -> PartialCompletion:
        vocabulary = self._running_model().vocabulary_size
        where = f"request '{request.request_id}'"
        same = self._requests.get(request.request_id)
        if same is not None and not same.finished:
            raise EngineError(f"{where} is already in flight")
        if (length := len(request.prompt_ids) + request.table.longest) > self._positions:
            raise EngineError(f"{where} needs {length} tokens but the model reads {self._positions}: shorten prompts or thoughts")
        check_request(request, self._settings.max_model_length, vocabulary)
        version = self._newest if request.version is None else request.version
        batcher = self._served.get(version)
        if batcher is None:
            raise VersionGoneError(f"engine '{self.name}' does not serve policy version {version}: ask for {self._newest}")
        pending = PartialCompletion(request, answer)
        self._requests[request.request_id] = pending
        batcher.waiting.append(pending)
        self._counts["requests"] += 1
        return pending

    def _step(self) -> None:
        batcher = next((batcher for batcher in self._batchers if batcher.busy), None)
        if batcher is None:
            self._stepping = False
            return
        self._batchers.remove(batcher)
        self._batchers.append(batcher)
        room = self._settings.max_sequences - sum(len(each.running) for each in self._batchers)
        before = batcher.steps
        try:
            with torch.inference_mode():
                ended = batcher.advance(room, self._settings.max_batched_tokens)
        except Exception as error:
            self._stepping = False
            self._fail_all(EngineLostError(f"engine '{self.name}' failed in a step: {error}"))
            return
        self._steps += batcher.steps - before
        for pending in ended:
            self._finish(pending, batcher)
        if not batcher.busy:
            self._free_unused()
        asyncio.get_running_loop().call_soon(self._step)

    def _finish(self, pending: PartialCompletion, batcher: Batcher) -> None:
        if pending.answer.done():
            return
        now = time.monotonic()
        scheduled, first = pending.scheduled or now, pending.first or now
        self._counts["completion_tokens"] += len(pending.token_ids)
        self._counts["prompt_tokens"] += len(pending.request.prompt_ids)
        self._counts["cached_tokens"] += pending.cached
        self._counts["forced_tokens"] += pending.forced
        self._counts["sampled_tokens"] += len(pending.token_ids) - pending.forced
        pending.answer.set_result(
            Generation(
                token_ids=np.array(pending.token_ids, np.int32),
                logprobs=np.array(pending.logprobs, np.float32),
                policy=batcher.policy,
                worker=self.name,
                queue_ms=1e3 * (scheduled - pending.arrived),
                prefill_ms=1e3 * (first - scheduled),
                decode_ms=1e3 * (now - first),
                cached_tokens=pending.cached,
            )
        )

    def _free_unused(self) -> None:
        """Free the rows of idle versions except the newest, and the adapters of versions that are no longer served."""
        served = list(self._served.values())
        for batcher in self._batchers:
            if not batcher.busy and batcher is not self._served.get(self._newest):
                batcher.clear()
        dropped = [batcher for batcher in self._batchers if not batcher.busy and batcher not in served]
        self._batchers = [batcher for batcher in self._batchers if batcher not in dropped]
        for name in {batcher.adapter for batcher in dropped} - {batcher.adapter for batcher in self._batchers}:
            self._running_model().remove_adapter(name)

    def _fail_all(self, error: EngineError) -> None:
        for pending in self._requests.values():
            pending.fail(error)
        for batcher in self._batchers:
            batcher.clear()
