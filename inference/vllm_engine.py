"""The common part of both vLLM engines: admission, policy versions, publishing and counts.

Policy versions are served in one of two ways (`inference.adapters`):

    slots         each version is a LoRA adapter with its own name, path and number; several versions are drawn side by side, and
                  requests in flight finish under theirs
    merge_reload  one version at a time, as merged weights; publishing waits until no request is in flight, reloads the weights
                  and empties the prefix cache; requests that arrive meanwhile wait

An adapter is checked before it is passed to vLLM, because a bad adapter ends the engine.
"""

import asyncio
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from decoding.architectures import read_architecture
from decoding.legal_table import END
from decoding.model_files import eos_token_id
from inference.calibrate import slots_are_cheap, slots_known_expensive
from inference.engine import EngineStats
from inference.engine_cards import vllm_build
from inference.memory_plan import adapter_mode
from inference.scratch import Scratch
from inference.served import LoadedVersion, ServedVersions
from inference.server_arguments import SLOT_RANKS
from inference.settings import AdapterMode, InferenceSettings
from inference.vllm_arguments import may_jump, refusals
from inference.warm_up import throwaway_request
from records.generation import Generation, GenerationCost, GenerationRequest
from records.policy_version import BASE, PolicyVersion
from telemetry.errors import DataError, EngineError, EngineLostError, VersionGoneError
from telemetry.progress import reporter

_COUNTED = (
    "requests", "prompt_tokens", "cached_tokens", "completion_tokens", "drawn_tokens", "forced_tokens", "engine_steps",
    "preemptions",
)  # fmt: skip


@dataclass(slots=True)
class _InFlight:
    answer: asyncio.Future[Any]
    """vLLM's final output."""
    served: LoadedVersion
    arrived: float
    error: EngineError | None = None
    """Why the engine cancelled `answer`; None if the caller did."""


