"""A user's query weighs the positions, and can break none of the rules of the draw."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from pipeline.own_sampling import POSITIONS, check_sampling, list_positions, own_weights
from rollouts.settings import RolloutSettings
from storage.closed_query import ask_closed
from storage.learnable import PastGroups
from telemetry.errors import InputError

ALL = "FROM positions SELECT snapshot_id, 1 AS weight"


def test_a_position_has_the_weight_that_the_query_gives_and_none_if_it_is_left_out(positions) -> None:
    first, second = positions[0], positions[1]
    past = {first.snapshot_id: PastGroups(3, 2.0, -1.0), second.snapshot_id: PastGroups(1, 0.5, 4.0)}
    table = list_positions(positions, 7, past)
    query = "FROM positions SELECT 10 * spread + start_groups + step AS weight, snapshot_id WHERE start_groups > 0 ORDER BY year"
    assert own_weights(query, table, ask_closed) == [30.0, 13.0] + [0.0] * (len(positions) - 2)
    centres = own_weights("FROM positions SELECT snapshot_id, france AS weight", table, ask_closed)
    assert centres == [float(snapshot.centres[2]) for snapshot in positions]


@pytest.mark.parametrize(
    ("query", "sentence"),
    [
        ("SELECT 'held-out' AS snapshot_id, 1 AS weight", "snapshot 'held-out', which is no position to train on"),
        (f"({ALL}) UNION ALL ({ALL})", "twice"),
        ("FROM positions SELECT snapshot_id, -1 AS weight", "the weight -1: give numbers from 0 to 1e"),
        ("FROM positions SELECT snapshot_id, 'NaN'::DOUBLE AS weight", "the weight nan: give numbers"),
        ("FROM positions SELECT snapshot_id, NULL AS weight", "the weight None: give numbers"),
        ("FROM positions SELECT snapshot_id, 'much' AS weight", "the weight much: give numbers"),
        ("FROM positions SELECT snapshot_id, 1e-12 AS weight", "no position a weight above 0"),
        (f"{ALL} WHERE year > 2000", "no position a weight above 0"),
        ("FROM positions SELECT snapshot_id", "returns snapshot_id: return snapshot_id and weight alone"),
        ("FROM positions SELECT snapshot_id, random() AS weight", "random, whose result changes: use the columns of"),
        (f"{ALL}; {ALL}", "one SELECT over `positions`"),
        (f"{ALL} WHERE missing", "Binder Error: .*missing.*; `positions` has snapshot_id, step, phase"),
    ],
)  # fmt: skip
def test_a_query_that_breaks_a_rule_is_refused_in_a_sentence(positions, query: str, sentence: str) -> None:
    with pytest.raises(InputError, match=rf"^rollouts\.sampling .*{sentence}") as refused:
        own_weights(query, list_positions(positions, 1, {}), ask_closed)
    assert "\n" not in str(refused.value)


def test_a_file_is_kept_as_its_text_and_an_unknown_name_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "mine.sql"
    file.write_text(f"{ALL};")
    settings = RolloutSettings(sampling=str(file))
    file.unlink()
    assert settings.sampling == f"{ALL};\n" and RolloutSettings.model_validate(settings.model_dump()) == settings
    check_sampling(settings.sampling)
    with pytest.raises(ValidationError, match="no sampling 'learnabel': give uniform, stratified, learnable, or a query"):
        RolloutSettings(sampling="learnabel")
    with pytest.raises(InputError, match="must be one SELECT"):
        check_sampling("DELETE FROM positions")


def test_every_column_of_positions_is_documented() -> None:
    page = (Path(__file__).parents[2] / "docs" / "data-format.md").read_text()
    table = page.split("<!-- positions -->")[1].split("<!--")[0]
    named = [name for line in table.splitlines() if line.startswith("| `") for name in line.split("|")[1].split("`")[1::2]]
    assert named == POSITIONS.names
