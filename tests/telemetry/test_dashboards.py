"""The panels name what is logged, in one unit each; W&B's description holds all of them; and the same can be asked in SQL."""

import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cli.watch import _CURVES
from storage.asking import QUERIES
from telemetry.dashboards import PANELS, TABLES, Panel, main, workspace
from telemetry.metrics import METRICS

ROOT = Path(__file__).resolve().parent.parent.parent
ALL = [panel for panels in PANELS.values() for panel in panels]


@pytest.mark.parametrize("panel", ALL, ids=lambda panel: panel.title)
def test_a_panel_s_metrics_are_registered_and_share_a_unit(panel: Panel):
    assert {METRICS[name].unit for name in panel.metrics} == {panel.unit}


@pytest.mark.parametrize("panel", [panel for panel in ALL if panel.question], ids=lambda panel: panel.title)
def test_a_panel_s_question_is_a_ready_one(panel: Panel):
    assert panel.question in QUERIES


def test_what_the_dashboards_are_for_is_on_them():
    asked = {panel.question for panel in ALL}
    wanted = {"rollout_latency", "tokens_per_second", "gpu_use", "lag_histogram", "trainer_idle_share", "worker_queue"}
    assert wanted <= asked


def test_the_screen_of_watch_shows_registered_metrics():
    assert [name for _, name, _ in _CURVES if name not in METRICS] == []


def test_w_and_b_s_description_has_every_panel_and_table_once():
    sections = workspace()["section"]["panelBankConfig"]["sections"]
    panels = [panel for section in sections for panel in section["panels"]]
    plotted = [panel["config"]["metrics"] for panel in panels if panel["viewType"] == "Run History Line Plot"]
    assert plotted == [list(panel.metrics) for panel in ALL]
    assert [key for panel in panels for key in panel["config"].get("mediaKeys", [])] == list(TABLES)
    assert len({panel["__id__"] for panel in panels}) == len(panels)


def test_the_description_in_docs_is_the_one_that_the_registry_gives(capsys: pytest.CaptureFixture[str]):
    assert main([]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads((ROOT / "docs" / "wandb-workspace.json").read_text())


@pytest.fixture
def server() -> Iterator[tuple[str, list[tuple[str, Any]]]]:
    """Something that answers like W&B's GraphQL, and what it was told; it refuses the project 'closed'."""
    told: list[tuple[str, Any]] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
            told.append((self.headers["authorization"], asked["variables"]))
            closed = asked["variables"]["project"] == "closed"
            said = {"errors": [{"message": "permission denied"}]} if closed else {"data": {}}
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(said).encode())

        def log_message(self, format: str, *args: object) -> None:
            pass

    serving = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=serving.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{serving.server_port}", told
    serving.shutdown()
    thread.join()
    serving.server_close()


def test_the_workspace_is_made_with_the_login_that_is_there(server, monkeypatch: pytest.MonkeyPatch, capsys):
    url, told = server
    monkeypatch.setenv("WANDB_BASE_URL", url)
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    assert main(["--entity", "me"]) == 0 and "made in W&B" in capsys.readouterr().out
    ((login, variables),) = told
    assert login == "Basic YXBpOnNlY3JldA==" and json.loads(variables["spec"]) == workspace()
    assert (variables["entity"], variables["project"]) == ("me", "entente")
    assert main(["--entity", "me", "--project", "closed"]) == 2
    assert capsys.readouterr().err == "W&B refused the workspace: permission denied\n"


def test_w_and_b_without_a_login_or_a_network_is_one_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    assert main(["--entity", "me"]) == 2 and capsys.readouterr().err.startswith("W&B has no login here")
    (tmp_path / ".netrc").write_text("machine 127.0.0.1 login user password kept\n")
    (tmp_path / ".netrc").chmod(0o600)
    assert main(["--entity", "me"]) == 2
    assert "did not take the workspace" in capsys.readouterr().err
