"""Stands before a worker and does to its answers what networks, proxies and broken workers do."""

import asyncio
from typing import Any

import aiohttp
import msgpack
import numpy as np
from aiohttp import web

from inference.host import EngineHost


def _changed(content: bytes, fault: str) -> bytes:
    """A whole answer whose meaning is wrong."""
    fields: dict[str, Any] = msgpack.unpackb(content)
    ids = np.frombuffer(fields["token_ids"], "<i4").copy()
    match fault:
        case "wrong token ids":
            ids[len(ids) // 2] += 1
        case "another version":
            fields["policy_version"] += 1
    fields |= {"token_ids": ids.astype("<i4").tobytes()}
    packed = msgpack.packb(fields)
    assert packed is not None
    return packed


WRONG = ("wrong token ids", "another version")
FAULTS = (*WRONG, "not msgpack", "status 500", "no answer", "hung up")


class FaultyProxy:
    """Passes everything on to `url`, but for answers to `generate` while `fault` names one of the above."""

    def __init__(self, url: str) -> None:
        self.fault = ""
        self.faults = 0
        self._target = url
        self._host = EngineHost("proxy")
        self._port = self._host.submit(self._start()).result(timeout=10)
        self.url = f"http://127.0.0.1:{self._port}"

    async def _start(self) -> int:
        self._session = aiohttp.ClientSession()
        app = web.Application(client_max_size=16 << 20)
        app.router.add_route("*", "/{path:.*}", self._pass_on)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.5)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        return int(self._runner.addresses[0][1])

    async def _pass_on(self, request: web.Request) -> web.StreamResponse:
        async with self._session.request(
            request.method, self._target + request.path, data=await request.read(), headers=_ours(request)
        ) as answer:
            content, status, kind = await answer.read(), answer.status, answer.content_type
        if not self.fault or request.path != "/generate" or status != 200:
            return web.Response(body=content, status=status, content_type=kind)
        self.faults += 1
        match self.fault:
            case "status 500":
                return web.json_response({"detail": "internal"}, status=500)
            case "no answer":
                await asyncio.sleep(60)
            case "hung up":
                assert request.transport is not None
                request.transport.close()
            case "not msgpack":
                content = b"<html></html>"
            case fault:
                content = _changed(content, fault)
        return web.Response(body=content, content_type=kind)

    def close(self) -> None:
        self._host.submit(self._end()).result(timeout=20)
        self._host.close()

    async def _end(self) -> None:
        await self._runner.cleanup()
        await self._session.close()


def _ours(request: web.Request) -> dict[str, str]:
    return {name: value for name, value in request.headers.items() if name.lower() in ("authorization", "content-type")}