class VllmEngine(ABC):
    """The `Engine` contract without the forward passes; used on one event loop."""

    def __init__(self, model: Path, settings: InferenceSettings, *, name: str) -> None:
        self.name = name
        self.adapters: AdapterMode = "merge_reload"
        """How versions are served; valid after `start`."""
        self._model, self._settings = model, settings
        self._eos_id = eos_token_id(model)
        self._versions = ServedVersions(name, 0)
        self._in_flight: dict[str, _InFlight] = {}
        self._idle, self._open, self._publishing = asyncio.Event(), asyncio.Event(), asyncio.Lock()
        self._counts = dict.fromkeys(_COUNTED, 0)
        self._lost: EngineLostError | None = None
        self._jumping = False
        self._base: dict[str, Any] = {}
        self._scratch = Scratch()

    # -- implemented by each engine -------------------------------------------------------------------------------------

    @abstractmethod
    async def _start(self, *, slots: bool) -> None:
        """Load vLLM and the base model, with LoRA slots or without."""

    @abstractmethod
    def _submit(self, request: GenerationRequest, served: LoadedVersion) -> asyncio.Future[Any]:
        """Pass a request to vLLM; the future gives its final output. Raises one of `refusals` if vLLM refuses it."""

    @abstractmethod
    async def _abort(self, request_id: str) -> None:
        """Abort a request in vLLM; does nothing if it has ended."""

    @abstractmethod
    async def _call(self, method: str, *arguments: Any, **named: Any) -> Any:
        """Call a method of vLLM's engine by name."""

    @abstractmethod
    async def _stop(self) -> None:
        """Shut vLLM down."""

    # -- the contract ---------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Load the base model, choose how versions are served, and warm up.

        A failed engine may be started again; it then serves the base model alone.

        Raises:
            InputError: vLLM has no LoRA for this model, and the settings ask for slots.
        """
        await self._stop()
        self._lost = None
        mode = adapter_mode(self._settings, read_architecture(self._model), on_cpu=vllm_build() == "cpu")
        if mode != self._settings.adapters:
            reporter().say(f"adapters: {mode}, because vLLM on a CPU has no LoRA for a mixture of experts")
        if mode == "auto" and slots_known_expensive(self._model, self._settings):
            mode = "merge_reload"
        await self._start(slots=mode != "merge_reload")
        self._idle.set()
        if mode == "auto" and not await slots_are_cheap(self, self._model, self._settings):
            await self._stop()
            await self._start(slots=False)
            mode = "merge_reload"
        self.adapters = "merge_reload" if mode == "merge_reload" else "slots"
        self._versions = ServedVersions(self.name, self._settings.adapter_slots if self.adapters == "slots" else 0)
        self._jumping = False
        if may_jump(self._settings):
            try:
                await self.jump_forced(True)
            except EngineError as error:
                if self._settings.jump_forced == "on":
                    raise
                reporter().say(f"forced tokens are drawn one by one: {error}")
        await self._warm_up()
        self._open.set()

    async def generate(self, request: GenerationRequest) -> Generation:
        """Draw one completion; see `Engine.generate`."""
        await self._open.wait()
        served = self._check(request)
        if request.table.is_sound and request.table.forced(request.table.start)[1] == END:
            return self._forced_generation(request, served)
        in_flight = self._admit(request, served)
        try:
            output = await in_flight.answer
        except asyncio.CancelledError:
            await self._abort(request.request_id)
            if in_flight.error is not None:
                raise in_flight.error from None
            raise
        finally:
            del self._in_flight[request.request_id]
            if not self._in_flight:
                self._idle.set()
        return self._to_generation(output, request, in_flight)

    async def publish(self, policy: PolicyVersion) -> None:
        """Serve a version; see `Engine.publish`."""
        from inference.adapter_check import check_adapter

        async with self._publishing:
            self._check_alive()
            if self._versions.serves(policy):
                self._versions.make_newest(policy.version)
                return
            if policy == BASE:
                await self._load_base()
                return
            most = self._settings.adapter_rank if self.adapters == "slots" else SLOT_RANKS[-1]
            await asyncio.to_thread(check_adapter, policy, self._model, most)
            served = LoadedVersion(policy=policy, slot=self._versions.next_slot())
            if served.slot:
                await self._load_slot(served)
            else:
                await self._load_merged(served)

    async def retire(self, oldest: int, keep: Collection[int] = ()) -> None:
        """Free old versions; see `Engine.retire`."""
        async with self._publishing:
            for served in self._versions.retire(oldest, keep):
                await self._drop(served, f"policy version {served.policy.version} was retired during the request")

    async def jump_forced(self, on: bool) -> None:
        """Append forced tokens to drawn ones from now on, or draw them one by one.

        Raises:
            EngineError: this engine does not support it, or requests are in flight.
        """
        if self._in_flight:
            raise EngineError(f"{len(self._in_flight)} requests are in flight: jumping can change only while none is")
        reasons = await self._call("collective_rpc", "jump_forced_tokens", args=(on,))
        if any(reasons):
            raise EngineError(
                f"engine '{self.name}' cannot jump over forced tokens: {reasons[0]}: set inference.jump_forced to 'off'"
            )
        self._jumping = on

    async def forget_prefixes(self) -> None:
        """See `EngineWithPrefixes`."""
        if not self._in_flight:
            await self._call("reset_prefix_cache")

    async def stats(self) -> EngineStats:
        """Counts since the start, warm-up excluded."""
        return EngineStats(policy_version=self._versions.newest.policy.version, running=len(self._in_flight), **self._counts)

    async def close(self) -> None:
        """Shut vLLM down and fail whatever is in flight."""
        self._fail_all(EngineError(f"engine '{self.name}' was closed"))
        self._scratch.close()
        await self._stop()

    # -- requests -------------------------------------------------------------------------------------------------------

    def _check_alive(self) -> None:
        if self._lost is not None:
            raise self._lost

    def _check(self, request: GenerationRequest) -> LoadedVersion:
        """Check a request; returns the version that will draw it."""
        self._check_alive()
        served = self._versions.find(request.version)
        if request.request_id in self._in_flight:
            raise EngineError(f"request '{request.request_id}' is already in flight")
        length = len(request.prompt_ids) + request.table.longest
        if length > self._settings.max_model_length:
            raise EngineError(
                f"request '{request.request_id}' needs {length} tokens but max_model_length is "
                f"{self._settings.max_model_length}: raise inference.max_model_length"
            )
        return served

    def _admit(self, request: GenerationRequest, served: LoadedVersion) -> _InFlight:
        try:
            answer = self._submit(request, served)
        except refusals() as error:
            raise EngineError(f"request '{request.request_id}' was refused: {error}") from error
        self._counts["requests"] += 1
        in_flight = self._in_flight[request.request_id] = _InFlight(answer, served, time.monotonic())
        self._idle.clear()
        return in_flight

    def _forced_generation(self, request: GenerationRequest, served: LoadedVersion) -> Generation:
        """The only legal completion of a request without a branching position."""
        token_ids = np.array(request.table.forced(0)[0], np.int32)
        self._counts["requests"] += 1
        self._counts["prompt_tokens"] += len(request.prompt_ids)
        self._counts["completion_tokens"] += len(token_ids)
        self._counts["forced_tokens"] += len(token_ids)
        return Generation(
            token_ids=token_ids,
            logprobs=np.zeros(len(token_ids), np.float32),
            policy=served.policy,
            worker=self.name,
        )

    def _to_generation(self, output: Any, request: GenerationRequest, in_flight: _InFlight) -> Generation:
        from inference.sampling import forced_prefix

        completion, (head, _) = output.outputs[0], forced_prefix(request.table)
        token_ids = np.array([*head, *completion.token_ids], np.int32)
        logprobs = np.zeros(len(token_ids), np.float32)
        logprobs[len(head) :] = [
            position[token].logprob for position, token in zip(completion.logprobs, completion.token_ids, strict=True)
        ]
        if not np.isfinite(logprobs).all():
            raise EngineError(
                f"request '{request.request_id}' was refused: the model's logits for it are not finite, so nothing can be drawn; "
                "its weights or its adapter may be broken"
            )
        cached = min(output.num_cached_tokens or 0, len(request.prompt_ids))
        self._counts["completion_tokens"] += len(token_ids)
        self._counts["prompt_tokens"] += len(request.prompt_ids)
        self._counts["cached_tokens"] += cached
        self._counts["forced_tokens"] += int(np.count_nonzero(logprobs == 0))
        self._counts["drawn_tokens"] += int(np.count_nonzero(logprobs)) if self._jumping else len(completion.token_ids)
        self._counts["preemptions"] += int(getattr(output.metrics, "num_preemptions", 0) or 0)
        scheduled, first, last = _timestamps(output, in_flight.arrived)
        return Generation(
            token_ids=token_ids,
            logprobs=logprobs,
            policy=in_flight.served.policy,
            worker=self.name,
            cost=GenerationCost(
                queue_ms=1e3 * (scheduled - in_flight.arrived),
                prefill_ms=1e3 * (first - scheduled),
                decode_ms=1e3 * (last - first),
                cached_tokens=cached,
            ),
        )

    def _fail_all(self, error: EngineError) -> None:
        for in_flight in self._in_flight.values():
            _cancel(in_flight, error)

    # -- versions -------------------------------------------------------------------------------------------------------

    async def _load_slot(self, served: LoadedVersion) -> None:
        await self.load(served)
        await self.draw(throwaway_request(f"warm-up of slot {served.slot}", self._eos_id), served)
        for replaced in self._versions.add(served):
            await self._drop(replaced, f"policy version {served.policy.version} was published anew with other weights")

    async def load(self, served: LoadedVersion) -> None:
        """Load an adapter into its slot without serving it."""
        try:
            await self._call("add_lora", lora_request(served))
        except (RuntimeError, ValueError) as error:
            raise DataError(f"vLLM cannot serve adapter '{served.policy.adapter}': {error}") from error

    async def draw(self, request: GenerationRequest, served: LoadedVersion) -> None:
        """Draw a request whose result is discarded and not counted."""
        output = await self._submit(request, served)
        if len(output.outputs[0].token_ids) != request.table.longest:
            raise EngineLostError(f"engine '{self.name}' did not draw what '{request.request_id}' asked for")

    async def _load_merged(self, served: LoadedVersion) -> None:
        from inference.merge import MERGE_LOSS_MAX, load_base, merge_adapter

        if not self._base:
            self._base = load_base(self._model)
        target = self._scratch.path / f"v{served.policy.version:06d}"
        lost = merge_adapter(self._base, served.policy.folder, target)
        if lost > MERGE_LOSS_MAX:
            shutil.rmtree(target)
            raise DataError(
                f"merging adapter '{served.policy.folder}' would lose {lost:.0%} of the update to rounding in "
                f"{self._settings.dtype}: set inference.dtype to 'float32', or inference.adapters to 'slots'"
            )
        await self._replace_weights(target, served)
        shutil.rmtree(target)

    async def _load_base(self) -> None:
        """Serve the base model again. With slots its weights are still loaded."""
        served = LoadedVersion(policy=BASE)
        if self.adapters == "slots":
            self._versions.add(served)
        else:
            await self._replace_weights(self._model, served)

    async def _replace_weights(self, folder: Path, served: LoadedVersion) -> None:
        """Load the weights in `folder` once the engine is idle, and serve them."""
        self._open.clear()
        try:
            await self._idle.wait()
            await self._call("collective_rpc", "reload_weights", kwargs={"weights_path": str(folder)})
            await self._call("reset_prefix_cache")
            self._versions.add(served)
        finally:
            self._open.set()

    async def _drop(self, served: LoadedVersion, reason: str) -> None:
        """Cancel the requests in flight under a version that is no longer served, and free its slot."""
        affected = [in_flight for in_flight in self._in_flight.values() if in_flight.served is served]
        for in_flight in affected:
            _cancel(in_flight, VersionGoneError(f"{reason}: ask for {self._versions.newest.policy.version}"))
        while any(in_flight in self._in_flight.values() for in_flight in affected):
            await asyncio.sleep(0)
        if served.slot:
            await self._call("remove_lora", served.slot)

    async def _warm_up(self) -> None:
        """Draw throw-away completions with mask and log-probabilities, so that lazy compilation happens now."""
        for length in (8, 2 * self._settings.block_size + 8):
            await self.draw(throwaway_request(f"warm-up/{length}", self._eos_id, prompt=length), self._versions.newest)
        await self._call("reset_prefix_cache")
        self._counts = dict.fromkeys(_COUNTED, 0)


def lora_request(served: LoadedVersion) -> Any:
    """vLLM's LoRA request for a version in a slot; None for the loaded weights."""
    from vllm.lora.request import LoRARequest

    return (
        LoRARequest(f"v{served.policy.version}-{served.slot}", served.slot, str(served.policy.adapter)) if served.slot else None
    )


def _cancel(in_flight: _InFlight, error: EngineError) -> None:
    if not in_flight.answer.done():
        in_flight.error = error
        in_flight.answer.cancel()


def _timestamps(output: Any, arrived: float) -> tuple[float, float, float]:
    """Monotonic times of scheduling, first token and last token, from vLLM's metrics; none is before `arrived`."""
    times, latest = [], arrived
    for name in ("scheduled_ts", "first_token_ts", "last_token_ts"):
        latest = max(latest, getattr(output.metrics, name, 0.0) if output.metrics is not None else 0.0)
        times.append(latest)
    return times[0], times[1], times[2]
