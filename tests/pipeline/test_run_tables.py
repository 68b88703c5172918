"""The tables that W&B shows of a step: a game that was really trained on, with its boards, and the trainer's newest lines."""

from pathlib import Path

from pipeline.run_tables import TRAINER_LINES, step_tables
from storage.as_of import read_past_choice
from storage.runs import RunPaths
from telemetry.wandb_run import Picture


def test_the_sampled_game_is_one_fork_that_the_step_trained_on_with_orders_and_boards(trained):
    paths: RunPaths = trained[1]
    table = step_tables(paths, 2)[0]
    assert table.name == "sampled_game" and table.rows
    rows = [dict(zip(table.columns, row, strict=True)) for row in table.rows]
    used = read_past_choice(paths, 2).rows.to_pylist()
    trained_on = {(row["start_group"], row["fork"], row["phase"], row["power"], row["return"]) for row in used}
    assert {(row["start group"], row["fork"], row["phase"], row["power"], row["return"]) for row in rows} <= trained_on
    assert len({(row["start group"], row["fork"]) for row in rows}) == 1
    for row in rows:
        assert row["step"] == 2 and row["orders"] and row["others' orders"]
        assert isinstance(row["board"], Picture) and row["board"].svg.startswith("<svg")


def test_of_the_trainer_s_log_the_newest_lines_are_shown(tmp_path: Path):
    paths = RunPaths(tmp_path / "run").create()
    paths.trainer_log.write_text("\n".join(f"line {number}" for number in range(TRAINER_LINES + 50)) + "\n")
    game, logs = step_tables(paths, 1)
    assert game.rows == [], "a step that was not recorded has no game"
    assert logs.rows[-1] == [f"line {TRAINER_LINES + 49}"] and len(logs.rows) == TRAINER_LINES
