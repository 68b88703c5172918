"""The process environment that every command which runs flows needs, set before Prefect is imported.

Quiet, offline, its database in the working folder; what the user has set stands.
"""

import os
from pathlib import Path

PREFECT_DAYS = 30
"""Days for which Prefect keeps flow runs that ended."""
_PREFECT = {
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    # No page but the server's own may ask it anything; its pages ask wherever they came from, by whichever name that was.
    "PREFECT_SERVER_API_CORS_ALLOWED_ORIGINS": "",
    "PREFECT_SERVER_UI_API_URL": "/api",
    "DO_NOT_TRACK": "1",
    "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
    "PREFECT_SERVER_UI_V2_ENABLED": "false",
    # The recorder writes task states in batches: a quarter of the server's CPU time, and the UI is never far behind.
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_BATCH_SIZE": "200",
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_READ_BATCH_SIZE": "200",
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_FLUSH_INTERVAL": "1",
    "PREFECT_SERVER_SERVICES_EVENT_PERSISTER_BATCH_SIZE": "200",
    "PREFECT_SERVER_SERVICES_EVENT_PERSISTER_READ_BATCH_SIZE": "200",
    "PREFECT_SERVER_SERVICES_EVENT_PERSISTER_FLUSH_INTERVAL": "1",
    # Events take most of the database's room and serve the last hours; flow runs stay for a month. A server that lives long
    # removes both by itself; the one that comes and goes with a command removes events, and `entente runs clean` the runs.
    "PREFECT_SERVER_EVENTS_RETENTION_PERIOD": "P3D",
    "PREFECT_SERVER_SERVICES_DB_VACUUM_ENABLED": "events,flow_runs",
    "PREFECT_SERVER_SERVICES_DB_VACUUM_RETENTION_PERIOD": str(PREFECT_DAYS * 86_400),
    # A run whose place in a concurrency limit is gone is cancelled, so places outlive a restart of the server.
    "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage.filesystem",
    "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30",
    # A server that is gone for a minute or two is waited for: the waits double, from two seconds on.
    "PREFECT_CLIENT_MAX_RETRIES": "7",
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",
    "PREFECT_LOGGING_LEVEL": "WARNING",
    "PREFECT_SERVER_LOGGING_LEVEL": "ERROR",
    # What a task raised reaches the terminal once, as its sentence; the Prefect UI has it whole.
    "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",
    "PREFECT_LOGGING_HANDLERS_CONSOLE_FLOW_RUNS_LEVEL": "CRITICAL",
    "PREFECT_LOGGING_HANDLERS_CONSOLE_TASK_RUNS_LEVEL": "CRITICAL",
}
_QUIET = {
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "WANDB_SILENT": "true",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "PYTHONWARNINGS": "ignore",
}


def prepare_environment(*, debug: bool) -> None:
    """Set what is not set; with `debug` the libraries may speak."""
    os.environ.setdefault("PREFECT_HOME", str(Path.cwd() / ".prefect"))
    for name, value in (_PREFECT | ({} if debug else _QUIET)).items():
        if not (debug and "LOGGING" in name):
            os.environ.setdefault(name, value)
    if not debug:
        import warnings

        warnings.simplefilter("ignore")
