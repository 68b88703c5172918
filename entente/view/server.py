"""HTTP server of `entente view`: pages over the files of a folder of runs, for this machine only.

It reads, and changes no file of a run. Every address needs the key of the page's address; requests with another Host or Origin
are refused (`entente/live_games/http_server.py`). Queries and pages are GET; what starts or ends a process is POST. A page that
has not changed since the ETag that a request names costs a few stats and is answered with 304."""

import hashlib
import secrets
from collections.abc import Callable
from functools import partial
from typing import Any
from urllib.parse import parse_qsl, quote, urlencode

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, RedirectResponse
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException

from entente.live_games.http_server import CheckedHeaders, page_headers, refusal
from entente.telemetry.errors import DataError, EntenteError, InputError, first_problem
from entente.view.live_run import run_mark
from entente.view.viewer import NONCE, WHAT_IF, Viewer

_LARGEST_BODY = 1 << 14


def view_app(viewer: Viewer, address: str) -> FastAPI:
    """`address`: as in Host."""
    app = FastAPI(title="entente view", docs_url=None, redoc_url=None, openapi_url=None)
    check = partial(refusal, key=viewer.key, address=address, command="entente view", most=_LARGEST_BODY)
    app.add_middleware(CheckedHeaders, refuse=check)

    def shown(text: str, status: int = 200, tag: str = "") -> Response:
        nonce = secrets.token_urlsafe(16)
        headers = page_headers(nonce) | ({"etag": tag} if tag else {})
        return HTMLResponse(text.replace(NONCE, nonce), status_code=status, headers=headers)

    def trouble(status: int, text: str) -> Response:
        return shown(viewer.page("message.html.jinja", viewer.nav(), message=text), status)

    @app.exception_handler(EntenteError)
    async def entente_error(request: Request, error: EntenteError) -> Response:
        return trouble(404 if isinstance(error, InputError) else 422 if isinstance(error, DataError) else 500, str(error))

    @app.exception_handler(RequestValidationError)
    async def malformed(request: Request, error: RequestValidationError) -> Response:
        return trouble(400, first_problem(error))

    @app.exception_handler(HTTPException)
    async def refused(request: Request, error: HTTPException) -> Response:
        return trouble(error.status_code, str(error.detail))

    def unless_seen(request: Request, mark: Any, make: Callable[[], str]) -> Response:
        tag = f'"{hashlib.sha256(repr((mark, str(request.url))).encode()).hexdigest()[:32]}"'
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers={"etag": tag})
        return shown(make(), tag=tag)

    @app.get("/")
    def runs(request: Request) -> Response:
        return unless_seen(request, viewer.runs_mark(), viewer.runs)

    @app.get("/compare")
    def compare(request: Request) -> Response:
        names = request.query_params.getlist("run")
        mark = [(name, run_mark(viewer.paths(name))) for name in names]
        return unless_seen(request, mark, lambda: viewer.compare(names))

    @app.get("/run/{run}")
    def run_page(request: Request, run: str) -> Response:
        return unless_seen(request, viewer.live(run).mark(), lambda: viewer.run(run))

    @app.get("/run/{run}/step")
    def step_of(run: str, step: int) -> Response:
        return shown(viewer.step(run, step))

    @app.get("/run/{run}/group")
    def group(run: str, start_group: int, shard: str = "", power: str = "", phase: str = "") -> Response:
        return shown(viewer.group(run, {"start_group": start_group, "shard": shard, "power": power, "phase": phase}))

    @app.get("/run/{run}/decision")
    def decision(run: str, id: int, shard: str = "", overlay: str = "probability") -> Response:
        return shown(viewer.decision(run, id, shard, overlay))

    @app.get("/run/{run}/games")
    def games(run: str, shard: str = "") -> Response:
        return shown(viewer.games(run, shard))

    @app.get("/run/{run}/what-if")  # a page that answers a POST asks for itself again at its own address
    @app.get("/run/{run}/game")
    def game(request: Request, run: str, game: str, shard: str = "") -> Response:
        return shown(viewer.game(run, game, shard, dict(request.query_params)))

    @app.get("/run/{run}/sql")
    def sql(run: str, query: str = "", ask: str = "", file: str = "") -> Response:
        found = viewer.sql(run, query, ask=bool(ask), parquet=file == "parquet")
        if isinstance(found, str):
            return shown(found)
        content, is_whole = found
        file_name = f"{quote(run, safe='')}-{'' if is_whole else 'incomplete-'}answer.parquet"
        name = {"content-disposition": f"attachment; filename*=UTF-8''{file_name}", "cache-control": "no-store"}
        return Response(content, media_type="application/vnd.apache.parquet", headers=name)

    # -- what starts or ends a process --------------------------------------------------------------------------------------

    def back_to(address: str) -> Response:
        return RedirectResponse(address, status_code=303, headers={"referrer-policy": "same-origin", "cache-control": "no-store"})

    @app.post("/run/{run}/recompute")
    def recompute(run: str, id: int, shard: str = "", overlay: str = "probability") -> Response:
        viewer.recompute(run, id, shard)
        return back_to(viewer.link("decision", run, id=id, shard=shard, overlay=overlay) + "#tokens")

    @app.post("/run/{run}/what-if")
    async def what_if(request: Request, run: str, game: str, shard: str) -> Response:
        fields = dict(parse_qsl((await request.body()).decode(errors="replace")))

        def start() -> Response:
            try:
                again = viewer.what_if(run, game, fields)
            except InputError as error:
                return shown(viewer.game(run, game, shard, fields, message=str(error)), 409)
            if again:
                return shown(viewer.game(run, game, shard, fields, message=again, confirm=True), 409)
            chosen = {name: value for name, value in fields.items() if name in WHAT_IF}
            return back_to(viewer.link("game", run, game=game, shard=shard, **chosen) + "#what-if")

        return await run_in_threadpool(start)

    @app.post("/run/{run}/cancel")
    def cancel(run: str, about: str, back: str) -> Response:
        viewer.jobs.cancel(about)
        place, _, query = back.partition("?")
        if not place.startswith("/run/"):
            raise InputError("a job is cancelled from a page of its run")
        return back_to(f"{place}?{urlencode(dict(parse_qsl(query)) | {'key': viewer.key})}")

    return app
