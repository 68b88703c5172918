"""What `entente train` says at the end of a run."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from cli.main import run

SUMMARY = {
    "steps": 2, "decisions": 64, "wall_s": 9.0, "orders_rejected": 0, "run": "runs/mine", "random_score": 0.2,
    "base_score": 0.3, "base_ci": [0.2, 0.4], "trained_score": 1.2, "trained_ci": [1.1, 1.3], "base_score_vs_mover": 0.1,
}  # fmt: skip


@pytest.mark.parametrize(
    ("beside", "line"),
    [
        pytest.param("teacher", "random player +0.20, imitated teacher +0.40", id="tiny"),
        pytest.param("mover", "random player +0.20, mover player +0.40", id="own model"),
    ],
)
def test_the_scripted_player_is_called_teacher_only_where_the_model_imitated_it(
    beside: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    async def trained(settings: Any, **how: Any) -> dict[str, Any]:
        return SUMMARY | {f"{beside}_score": 0.4}

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("cli.environment.prepare_environment", lambda **how: None)
    monkeypatch.setattr("flows.train_policy.train_policy", trained)
    monkeypatch.setattr("cli.train.prefect_server", nullcontext)
    monkeypatch.setattr("cli.train.progress_shown", nullcontext)
    assert run(["train"]) == 0
    assert line in capsys.readouterr().out.splitlines()
