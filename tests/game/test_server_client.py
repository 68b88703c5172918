"""What is no server of the diplomacy package, or another release of it, is one sentence."""

import asyncio
import json
from collections.abc import Awaitable, Callable

import pytest
from aiohttp import web

from entente.game.server_client import ForeignServerError, RefusedError, ServerClient, ServerLostError, connect

Handler = Callable[[web.WebSocketResponse, dict], Awaitable[None]]


async def _with_server(handler: Handler, visit: Callable[[ServerClient], Awaitable[None]]) -> None:
    """Visit a websocket server that calls `handler` with each message."""

    async def serve(request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        async for message in socket:
            await handler(socket, json.loads(message.data))
        return socket

    app = web.Application()
    app.router.add_get("/", serve)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        async with connect(f"127.0.0.1:{runner.addresses[0][1]}") as client:
            await visit(client)
    finally:
        await runner.cleanup()


async def _sign_in(client: ServerClient) -> None:
    await client.sign_in("ours", "hush")


def _answers(**answer: object) -> Handler:
    async def handler(socket: web.WebSocketResponse, request: dict) -> None:
        await socket.send_str(json.dumps({"request_id": request["request_id"], **answer}))

    return handler


async def _greets(socket: web.WebSocketResponse, request: dict) -> None:
    await socket.send_str("hello")


@pytest.mark.parametrize(
    ("handler", "kind", "sentence"),
    [
        pytest.param(_answers(name="data_key", data="x"), ForeignServerError, "a message of it cannot be read", id="unknown"),
        pytest.param(_greets, ForeignServerError, "a message of it cannot be read", id="no-message"),
        pytest.param(
            _answers(name="error", error_type="RequestException", message="Unknown request."),
            ForeignServerError,
            "it does not know the request 'sign_in'",
            id="unknown-request",
        ),
        pytest.param(
            _answers(name="error", error_type="UserException", message="Invalid user."),
            RefusedError,
            "Invalid user.",
            id="refused",
        ),
    ],
)
def test_an_answer_of_another_protocol_is_told_from_a_refusal(handler: Handler, kind: type[Exception], sentence: str):
    with pytest.raises(kind, match=sentence):
        asyncio.run(_with_server(handler, _sign_in))


def test_a_closed_connection_ends_every_request_that_waits():
    async def handler(socket: web.WebSocketResponse, request: dict) -> None:
        await socket.close()

    async def visit(client: ServerClient) -> None:
        found = await asyncio.gather(client.sign_in("a", "b"), client.sign_in("c", "d"), return_exceptions=True)
        assert [type(each) for each in found] == [ServerLostError, ServerLostError]
        with pytest.raises(ServerLostError):
            await client.sign_in("e", "f")

    asyncio.run(_with_server(handler, visit))


def test_a_web_server_and_a_port_without_a_server_are_told():
    async def visit() -> None:
        runner = web.AppRunner(web.Application())
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        address = f"127.0.0.1:{runner.addresses[0][1]}"
        with pytest.raises(ForeignServerError, match="it answers with HTTP status 404"):
            async with connect(address):
                pass
        await runner.cleanup()
        with pytest.raises(ServerLostError, match="nothing listens"):
            async with connect(address):
                pass

        async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"220 mail.example ready\r\n")
            await reader.read(1)
            writer.close()

        mail = await asyncio.start_server(greet, "127.0.0.1", 0)
        with pytest.raises(ForeignServerError, match="it does not answer as a web server does"):
            async with connect(f"127.0.0.1:{mail.sockets[0].getsockname()[1]}"):
                pass
        mail.close()
        await mail.wait_closed()

    asyncio.run(visit())
