"""Sets the environment variables of Prefect and other libraries before they are imported.

Little logging, no telemetry, database in the working folder. The user's variables win, except those that would change the
meaning of a run. This machine is exempted from proxies.
"""

import os
import socket
from pathlib import Path

_PREFECT = {
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    # Only the server's own pages may call its API. They call the address from which they were loaded.
    "PREFECT_SERVER_API_CORS_ALLOWED_ORIGINS": "",
    "PREFECT_SERVER_UI_API_URL": "/api",
    "DO_NOT_TRACK": "1",
    "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
    "PREFECT_SERVER_UI_V2_ENABLED": "false",
    # The recorder writes task states in larger batches, which saves CPU time; the UI is a little late.
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_BATCH_SIZE": "200",
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_READ_BATCH_SIZE": "200",
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_FLUSH_INTERVAL": "1",
    "PREFECT_SERVER_SERVICES_EVENT_PERSISTER_BATCH_SIZE": "200",
    "PREFECT_SERVER_SERVICES_EVENT_PERSISTER_READ_BATCH_SIZE": "200",
    "PREFECT_SERVER_SERVICES_EVENT_PERSISTER_FLUSH_INTERVAL": "1",
    # Events take most of the database's space and are needed for hours only; flow runs are kept for a month. A long-lived server
    # removes both, the server of a single command removes events.
    "PREFECT_SERVER_EVENTS_RETENTION_PERIOD": "P3D",
    "PREFECT_SERVER_SERVICES_DB_VACUUM_ENABLED": "events,flow_runs",
    "PREFECT_SERVER_SERVICES_DB_VACUUM_RETENTION_PERIOD": "2592000",
    # A flow run that loses its concurrency slot is cancelled, so slots are stored across a restart of the server.
    "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage.filesystem",
    # Wait for a server that is away for a minute or two: the waits double, from two seconds on.
    "PREFECT_CLIENT_MAX_RETRIES": "5",
    # A server whose database is away answers so. Prefect itself tries again after 429, 502 and 503 alone.
    "PREFECT_CLIENT_RETRY_EXTRA_CODES": "500",
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",
    "PREFECT_LOGGING_LEVEL": "WARNING",
    "PREFECT_SERVER_LOGGING_LEVEL": "ERROR",
    # The command prints the error of a task as one sentence; the Prefect UI has the traceback.
    "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",
    "PREFECT_LOGGING_HANDLERS_CONSOLE_FLOW_RUNS_LEVEL": "CRITICAL",
    "PREFECT_LOGGING_HANDLERS_CONSOLE_TASK_RUNS_LEVEL": "CRITICAL",
}
_PINNED = {
    # The server counts a run as crashed after four times as long without a heartbeat (entente/prefect_server/automations.py).
    "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30",
    # "reschedule" begins a run a second time under its name.
    "PREFECT_FLOW_RUN_EXECUTE_SIGTERM_BEHAVIOR": "crash",
    # "error" ends a run where one of its threads writes a log line.
    "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",
    # What our own server must do: make its tables, record tasks and events, start what is due, and recover lost runs.
    "PREFECT_SERVER_DATABASE_MIGRATE_ON_START": "true",
    "PREFECT_SERVER_API_DEFAULT_LIMIT": "200",
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_ENABLED": "true",
    "PREFECT_SERVER_SERVICES_EVENT_PERSISTER_ENABLED": "true",
    "PREFECT_SERVER_SERVICES_SCHEDULER_ENABLED": "true",
    "PREFECT_SERVER_SERVICES_TRIGGERS_ENABLED": "true",
}
"""Override the user's variables, which would change the meaning of a run; `PINNED` in flows/given_parameters.py: for flows."""
_QUIET = {
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "WANDB_SILENT": "true",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "PYTHONWARNINGS": "ignore",
}
LOOPBACK = ("localhost", "127.0.0.1", "::1")


def prepare_environment(*, debug: bool) -> None:
    """Set the variables. With `debug`, libraries keep their own logging and warnings."""
    _keep_proxies_from_this_machine()
    home = os.environ.setdefault("PREFECT_HOME", str(Path.cwd() / ".prefect"))
    # Prefect writes its pages beside its own files, which may belong to another user, as in the image, and then has no pages.
    os.environ.setdefault("PREFECT_SERVER_UI_STATIC_DIRECTORY", str(Path(home) / "ui"))
    try:
        Path.home()
    except RuntimeError:  # a container's user without a name: libraries such as Prefect cannot be imported without a home
        os.environ["HOME"] = os.environ["PREFECT_HOME"]
    os.environ |= _PINNED
    for name, value in (_PREFECT | ({} if debug else _QUIET)).items():
        if not (debug and "LOGGING" in name):
            os.environ.setdefault(name, value)
    if not debug:
        import warnings

        warnings.simplefilter("ignore")


def _keep_proxies_from_this_machine() -> None:
    """Exempt this machine from a proxy, which cannot reach it and would receive the server's key. Libraries read either
    spelling. Without a proxy set neither: it would hide the proxy of a macOS system."""
    spellings = ("no_proxy", "NO_PROXY")
    if not any(name.lower().endswith("_proxy") and name not in spellings for name in os.environ):
        return
    values = [os.environ.get(name, "") for name in spellings]
    for name, hosts in zip(spellings, (values[0] or values[1], values[1] or values[0]), strict=True):
        words = [host.strip() for host in hosts.split(",") if host.strip()]
        if words != ["*"]:  # that exempts every host, but only where it is alone
            words += [*LOOPBACK, "0.0.0.0", socket.gethostname().lower()]
        os.environ[name] = ",".join(dict.fromkeys(words))
