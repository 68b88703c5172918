"""vLLM inside this process: no other process, one worker, stepped by the event loop that also plays the games.

One `step` of the engine runs whenever requests are pending and no coroutine is ready to add another, so batches fill themselves
and a run on one thread is repeatable.
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

_in_this_process: set["EmbeddedEngine"] = set()
"""Engines that are up: a shutdown takes vLLM's ranks and groups from all of them, so the last one does it for all."""
_put_aside: list[Any] = []
"""vLLM's own of those that were closed before; it shuts itself down when nobody holds it."""


class EmbeddedEngine(VllmEngine):
    """The `Engine` contract over vLLM's synchronous `LLMEngine`."""

    def __init__(self, model: Path, settings: InferenceSettings, *, name: str = "embedded", series: bool = False) -> None:
        """`series`: keep vLLM's Prometheus series too, a fiftieth of a rollout's time."""
        super().__init__(model, settings, name=name)
        self._series = series
        self._engine: Any = None
        self._answers: dict[str, asyncio.Future[Any]] = {}
        self._stepping = False

    async def _start(self, *, slots: bool) -> None:
        prepare_environment(self._settings, own_process=False)
        from vllm import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        arguments = engine_arguments(self._model, self._settings, slots=slots)
        try:
            self._engine = LLMEngine.from_engine_args(EngineArgs(**arguments, distributed_executor_backend="uni"))
        except (RuntimeError, ValueError) as error:
            raise EngineError(f"vLLM could not load '{self._model}': {str(error).splitlines()[0]}") from error
        if not self._series:
            self._engine.logger_manager = None
        _in_this_process.add(self)

    async def _warm_up(self) -> None:
        try:
            await super()._warm_up()
        except EngineLostError as error:
            if "C++ compiler" not in str(error) and "InvalidCxxCompiler" not in str(error):
                raise
            raise EngineError("vLLM could not compile its kernel: install g++; `entente doctor` shows what is there") from error

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
        answer = self._answers[request.request_id] = loop.create_future()
        if not self._stepping:
            self._stepping = True
            loop.call_soon(self._step)
        return answer

    async def _abort(self, request_id: str) -> None:
        if self._answers.pop(request_id, None) is not None and self._engine is not None:
            self._engine.abort_request([request_id])

    async def _call(self, method: str, *arguments: Any, **named: Any) -> Any:
        return getattr(self._engine, method)(*arguments, **named)

    async def _stop(self) -> None:
        if self._engine is not None:
            from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

            _in_this_process.discard(self)
            _put_aside.append(self._engine)
            self._engine = None
            if not _in_this_process:
                while _put_aside:
                    _put_aside.pop().engine_core.shutdown()
                cleanup_dist_env_and_memory()

    def _step(self) -> None:
        """One engine step; then again after whatever became ready, for as long as requests are pending."""
        if not self._answers or self._engine is None:
            self._stepping = False
            return
        try:
            outputs = self._engine.step()
        except Exception as error:
            # The failing batch would stay unfinished for ever: every waiter is told, none is left hanging.
            self._stepping = False
            self._lost = EngineLostError(f"engine '{self.name}' failed in a step: {type(error).__name__}: {error}")
            self._lost.__cause__ = error
            for answer in self._answers.values():
                if not answer.done():
                    answer.set_exception(self._lost)
            self._engine.abort_request(list(self._answers))
            self._answers.clear()
            return
        self._counts["engine_steps"] += 1
        for output in outputs:
            if output.finished and (answer := self._answers.pop(output.request_id, None)) and not answer.done():
                answer.set_result(output)
        asyncio.get_running_loop().call_soon(self._step)
