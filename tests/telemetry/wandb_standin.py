"""A stand-in for W&B's server on loopback: as much of its API as `wandb sync` needs, and what it was sent."""

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Sent:
    """What clients have sent."""

    address: str = ""
    run: dict[str, Any] | None = None
    """Variables of the first request that made the run."""
    history: list[dict[str, Any]] = field(default_factory=list)
    """Lines of the run's history, at the places that the client named."""
    summary: dict[str, Any] = field(default_factory=dict)
    artifacts: dict[str, str] = field(default_factory=dict)
    """Type of each artifact by its id."""
    committed: list[str] = field(default_factory=list)
    files: dict[str, bytes] = field(default_factory=dict)
    """Uploaded files by their path in the address."""
    unknown: list[str] = field(default_factory=list)
    """GraphQL operations that nothing here answers."""

    def answer(self, operation: str, given: dict[str, Any]) -> dict[str, Any]:
        """The data of a GraphQL operation."""
        project = {"id": "project", "name": "entente", "entity": {"id": "entity", "name": "me"}}
        if operation == "RunResumeStatus":
            found = None if self.run is None else self._stored(given["name"])
            return {"model": {**project, "bucket": found}}
        if operation == "UpsertBucket":
            self.run = self.run or given
            bucket = {"id": "run", "name": given["name"], "displayName": given["displayName"], "config": given["config"]}
            return {"upsertBucket": {"bucket": {**bucket, "historyLineCount": len(self.history), "project": project}}}
        if operation == "CreateRunFiles":
            files = [{"name": name, "uploadUrl": self._upload(f"run/{name}")} for name in given["files"]]
            return {"createRunFiles": {"runID": "run", "uploadHeaders": [], "files": files}}
        if operation == "CreateArtifact":
            name = f"artifact-{len(self.artifacts)}"
            self.artifacts[name] = given["input"]["artifactTypeName"]
            made = {"id": name, "state": "PENDING", "artifactSequence": {"id": name, "latestArtifact": None}}
            return {"createArtifact": {"artifact": made}}
        if operation == "CreateArtifactManifest":
            file = {"id": "file", "uploadUrl": self._upload(f"{given['artifactID']}/manifest"), "uploadHeaders": []}
            return {"createArtifactManifest": {"artifactManifest": {"id": "manifest", "file": file}}}
        if operation == "CreateArtifactFiles":
            nodes = [
                {
                    "node": {
                        "storagePath": each["name"],
                        "uploadUrl": self._upload(f"{each['artifactID']}/{each['name']}"),
                        "uploadHeaders": [],
                        "artifact": {"id": each["artifactID"]},
                    }
                }
                for each in given["input"]["artifactFiles"]
            ]
            return {"createArtifactFiles": {"files": {"edges": nodes}}}
        if operation == "CommitArtifact":
            self.committed.append(given["artifactID"])
            return {"commitArtifact": {"artifact": {"id": given["artifactID"], "digest": ""}}}
        if operation != "ServerFeaturesQuery":
            self.unknown.append(operation)
        return {}

    def take_lines(self, streamed: dict[str, Any]) -> None:
        """Put the lines of a file stream where they belong."""
        files = streamed.get("files") or {}
        if history := files.get("wandb-history.jsonl"):
            self.history[history["offset"] :] = map(json.loads, history["content"])
        if summary := files.get("wandb-summary.json"):
            self.summary = json.loads(summary["content"][-1])

    def _stored(self, name: str) -> dict[str, Any]:
        counts = {"historyLineCount": len(self.history), "eventsLineCount": 0, "logLineCount": 0}
        tails = {"historyTail": json.dumps([json.dumps(line) for line in self.history[-1:]]), "eventsTail": "[]"}
        return {"id": "run", "name": name, "config": "{}", "wandbConfig": '{"t": 1}', "tags": []} | {
            "summaryMetrics": json.dumps(self.summary),
            **counts,
            **tails,
        }

    def _upload(self, path: str) -> str:
        return f"{self.address}/upload/{path}"


@contextmanager
def wandb_server() -> Iterator[Sent]:
    """The server, until the block ends."""
    sent, lock = Sent(), threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            with lock:
                if self.path == "/graphql":
                    asked = json.loads(body)
                    (operation,) = re.findall(r"\b(?:query|mutation) (\w+)", asked["query"])
                    self._reply({"data": sent.answer(operation, asked.get("variables") or {})})
                    return
                if self.path.endswith("/file_stream"):
                    sent.take_lines(json.loads(body))
                self._reply({})

        def do_PUT(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            with lock:
                sent.files[self.path.removeprefix("/upload/")] = body
                self._reply({})

        def _reply(self, answer: dict[str, Any]) -> None:
            body = json.dumps(answer).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Say nothing."""

    class Server(ThreadingHTTPServer):
        def handle_error(self, request: Any, client_address: Any) -> None:
            """A client that hangs up after its last request is no error."""

    server = Server(("127.0.0.1", 0), Handler)
    sent.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield sent
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
