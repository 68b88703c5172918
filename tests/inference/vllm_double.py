"""A double of vLLM's server: the same JSON over a torch engine, on the caller's event loop, with faults on demand.

It knows of HTTP what the client uses. `tests/flows/test_vllm_servers.py` holds the client to a real one.
"""

import asyncio
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from aiohttp import web

from entente.inference.legal_admission import SAMPLING_KEY, START_KEY, TABLE_KEY, decode_table
from entente.inference.settings import InferenceSettings
from entente.inference.torch_engine import TorchEngine
from entente.records.policy_version import version_in
from entente.records.rows import Generation, GenerationRequest
from entente.telemetry.errors import DataError, EngineError

Spoil = Callable[[dict[str, Any]], object]


def _entries(answer: dict[str, Any]) -> list[dict[str, Any]]:
    """The drawn tokens with their log-probabilities."""
    return answer["choices"][0]["logprobs"]["content"]


def illegal_path(answer: dict[str, Any]) -> None:
    answer["choices"][0]["token_ids"][0] = _entries(answer)[0]["token_id"] = 10**6


def ids_in_text(answer: dict[str, Any]) -> None:
    """As vLLM 0.26 answers."""
    for entry in _entries(answer):
        entry["token"] = f"token_id:{entry.pop('token_id')}"


def before_the_mask(answer: dict[str, Any]) -> None:
    for entry in _entries(answer):
        entry["logprob"] -= 1.0


