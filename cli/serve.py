"""`entente serve`: serve an inference worker."""

import asyncio
import os
from functools import partial
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter, validators

from cli.options import Run, RunsRoot
from inference.settings import KEY_VARIABLE, InferenceSettings
from storage.runs import LATEST
from telemetry.errors import InputError


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
    adapters_root: Annotated[Path, Parameter(help="Adapters are loaded only from this folder.")] = Path("runs"),
    name: Annotated[str, Parameter(help="Name in rows and metrics; default: host and port.")] = "",
    settings: Annotated[InferenceSettings | None, Parameter(name="*", help="Any setting of inference.")] = None,
) -> None:
    """Serve one engine to training runs over HTTP, or with --openai legal orders to anybody, until SIGTERM or Ctrl-C.

    The key, if any, is read from the environment variable that `--key-variable` names (ENTENTE_KEY). With --openai a client
    of the OpenAI API sends a position and a power, and is answered with that power's orders.

    Examples

        entente serve --model runs/_models/tiny-0123456789ab

        ENTENTE_KEY=secret entente serve --model Qwen/Qwen2.5-7B-Instruct --host 0.0.0.0 --dtype bfloat16

        entente serve --openai --model models/dumbbot-192

        entente serve --openai --run mine --version 20 --port 8200
    """
    from workers.worker import bind

    if openai:
        from cli.serve_orders import find_policy, serve_orders

        policy = find_policy(model, run, version, runs_root, settings)
        key = os.environ.get(KEY_VARIABLE)
        with bind(host, port, key) as listener:
            return serve_orders(policy, listener, key, runs_root)
    if not model:
        raise InputError("--model requires an argument: the model of a worker; or give --openai and --run")
    chosen = (settings or InferenceSettings()).model_copy(update={"model": model})
    key = os.environ.get(KEY_VARIABLE)
    with bind(host, port, key) as listener:  # closes the port if the model is refused
        from decoding.codec import Codec
        from decoding.model_files import resolve_model
        from inference.choose_engine import choose_engine
        from inference.host import EngineHost
        from inference.memory_plan import check_memory, read_shape
        from inference.supervisor import EngineSupervisor
        from pipeline.threads import apply_threads, plan_threads, usable_cores
        from telemetry.log_tail import follow_loggers
        from workers.worker import serve as serve_app
        from workers.worker import worker_app

        folder = resolve_model(model)
        check_memory(read_shape(folder), chosen)
        engine_threads, _ = plan_threads(cores=usable_cores(), engine=chosen.threads, trainer=0, overlap=False)
        apply_threads(engine_threads)
        engine_host = EngineHost()
        address = f"{host}:{listener.getsockname()[1]}"
        engine = EngineSupervisor(lambda: choose_engine(chosen, folder, name=name or address))
        try:
            # vLLM's and uvicorn's loggers do not propagate to the root logger.
            log = follow_loggers("", "vllm", "uvicorn.error")
            app = worker_app(engine, engine_host, folder, adapters_root, key, Codec(folder).vocabulary_size, log=log)
            ready = partial(print, f"serving {folder} on http://{address}", flush=True)
            serve_app(app, listener, on_ready=ready)
        finally:
            asyncio.run(engine_host.run(engine.close()))
            engine_host.close()
