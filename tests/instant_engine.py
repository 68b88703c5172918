"""The engine for tests of what happens around the draws."""

import asyncio
from collections.abc import Callable

from entente.inference import uniform_engine
from entente.records.rows import Generation, GenerationRequest
from entente.telemetry.errors import EngineError


class UniformEngine(uniform_engine.UniformEngine):
    """Keeps its requests, and fails where a test wants it."""

    def __init__(self, *, fails: Callable[[GenerationRequest], bool] = lambda request: False) -> None:
        super().__init__()
        self._fails = fails
        self.requests: list[GenerationRequest] = []

    async def generate(self, request: GenerationRequest) -> Generation:
        self.requests.append(request)
        await asyncio.sleep(0)
        if self._fails(request):
            raise EngineError(f"request {request.request_id} was made to fail")
        return await super().generate(request)
