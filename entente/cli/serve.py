"""`entente serve`: vLLM's own server with our logits processor, or legal orders for clients of the OpenAI API."""

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter, validators

from entente.cli.options import Run, RunsRoot, which_run
from entente.cli.players import with_open_players
from entente.decoding.model_files import resolve_model
from entente.game.scripted import SEARCHES
from entente.inference.engine_cards import check_vllm
from entente.inference.memory_plan import check_memory, read_shape
from entente.inference.page_gate import KEY_OF_SERVER
from entente.inference.server_arguments import MODULE, command_text, server_arguments, server_environment
from entente.inference.settings import KEY_VARIABLE, InferenceSettings
from entente.telemetry.errors import InputError
from storage.runs import LATEST

if TYPE_CHECKING:
    import socket

    from entente.evaluation.contestants import Contestant
    from flows.open_players import OpenPlayers

_NEWEST = "newest"
_DRAIN_S = 10.0
"""Seconds for requests in flight after a termination signal."""


def serve(
    *,
    model: Annotated[str, Parameter(help="Folder or hub id of the base model; with --openai, folder of a model.")] = "",
    openai: Annotated[
        bool, Parameter(help="Serve legal orders to clients of the OpenAI API, from --model or --run.", negative="")
    ] = False,
    run: Run = LATEST,
    version: Annotated[str, Parameter(help="With --openai: version of the run, such as 20, base or newest.")] = _NEWEST,
    host: Annotated[str, Parameter(help="Address to listen on; an address other than loopback needs a key.")] = "127.0.0.1",
    port: Annotated[
        int, Parameter(help="Port to listen on; 0: any free one.", validator=validators.Number(gte=0, lte=65535))
    ] = 8100,
    runs_root: RunsRoot = Path("runs"),
    settings: Annotated[InferenceSettings | None, Parameter(name="*", help="Any inference setting.")] = None,
) -> None:
    """Serve a model to training runs with vLLM's server, or with --openai legal orders to any client, until SIGTERM or Ctrl-C.

    Prints the command of vLLM's server, then replaces this process with it.

    To require an API key, set ENTENTE_KEY to it. vLLM loads adapters by path, so the runs folder must have the same path
    for the server as for the training run. With --openai a client of the OpenAI API sends a position and a power, and
    receives that power's orders.

    Examples

        entente serve --model runs/_models/tiny-0123456789ab

        ENTENTE_KEY=secret entente serve --model Qwen/Qwen2.5-7B-Instruct --host 0.0.0.0 --dtype bfloat16

        entente serve --openai --model models/whole-192

        entente serve --openai --run mine --version 20 --port 8200
    """
    from entente.live_games.http_server import bind

    key = os.environ.get(KEY_VARIABLE)
    if model and (run != LATEST or version != _NEWEST):
        raise InputError(f"--model '{model}' is what is served: leave out --run and --version, or --model")
    if openai:
        policy = _find_policy(model, run, version, runs_root, settings)
        with bind(host, port, key) as listener:
            return _serve_orders(policy, listener, key, runs_root)
    if not model:
        raise InputError("--model requires an argument: the model to serve; or give --openai and --run")
    chosen = settings or InferenceSettings()
    if ignored := "--urls" if chosen.urls else "--engine torch" if chosen.engine == "torch" else "":
        raise InputError(f"`entente serve` starts vLLM's server on this machine: leave out {ignored}")
    chosen = chosen.model_copy(update={"model": model, "engine": "vllm"})
    bind(host, port, key).close()  # refuses what vLLM would refuse minutes later
    vllm = check_vllm()
    folder = resolve_model(model)
    check_memory(read_shape(folder), chosen)
    arguments, variables = server_arguments(folder, chosen, host=host, port=port), server_environment(chosen)
    print(command_text(vllm, arguments, variables), flush=True)
    secret = {KEY_OF_SERVER: key} if key else {}
    python = str(vllm.python)
    os.execve(python, [python, "-P", "-m", MODULE, *arguments], os.environ | variables | vllm.variables() | secret)


def _find_policy(model: str, run: str, version: str, runs_root: Path, settings: InferenceSettings | None) -> "Contestant":
    from entente.evaluation.contestants import resolve_contestant

    if others := sorted(settings.model_fields_set if settings else set()):
        flag = others[0].replace("_", "-")
        raise InputError(f"--openai takes the engine's settings from the run or the model: leave out --{flag}")
    if model:
        refusal = InputError(f"--model '{model}' is no folder of a model or adapter: name one, such as models/whole-192")
        if model.endswith(SEARCHES):  # before a folder's weights are hashed
            raise refusal
        policy = resolve_contestant(model if "/" in model else f"./{model}", "", runs_root)
        if policy.model is None:
            raise refusal
        return policy
    name = f"v{version}" if version.isdecimal() else version
    if not re.fullmatch(r"base|newest|v\d+", name):
        raise InputError(f"--version '{version}' is no version: give a number from 0, base or newest")
    return resolve_contestant(f"{which_run(run, runs_root)}:{name}", "", runs_root)


def _serve_orders(policy: "Contestant", listener: "socket.socket", key: str | None, runs_root: Path) -> None:
    from entente.live_games.http_server import LOOPBACK, make_server, serve
    from entente.live_games.orders_server import OrderSampler, ServedPolicy, orders_app
    from entente.telemetry.memory import freeze_old_objects

    host, port = listener.getsockname()[:2]

    async def run(opened: "OpenPlayers") -> None:
        engine, tokens, number = opened.served[policy.name]
        served = ServedPolicy(
            name=policy.name.removeprefix("./"),
            fingerprint=policy.fingerprint,
            host=opened.host,
            engine=engine,
            tokens=tokens,
            version=number,
        )
        samples = OrderSampler(served)
        own_names = [f"{name}:{port}" for name in ("127.0.0.1", "localhost", "[::1]")] if host in LOOPBACK else []
        server = make_server(orders_app(samples, key, own_names), drain_s=_DRAIN_S)
        samples.on_failure = lambda: setattr(server, "should_exit", True)
        ready = f"serving {served.name} on http://{f'[{host}]' if ':' in host else host}:{port}/v1"
        with freeze_old_objects():
            await serve(server, listener, on_ready=lambda: print(ready, flush=True))
        if samples.failure is not None:
            raise samples.failure

    with_open_players([policy], runs_root, None, run)
