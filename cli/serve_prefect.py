"""Main of a command's own Prefect server: serves on an inherited socket until told to end, or until its parent is gone.

python -m cli.serve_prefect FD
"""

import os
import socket
import sys

from cli.collect_aside import collect_aside
from telemetry.parent import end_with_parent


def main(descriptor: int) -> None:
    """Serve the API alone: no pages, no schedules."""
    end_with_parent(gently=True)
    collect_aside()
    os.environ |= {"PREFECT__SERVER_EPHEMERAL": "1", "PREFECT__SERVER_FINAL": "1", "PREFECT_UI_ENABLED": "0"}
    import uvicorn

    application = uvicorn.Config(
        "prefect.server.api.server:create_app", factory=True, log_level="error", lifespan="on", timeout_graceful_shutdown=3
    )
    uvicorn.Server(application).run(sockets=[socket.socket(fileno=descriptor)])


if __name__ == "__main__":
    main(int(sys.argv[1]))
