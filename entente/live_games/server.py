"""HTTP server of the page of one game, for this machine only.

Every route needs the key from the page's address; each start of the server creates a new key. The server rejects requests with
another Host or Origin, or with a large body. Error responses have an `error`, one sentence, which the page shows.

Status codes: 200; 400 malformed or not allowed; 403 key, host or origin; 409 the game has moved on; 413 too long; 502 a player's
decision failed.
"""

import asyncio
import secrets
from collections.abc import Awaitable
from functools import partial
from typing import Annotated
from urllib.parse import quote

from fastapi import FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException

from entente.game.recorded import as_recorded
from entente.live_games.game import PlayedGame, StaleError
from entente.live_games.game_file import saved
from entente.live_games.http_server import CheckedHeaders, page_headers, refusal, sentence
from entente.live_games.page import as_data, page_html
from entente.telemetry.errors import EntenteError, InputError, first_problem

_LARGEST_BODY = 1 << 14
_WAIT_S = 25.0
_Word = Annotated[str, Field(max_length=64)]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    revision: Annotated[int, Field(ge=0)]


class OrdersBody(_Body):
    power: _Word
    orders: Annotated[list[_Word], Field(max_length=64)]


class UndoBody(_Body):
    turn: int


class HintBody(_Body):
    power: _Word
    player: Annotated[str, Field(max_length=256)]


def play_app(game: PlayedGame, players: tuple[str, ...], key: str, address: str, file: str = "") -> FastAPI:
    """The app of one game. `players`: for hints; `address`: as in Host; `file`: the game's, shell-quoted; empty: not stored."""
    app = FastAPI(title="entente play", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(
        CheckedHeaders, refuse=partial(refusal, key=key, address=address, command="entente play", most=_LARGEST_BODY)
    )

    @app.exception_handler(RequestValidationError)
    async def malformed(request: Request, error: RequestValidationError) -> Response:
        return sentence(400, first_problem(error))

    @app.exception_handler(HTTPException)
    async def refused(request: Request, error: HTTPException) -> Response:
        return sentence(error.status_code, str(error.detail))

    @app.exception_handler(EntenteError)
    async def failed(request: Request, error: EntenteError) -> Response:
        match error:
            case StaleError():
                return sentence(409, str(error), state=as_data(game))
            case InputError():
                return sentence(400, str(error))
        return sentence(502, f"{error}; the game waits: try again", state=as_data(game))

    async def changed(change: Awaitable[None]) -> Response:
        await change
        return JSONResponse(as_data(game))

    @app.get("/")
    async def page() -> Response:
        nonce = secrets.token_urlsafe(16)
        return HTMLResponse(page_html(game, players, key, nonce, file), headers=page_headers(nonce, forms="'none'"))

    @app.get("/game")
    async def state(seen: Annotated[int, Query(ge=-1)] = -1) -> Response:
        """The game; waits for a change if `seen` is the current revision."""
        if seen == game.revision:
            try:
                await asyncio.wait_for(game.changed.wait(), _WAIT_S)
            except TimeoutError:
                return Response(status_code=204)
        return JSONResponse(as_data(game))

    @app.post("/orders")
    async def orders(body: OrdersBody) -> Response:
        return await changed(game.order(body.power, body.orders, body.revision))

    @app.post("/next")
    async def go_on(body: _Body) -> Response:
        return await changed(game.go_on(body.revision))

    @app.post("/undo")
    async def undo(body: UndoBody) -> Response:
        return await changed(game.undo(body.turn, body.revision))

    @app.post("/hint")
    async def hint(body: HintBody) -> Response:
        choice = await game.hint(body.power, body.player, body.revision)
        return JSONResponse({"orders": list(choice.orders), "probability": choice.probability})

    @app.get("/saved")
    async def download() -> Response:
        return _file(saved(game).model_dump_json() + "\n", f"{game.name}.json")

    @app.get("/recorded")
    async def export() -> Response:
        turns, now = [(turn.board, turn.orders) for turn in game.turns], game.board.fork()
        return _file(await asyncio.to_thread(as_recorded, game.name, turns, now), f"{game.name}-diplomacy.json")

    return app


def _file(text: str, name: str) -> Response:
    # A game file from elsewhere may have any name, even one with a line break.
    return Response(
        text,
        media_type="application/json",
        headers={"content-disposition": f"attachment; filename*=UTF-8''{quote(name, safe='')}"},
    )
