"""What `entente train` prints at its end."""

import shlex
from pathlib import Path
from typing import NoReturn

import pytest

from entente.cli.train import _lines, train_run
from entente.settings.layers import layered_settings
from entente.telemetry.errors import InputError

SUMMARY = {
    "steps": 1, "decisions": 2, "wall_s": 3.0, "orders_rejected": 0, "source_games": 0,
    "base_score": 0.0, "base_ci": None, "trained_score": 0.0, "trained_ci": None,
}  # fmt: skip


def test_the_command_that_it_prints_can_be_pasted():
    def words(run: str) -> list[str]:
        return shlex.split(_lines(SUMMARY | {"run": run}, years=1)[-1].partition("one page: ")[2])

    assert words("runs/mine") == ["entente", "report", "--run", "mine"]
    assert words("my disk/it's/mine") == ["entente", "report", "--run", "mine", "--runs-root", "my disk/it's"]


@pytest.mark.parametrize(("years", "per"), [(1, "a year"), (3, "in 3 years")])
def test_a_score_has_the_years_of_its_evaluation(years: int, per: str):
    assert sum(f"+0.00 centres {per}, " in line for line in _lines(SUMMARY | {"run": "runs/mine"}, years)) == 2


@pytest.mark.parametrize(("resume", "begun", "hints"), [(False, True, 1), (False, False, 0), (True, True, 0)])
def test_a_new_run_that_its_endpoints_stopped_says_how_to_continue_it(
    resume: bool, begun: bool, hints: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """The same command again would begin another run, if it has no name, and pay for all answers again."""
    settings = layered_settings("laptop", [], {"run": "mine", "runs_root": tmp_path})

    def stop(flow: object) -> NoReturn:
        if begun:
            settings.paths.create().settings.write_text("{}")
        raise InputError("the endpoints have used 9 tokens of endpoint.token_budget 9")

    monkeypatch.setattr("flows.open_run.check_inputs", lambda *_, **__: None)
    monkeypatch.setattr("entente.cli.train.run_flow", stop)
    with pytest.raises(InputError, match="have used 9 tokens"):
        train_run(settings, resume=resume)
    assert capsys.readouterr().err.count("continue with: entente train --run mine") == hints
