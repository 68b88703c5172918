"""What `entente train` prints at its end."""

import shlex

import pytest

from entente.cli.train import _lines

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
