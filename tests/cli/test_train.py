"""What `entente train` prints at its end."""

import shlex

from entente.cli.train import _lines

SUMMARY = {
    "steps": 1, "decisions": 2, "wall_s": 3.0, "orders_rejected": 0, "source_games": 0,
    "base_score": 0.0, "base_ci": None, "trained_score": 0.0, "trained_ci": None,
}  # fmt: skip


def test_the_command_that_it_prints_can_be_pasted():
    def words(run: str) -> list[str]:
        return shlex.split(_lines(SUMMARY | {"run": run})[-1].partition("one page: ")[2])

    assert words("runs/mine") == ["entente", "report", "--run", "mine"]
    assert words("my disk/it's/mine") == ["entente", "report", "--run", "mine", "--runs-root", "my disk/it's"]
