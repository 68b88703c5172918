"""Main of a command's own Prefect server: serves on an inherited socket until SIGTERM, or until its parent process ends.

python -m cli.serve_prefect FD PARENT
"""

import os
import socket
import sys

from cli.garbage_thread import collect_in_thread
from telemetry.parent import end_with_parent


def main(descriptor: int, parent: int) -> None:
    """Serve the API without the pages and the schedules."""
    end_with_parent(gently=True, parent=parent)
    collect_in_thread()
    os.environ |= {"PREFECT__SERVER_EPHEMERAL": "1", "PREFECT__SERVER_FINAL": "1", "PREFECT_UI_ENABLED": "0"}
    import uvicorn

    application = uvicorn.Config(
        "prefect.server.api.server:create_app", factory=True, log_level="error", lifespan="on", timeout_graceful_shutdown=3
    )
    uvicorn.Server(application).run(sockets=[socket.socket(fileno=descriptor)])


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
