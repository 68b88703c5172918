"""`entente serve`: vLLM's own server with our processor, or legal orders for clients of the OpenAI API."""

import os
import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter, validators

from entente.cli.options import Run, RunsRoot
from entente.inference.settings import KEY_VARIABLE, InferenceSettings
from entente.telemetry.errors import InputError
from storage.runs import LATEST


def serve(
    *,
    model: Annotated[str, Parameter(help="Folder or hub id of the base model; with --openai, folder of a model.")] = "",
    openai: Annotated[
        bool, Parameter(help="Serve legal orders to clients of the OpenAI API, from --model or --run.", negative="")
    ] = False,
    run: Run = LATEST,
    version: Annotated[str, Parameter(help="With --openai: version of the run, such as 20, base or newest.")] = "newest",
    host: Annotated[str, Parameter(help="Address to listen on; an address other than loopback needs a key.")] = "127.0.0.1",
    port: Annotated[
        int, Parameter(help="Port to listen on; 0: any free one.", validator=validators.Number(gte=0, lte=65535))
    ] = 8100,
    runs_root: RunsRoot = Path("runs"),
    settings: Annotated[InferenceSettings | None, Parameter(name="*", help="Any setting of inference.")] = None,
) -> None:
    """Serve a model to training runs with vLLM's own server, or with --openai legal orders to anybody, until SIGTERM or Ctrl-C.

    The command of vLLM's server is printed, and then run in place of this one.

    The key, if any, is read from the environment variable ENTENTE_KEY. vLLM loads adapters by their path, so it must see the
    runs' folder under the same path as the run. With --openai a client of the OpenAI API sends a position and a power, and is
    answered with that power's orders.

    Examples

        entente serve --model runs/_models/tiny-0123456789ab

        ENTENTE_KEY=secret entente serve --model Qwen/Qwen2.5-7B-Instruct --host 0.0.0.0 --dtype bfloat16

        entente serve --openai --model models/dumbbot-192

        entente serve --openai --run mine --version 20 --port 8200
    """
    from entente.play.http_server import bind

    if openai:
        from entente.cli.serve_orders import find_policy, serve_orders

        policy = find_policy(model, run, version, runs_root, settings)
        key = os.environ.get(KEY_VARIABLE)
        with bind(host, port, key) as listener:
            return serve_orders(policy, listener, key, runs_root)
    if not model:
        raise InputError("--model requires an argument: the model to serve; or give --openai and --run")
    chosen = (settings or InferenceSettings()).model_copy(update={"model": model, "engine": "vllm"})
    key = os.environ.get(KEY_VARIABLE)
    bind(host, port, key).close()  # refuses what vLLM would refuse minutes later
    from entente.decoding.model_files import resolve_model
    from entente.inference.choose_engine import engine_here
    from entente.inference.memory_plan import check_memory, read_shape
    from entente.inference.server_arguments import KEY_OF_SERVER, MODULE, command_text, server_arguments, server_environment

    engine_here(chosen)  # refuses a machine without vLLM
    folder = resolve_model(model)
    check_memory(read_shape(folder), chosen)
    arguments, variables = server_arguments(folder, chosen, host=host, port=port), server_environment(chosen)
    print(command_text(arguments, variables), flush=True)
    secret = {KEY_OF_SERVER: key} if key else {}
    os.execve(sys.executable, [sys.executable, "-m", MODULE, *arguments], os.environ | variables | secret)
