"""`entente serve --openai`: legal orders for any client of the OpenAI API."""

from pathlib import Path
from typing import TYPE_CHECKING

from entente.cli.options import which_run
from entente.cli.players import with_open_players
from entente.inference.settings import InferenceSettings
from entente.telemetry.errors import InputError

if TYPE_CHECKING:
    import socket

    from entente.evaluation.contestants import Contestant
    from flows.open_players import OpenPlayers

_DRAIN_S = 10.0
"""Seconds for requests in flight after a termination signal."""


def find_policy(model: str, run: str, version: str, runs_root: Path, given: InferenceSettings | None) -> "Contestant":
    """What is served: the model in a folder, or else a version of the run."""
    from entente.evaluation.contestants import resolve_contestant

    if others := sorted(given.model_fields_set if given else set()):
        flag = others[0].replace("_", "-")
        raise InputError(f"--openai takes the engine's settings from the run or the model: leave out --{flag}")
    if model:
        return resolve_contestant(model if "/" in model else f"./{model}", "", runs_root)
    name = f"v{version}" if version.isdigit() else version
    return resolve_contestant(f"{which_run(run, runs_root)}:{name}", "", runs_root)


def serve_orders(policy: "Contestant", listener: "socket.socket", key: str | None, runs_root: Path) -> None:
    """Serve it until SIGTERM, Ctrl-C or the loss of its engine."""
    from entente.play.http_server import LOOPBACK, make_server, serve
    from entente.play.orders_server import Draws, ServedPolicy, orders_app
    from entente.telemetry.memory import freeze_old_objects

    host, port = listener.getsockname()[:2]

    async def run(opened: "OpenPlayers") -> None:
        engine, tokens, number = opened.served[policy.name]
        served = ServedPolicy(
            name=policy.name,
            fingerprint=(policy.adapter_hash or policy.weights_hash)[:16],
            host=opened.host,
            engine=engine,
            tokens=tokens,
            version=number,
        )
        draws = Draws(served)
        own_names = [f"{name}:{port}" for name in ("127.0.0.1", "localhost", "[::1]")] if host in LOOPBACK else []
        server = make_server(orders_app(draws, key, own_names), drain_s=_DRAIN_S)
        draws.on_failure = lambda: setattr(server, "should_exit", True)
        ready = f"serving {policy.name} on http://{f'[{host}]' if ':' in host else host}:{port}/v1"
        with freeze_old_objects():
            await serve(server, listener, on_ready=lambda: print(ready, flush=True))
        if draws.failure is not None:
            raise draws.failure

    with_open_players([policy], runs_root, None, run)
