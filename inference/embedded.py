"""vLLM inside this process, stepped by the event loop that also plays the games.

A step runs when requests are pending and no coroutine is ready to add another. Batches are therefore as full as they can be, and
a run on one thread is repeatable.
"""

import asyncio
from pathlib import Path
from typing import Any

from inference.served import LoadedVersion
from inference.settings import InferenceSettings
from inference.vllm_arguments import engine_arguments, prepare_environment
from inference.vllm_engine import VllmEngine, lora_request
from records.generation import GenerationRequest
from telemetry.errors import EngineError, EngineLostError

_open_engines: set["EmbeddedEngine"] = set()
"""Running engines. A shutdown destroys vLLM's process groups, which all engines share, so the last one to close does it."""
_closed_engines: list[Any] = []
"""vLLM engines of those closed before. They are referenced here because vLLM shuts an engine down when it is collected."""


class EmbeddedEngine(VllmEngine):
    """The `Engine` contract over vLLM's synchronous `LLMEngine`."""

    def __init__(self, model: Path, settings: InferenceSettings, *, name: str = "embedded", series: bool = False) -> None:
        """`series`: keep vLLM's Prometheus series, which takes 2 % of a rollout's time."""
        super().__init__(model, settings, name=name)
        self._series = series
        self._engine: Any = None
        self._futures: dict[str, asyncio.Future[Any]] = {}
        self._stepping = False

    async def _start(self, *, slots: bool) -> None:
        prepare_environment(self._settings, own_process=False)
        from vllm import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        arguments = engine_arguments(self._model, self._settings, slots=slots)
        try:
            self._engine = LLMEngine.from_engine_args(EngineArgs(**arguments, distributed_executor_backend="uni"))
        except (AssertionError, RuntimeError, ValueError) as error:  # an assertion: a model that vLLM knows only in part
            raise EngineError(f"vLLM could not load '{self._model}': {str(error).splitlines()[0]}") from error
        if not self._series:
            self._engine.logger_manager = None
        _open_engines.add(self)

    async def _warm_up(self) -> None:
        try:
            await super()._warm_up()
        except EngineLostError as error:
            if "C++ compiler" not in str(error) and "InvalidCxxCompiler" not in str(error):
                raise
            raise EngineError("vLLM could not compile its kernel: install g++ (see `entente doctor`)") from error

    def _submit(self, request: GenerationRequest, served: LoadedVersion) -> asyncio.Future[Any]:
        from inference.sampling import prompt_ids, sampling_params

        if self._engine is None:
            raise EngineError(f"engine '{self.name}' is not running")
        self._engine.add_request(
            request.request_id,
            {"prompt_token_ids": prompt_ids(request)},
            sampling_params(request, self._eos_id),
            lora_request=lora_request(served),
        )
        loop = asyncio.get_running_loop()
        answer = self._futures[request.request_id] = loop.create_future()
        if not self._stepping:
            self._stepping = True
            loop.call_soon(self._step)
        return answer

    async def _abort(self, request_id: str) -> None:
        if self._futures.pop(request_id, None) is not None and self._engine is not None:
            self._engine.abort_request([request_id])

    async def _call(self, method: str, *arguments: Any, **named: Any) -> Any:
        return getattr(self._engine, method)(*arguments, **named)

    async def _stop(self) -> None:
        if self._engine is not None:
            from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

            _open_engines.discard(self)
            _closed_engines.append(self._engine)
            self._engine = None
            if not _open_engines:
                while _closed_engines:
                    _closed_engines.pop().engine_core.shutdown()
                cleanup_dist_env_and_memory()

    def _step(self) -> None:
        """Run one engine step, and schedule the next while requests are pending."""
        if not self._futures or self._engine is None:
            self._stepping = False
            return
        try:
            outputs = self._engine.step()
        except Exception as error:
            # The failing batch would never finish, so every waiting request fails now.
            self._stepping = False
            self._lost = EngineLostError(f"engine '{self.name}' failed in a step: {type(error).__name__}: {error}")
            self._lost.__cause__ = error
            for answer in self._futures.values():
                if not answer.done():
                    answer.set_exception(self._lost)
            self._engine.abort_request(list(self._futures))
            self._futures.clear()
            return
        self._counts["engine_steps"] += 1
        for output in outputs:
            if output.finished and (answer := self._futures.pop(output.request_id, None)) and not answer.done():
                answer.set_result(output)
        asyncio.get_running_loop().call_soon(self._step)
