"""vLLM with its engine core in another process (`AsyncLLM`), so that Python here overlaps with GPU steps there.

On a CPU the extra processes only slow the start, so the embedded engine is the default there. This process does not see engine
steps: `engine_steps` stays 0. The worker's `/metrics` page has vLLM's own series.
"""

import asyncio
from pathlib import Path
from typing import Any

from inference.served import LoadedVersion
from inference.settings import InferenceSettings
from inference.vllm_arguments import engine_arguments, prepare_environment, refusals
from inference.vllm_engine import VllmEngine, lora_request
from records.generation import GenerationRequest
from telemetry.errors import EngineError, EngineLostError


class AsyncEngine(VllmEngine):
    """The `Engine` contract over vLLM's `AsyncLLM`."""

    def __init__(self, model: Path, settings: InferenceSettings, *, name: str = "async") -> None:
        super().__init__(model, settings, name=name)
        self._engine: Any = None

    async def _start(self, *, slots: bool) -> None:
        prepare_environment(self._settings, own_process=True)
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        arguments = engine_arguments(self._model, self._settings, slots=slots)
        try:
            self._engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
        except (RuntimeError, ValueError) as error:
            raise EngineError(f"vLLM could not load '{self._model}': {str(error).splitlines()[0]}") from error

    def _submit(self, request: GenerationRequest, served: LoadedVersion) -> asyncio.Future[Any]:
        return asyncio.ensure_future(self._draw(request, served))

    async def _draw(self, request: GenerationRequest, served: LoadedVersion) -> Any:
        from vllm.v1.engine.exceptions import EngineDeadError

        from inference.sampling import prompt_ids, sampling_params

        if self._engine is None:
            raise EngineError(f"engine '{self.name}' is not running")
        final = None
        try:
            async for output in self._engine.generate(
                {"prompt_token_ids": prompt_ids(request)},
                sampling_params(request, self._eos_id),
                request.request_id,
                lora_request=lora_request(served),
            ):
                final = output
        except EngineDeadError as error:
            self._lost = EngineLostError(f"engine '{self.name}' died: {error or 'its core process ended'}")
            raise self._lost from error
        except refusals() as error:
            raise EngineError(f"request '{request.request_id}' was refused: {error}") from error
        if final is None or not final.finished:
            raise EngineLostError(f"engine '{self.name}' did not finish request '{request.request_id}'")
        return final

    async def _abort(self, request_id: str) -> None:
        if self._engine is not None:
            await self._engine.abort(request_id)

    async def _call(self, method: str, *arguments: Any, **named: Any) -> Any:
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            return await getattr(self._engine, method)(*arguments, **named)
        except EngineDeadError as error:
            self._lost = EngineLostError(f"engine '{self.name}' died: {error or 'its core process ended'}")
            raise self._lost from error

    async def _stop(self) -> None:
        if self._engine is not None:
            self._engine.shutdown()
            self._engine = None