def half_a_path(answer: dict[str, Any]) -> None:
    for tokens in (answer["choices"][0]["token_ids"], _entries(answer)):
        del tokens[len(tokens) // 2 :]


def probability_one(answer: dict[str, Any]) -> None:
    for entry in _entries(answer):
        entry["logprob"] = 0.0


LIES: dict[str, Spoil] = {
    "another name": lambda answer: answer.update(model="v99-00000000"),
    "illegal path": illegal_path,
    "not a number": lambda answer: _entries(answer)[0].update(logprob=float("nan")),
    "clamped": lambda answer: _entries(answer)[0].update(logprob=-9999.0),
    "before the mask": before_the_mask,
    "above one": lambda answer: _entries(answer)[0].update(logprob=0.5),
    "half a path": half_a_path,
    "fewer logprobs": lambda answer: _entries(answer).pop(),
    "no logprobs": lambda answer: answer["choices"][0].update(logprobs=None),
}


def answer_of(sampled: Generation, head: int, model: str) -> dict[str, Any]:
    """The server's answer, if the first `head` tokens were the end of its prompt."""
    tokens, logprobs = sampled.token_ids.tolist()[head:], sampled.logprobs.tolist()[head:]
    content = [{"token_id": t, "logprob": p, "rank": 1, "top_logprobs": []} for t, p in zip(tokens, logprobs, strict=True)]
    choice = {"index": 0, "token_ids": tokens, "logprobs": {"content": content}, "finish_reason": "stop"}
    usage = {"prompt_tokens_details": {"cached_tokens": sampled.cached_tokens}}
    return {"request_id": "r", "model": model, "choices": [choice], "usage": usage}


class VllmDouble:
    """One server. `spoil` changes its answers; `fault` is one of 'status 500', 'silent', 'half a body', 'closes'."""

    def __init__(self, model: Path, *, key: str = "", root: str = "") -> None:
        self.spoil: Spoil | None = None
        self.fault = ""
        self.serves_base_only, self.mixes_slots = False, False
        """Draws by the base under every name; draws by the adapter loaded last under the base's name."""
        self.faults, self.in_flight, self.in_flight_at_unload = 0, 0, 0
        self.preemptions, self.delay_s = 0, 0.0
        self.adapters: dict[str, int] = {}
        self.unloaded: list[str] = []
        self.sampled: list[tuple[str, int]] = []
        """Name of the model or adapter, and seed, of each request."""
        self.prompts: list[tuple[str, tuple[int, ...]]] = []
        """Name of the model or adapter, and prompt, of each request."""
        self._key, self._root = key, root or str(model)
        self._engine = TorchEngine(model, InferenceSettings(max_model_length=512, max_sequences=64))
        self._numbers = itertools.count(1)
        self._runner: web.AppRunner | None = None
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://{self.name}"

    @property
    def name(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def start(self, *, keepalive_s: float = 5.0) -> None:
        """Listen at the port of before, or a free one. Adapters of before are forgotten."""
        if not self.port:
            await self._engine.start()
        self.adapters.clear()
        app = web.Application(client_max_size=1 << 26, middlewares=[self._guard])
        app.add_routes(
            [
                web.get("/health", self._health),
                web.get("/metrics", self._metrics),
                web.get("/v1/models", self._models),
                web.post("/v1/load_lora_adapter", self._load),
                web.post("/v1/unload_lora_adapter", self._unload),
                web.post("/inference/v1/generate", self._generate),
            ]
        )
        self._runner = web.AppRunner(app, keepalive_timeout=keepalive_s, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        """Close the port and all connections."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def close(self) -> None:
        await self.stop()
        await self._engine.close()

    @web.middleware
    async def _guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        guarded = request.path.startswith(("/v1", "/inference"))
        if self._key and guarded and request.headers.get("authorization") != f"Bearer {self._key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        return await handler(request)

    async def _health(self, request: web.Request) -> web.Response:
        if self.fault == "silent":
            await asyncio.sleep(3600)
        return web.Response(status=500 if self.fault == "status 500" else 200)

    async def _metrics(self, request: web.Request) -> web.Response:
        stats = await self._engine.stats()
        return web.Response(
            text="# HELP vllm:num_preemptions_total n\n"
            f'vllm:num_preemptions_total{{engine="0",model_name="m"}} {self.preemptions}.0\n'
            f'vllm:iteration_tokens_total_bucket{{le="1.0"}} 7.0\n'
            f'vllm:iteration_tokens_total_count{{engine="0",model_name="m"}} {stats.engine_steps}.0\n'
            f'vllm:generation_tokens_total{{engine="0",model_name="m"}} {stats.sampled_tokens}.0\n'
        )

    async def _models(self, request: web.Request) -> web.Response:
        base = {"id": "the-base", "root": self._root, "parent": None, "max_model_len": 512}
        return web.json_response({"data": [base, *({"id": name, "parent": "the-base"} for name in self.adapters)]})

    async def _load(self, request: web.Request) -> web.Response:
        body = await request.json()
        name = body["lora_name"]
        if name in self.adapters:
            return _error(400, f"The lora adapter '{name}' has already been loaded.")
        try:
            number = next(self._numbers)
            await self._engine.publish(version_in(Path(body["lora_path"]), number))
        except (DataError, EngineError) as error:
            return _error(500, str(error))
        self.adapters[name] = number
        return web.Response(text="Success")

    async def _unload(self, request: web.Request) -> web.Response:
        name = (await request.json())["lora_name"]
        if self.adapters.pop(name, None) is None:
            return _error(404, f"The lora adapter '{name}' cannot be found.")
        self.unloaded.append(name)
        self.in_flight_at_unload = self.in_flight
        return web.Response(text="Success")

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if self.fault:
            return await self._fail(request)
        parameters, model = body["sampling_params"], body["model"]
        if model != "the-base" and model not in self.adapters:
            return _error(404, f"The model `{model}` does not exist.")
        version = 0 if self.serves_base_only else self.adapters.get(model, 0)
        if self.mixes_slots and model == "the-base":
            version = max(self.adapters.values(), default=0)
        extra = parameters["extra_args"]
        assert (parameters["temperature"], parameters["logprobs"]) == (0.0, 0)
        self.sampled.append((model, extra[SAMPLING_KEY][0]))
        self.prompts.append((model, tuple(body["token_ids"])))
        self.in_flight += 1
        try:
            await asyncio.sleep(self.delay_s)
            table = decode_table(extra[TABLE_KEY])
            head = table.forced(0)[0] if extra[START_KEY] else []
            assert parameters["max_tokens"] == table.longest - len(head)
            ids = body["token_ids"]
            assert ids[len(ids) - len(head) :] == head
            sampled = await self._engine.generate(
                GenerationRequest(
                    request_id=str(next(self._numbers)),
                    prompt_ids=ids[: len(ids) - len(head)],
                    table=table,
                    seed=extra[SAMPLING_KEY][0],
                    temperature=extra[SAMPLING_KEY][1],
                    version=version,
                )
            )
        except (DataError, EngineError) as error:
            return _error(400, str(error))
        finally:
            self.in_flight -= 1
        answer = answer_of(sampled, len(head), model)
        if self.spoil is not None:
            self.faults += 1
            self.spoil(answer)
        return web.Response(body=json.dumps(answer).encode(), content_type="application/json")

    async def _fail(self, request: web.Request) -> web.StreamResponse:
        self.faults += 1
        if self.fault == "status 500":
            return _error(500, "EngineCore encountered an issue")
        if self.fault == "silent":
            await asyncio.sleep(3600)
        if self.fault == "half a body":
            response = web.StreamResponse(headers={"content-length": "5000"})
            await response.prepare(request)
            await response.write(b'{"request_id": "r", "choices": [')
        assert request.transport is not None
        request.transport.abort()
        return web.Response()


def _error(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "type": "Error", "code": status}}, status=status)
