"""The panels name what is logged, in one unit each; W&B's workspace holds all of them; and the same can be asked in SQL."""

import sys

import pytest

from cli.watch import _CURVES
from storage.asking import QUERIES
from telemetry.dashboards import PANELS, main, workspace
from telemetry.metrics import METRICS

ALL = [panel for panels in PANELS.values() for panel in panels]


def test_a_panel_s_metrics_are_registered_and_share_a_unit_and_its_question_is_a_ready_one():
    for panel in ALL:
        assert {METRICS[name].unit for name in panel.metrics} == {panel.unit}, panel.title
        assert panel.question in QUERIES or not panel.question, panel.title
    assert [name for _, name, _ in _CURVES if name not in METRICS] == [], "the screen of `entente watch`"


@pytest.mark.filterwarnings("ignore:Pydantic V1 style:DeprecationWarning")  # the library itself, while it is imported
def test_the_workspace_has_every_panel_once_with_its_unit():
    pytest.importorskip("wandb_workspaces", reason="the extra 'dashboards' is not installed")
    made = workspace("me", "entente")
    panels = [panel for section in made.sections for panel in section.panels]
    plotted = [(panel.y, panel.title_y) for panel in panels if isinstance(getattr(panel, "y", None), list)]
    assert plotted == [(list(panel.metrics), panel.unit) for panel in ALL]
    assert [section.name for section in made.sections] == list(PANELS)


def test_a_missing_library_and_a_missing_login_are_one_sentence_each(monkeypatch: pytest.MonkeyPatch, capsys):
    class Refuses:
        def save(self) -> None:
            raise ValueError("No API key configured.\nUse `wandb login`")

    monkeypatch.setattr("telemetry.dashboards.workspace", lambda *_: Refuses())
    assert main(["--entity", "me"]) == 2
    assert capsys.readouterr().err.startswith("W&B did not take the workspace (No API key configured. Use `wandb login`)")
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "wandb_workspaces", None)
    monkeypatch.setitem(sys.modules, "wandb_workspaces.reports.v2", None)
    assert main(["--entity", "me"]) == 2
    assert capsys.readouterr().err == "W&B's library for workspaces is missing: pip install 'entente[dashboards]'\n"
