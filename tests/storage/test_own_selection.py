"""A user's query chooses the start groups of a step, and can break none of the rules of a step."""

import json
import random
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from entente.telemetry.errors import InputError
from storage import own_selection
from storage.index import Index, check_selection, open_index
from storage.ledger import write_ledger
from storage.own_selection import keys_of, list_candidates
from storage.runs import RunPaths
from storage.selection import SelectionQuery
from storage.settings import StorageSettings
from storage.shards import publish_shard
from tests.storage import make_rows
from tests.storage.test_selection import one_power_runs, query, random_run

DEFAULT = """
WITH keyed AS (SELECT *, ln(-ln(uniform)) - lag * ln(0.5) AS draw_key FROM candidates)
SELECT shard, start_group FROM keyed
ORDER BY row_number() OVER (PARTITION BY power ORDER BY draw_key, producer, start_group), draw_key, producer, start_group
"""
FIRST = "FROM candidates SELECT shard, start_group ORDER BY start_group"


@pytest.mark.parametrize("seed", [1, 2])
def test_the_draw_written_as_a_query_chooses_the_rows_of_the_draw(paths: RunPaths, rows: Any, seed: int) -> None:
    random_run(paths, rows, seed)
    index = Index(paths)
    index.refresh()
    taken = 0
    for step in range(1, 4):
        asked = query(step, policy_version=step - 1, max_policy_lag=1 + seed % 3, start_groups=1 + seed % 3, seed=seed)
        ours, theirs = index.select_batch(asked), index.select_batch(query_by(asked, DEFAULT))
        assert theirs.rows.equals(ours.rows) and theirs.counts == ours.counts
        assert index.eligible(query_by(asked, DEFAULT)) == index.eligible(asked)
        taken += ours.rows.num_rows
        assert write_ledger(paths, step, ours.rows, {})
        index.refresh()
    assert taken > 0


def query_by(asked: SelectionQuery, selection: str) -> SelectionQuery:
    return replace(asked, selection=selection)


def chosen(index: Index, selection: str, **given: Any) -> list[int]:
    """Start groups that a step takes, in its order."""
    found = index.select_batch(query(6, policy_version=5, **given, selection=selection))
    return list(dict.fromkeys(found.rows["start_group"].to_pylist()))


def test_the_order_is_the_query_s_and_the_quota_and_the_lag_are_the_step_s(paths: RunPaths, rows: Any) -> None:
    index = one_power_runs(paths, rows, {number: ("FRANCE", number % 6) for number in range(12)})  # lag 5 - number % 6
    backwards = f"{FIRST} DESC"
    assert chosen(index, backwards, start_groups=3) == [11, 10, 9]
    assert chosen(index, backwards, start_groups=99, max_policy_lag=1) == [11, 10, 5, 4]
    few = "FROM candidates SELECT shard, start_group WHERE lag = 0"
    selection = index.select_batch(query(6, policy_version=5, selection=few))
    assert selection.counts["waiting"] == 4 and selection.start_groups == 2 and selection.shortage
    assert index.eligible(query(6, policy_version=5, selection=few)).start_groups == 2


@pytest.mark.parametrize(
    ("selection", "sentence"),
    [
        ("SELECT 'p0/000009.arrow' AS shard, 9 AS start_group", "group 9 of shard p0/000009.arrow, which is no start group that"),
        ("SELECT 'p0/000001.arrow' AS shard, 1 AS start_group", "group 1 of shard p0/000001.arrow, .* it is expired"),
        ("SELECT 'p0/000002.arrow' AS shard, 2 AS start_group", "group 2 of shard p0/000002.arrow, .* it is used"),
        (f"({FIRST}) UNION ALL ({FIRST})", "twice"),
        ("SELECT NULL AS shard, 3 AS start_group", "no start group that a step can choose"),
        ("FROM candidates SELECT shard, start_group, power", "returns shard, start_group, power: .* taken whole"),
        ("SELECT 1; SELECT 2", "one SELECT"),
        ("DELETE FROM candidates", "one SELECT"),
        ("COPY candidates TO 'x.csv'", "one SELECT"),
        ("FROM read_text('/etc/hostname')", "failed: Permission Error"),
        ("FROM index", "failed: "),
        (f"{FIRST} + random()", "random, whose result changes: draw with the column uniform"),
        ("FROM candidates SELECT shard, start_group WHERE current_date > '2020-01-01'", "current_date, whose result changes"),
        ("FROM candidates SELECT shard, start_group WHERE ago(INTERVAL 1 DAY) > '2020-01-01'", "ago, whose result changes"),
        ("FROM candidates TABLESAMPLE 50% SELECT shard, start_group", "takes a sample, which changes"),
        (f"{FIRST}, missing", "Binder Error: .*missing.*; `candidates` has shard, start_group, producer"),
    ],
)  # fmt: skip
def test_a_query_that_breaks_a_rule_is_refused_in_a_sentence(three_groups: Index, selection: str, sentence: str) -> None:
    with pytest.raises(InputError, match=rf"^storage\.selection .*{sentence}") as refused:
        chosen(three_groups, selection)
    assert "\n" not in str(refused.value)
    assert chosen(three_groups, FIRST) == [3], "and the index can be asked again"


@pytest.fixture(scope="module")
def three_groups(tmp_path_factory: pytest.TempPathFactory) -> Index:
    """One that is expired, one that is used, and the only one that a step can choose."""
    paths = RunPaths(tmp_path_factory.mktemp("three") / "run").create()
    index = one_power_runs(paths, make_rows, {1: ("FRANCE", 0), 2: ("FRANCE", 5), 3: ("FRANCE", 5)})
    assert write_ledger(paths, 1, index.select_batch(query(6, policy_version=5, selection=FIRST, start_groups=1)).rows, {})
    index.refresh()
    assert chosen(index, FIRST) == [3]
    return index


def test_a_query_without_an_end_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_selection, "SECONDS", 0.3)
    endless = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT '' AS shard, max(i) AS start_group FROM n"
    with pytest.raises(InputError, match=r"storage\.selection was ended after 0\.3 seconds"):
        check_selection(endless)


def test_a_file_is_kept_as_its_text(tmp_path: Path) -> None:
    file = tmp_path / "mine.sql"
    file.write_text(f"-- mine.sql\n{FIRST};")
    settings = StorageSettings(selection=str(file))
    file.unlink()
    assert settings.selection == f"-- mine.sql\n{FIRST};\n" and StorageSettings.model_validate(settings.model_dump()) == settings
    check_selection(settings.selection)
    with pytest.raises(InputError, match=r"query '.*mine\.sql' cannot be read: No such file"):
        StorageSettings(selection=str(file))


def test_the_ledger_has_the_query(paths: RunPaths, rows: Any) -> None:
    one_power_runs(paths, rows, {number: ("FRANCE", 0) for number in range(8)})
    trained: dict[int, list[tuple[str, int]]] = {}
    for step in (1, 2, 3):
        found = open_index(paths).select_batch(query(step, start_groups=2, selection=FIRST))  # as in a resumed run
        assert found.query.selection == FIRST and SelectionQuery.from_json(found.query.to_json()) == found.query
        trained[step] = keys_of(found.rows)
        assert write_ledger(paths, step, found.rows, {"selection": found.query.to_json()})
    assert [sorted({number for _, number in trained[step]}) for step in trained] == [[0, 1], [2, 3], [4, 5]]


def test_the_query_of_an_older_ledger_is_read() -> None:
    asked = query(3, seed=5, selection=FIRST)
    older = json.loads(asked.to_json()) | {"min_spread": 0.0, "freshness": 0.5, "balance_powers": True}
    assert SelectionQuery.from_json(json.dumps(older)) == asked


def test_every_column_of_candidates_is_documented(three_groups: Index) -> None:
    page = (Path(__file__).parents[2] / "docs" / "data-format.md").read_text()
    names = list_candidates(three_groups.connection, asdict(query(6, policy_version=5))).column_names
    table = page.split("<!-- candidates -->")[1].split("<!--")[0]
    assert [line.split("`")[1] for line in table.splitlines() if line.startswith("| `")] == names


def test_candidates_do_not_depend_on_the_number_of_threads(paths: RunPaths, rows: Any) -> None:
    rng = random.Random(1)
    decisions, plies = rows.make_shard_rows(rng, range(16), forks=5)
    publish_shard(paths, "p0", 0, decisions, plies, {})
    found = []
    for threads in (1, 4):
        index = Index(paths, threads=threads, blend={"sos_share": 0.3, "balance": 0.7})
        index.refresh()
        asked = query(1, start_groups=16, selection=FIRST)
        index.select_batch(asked)
        found.append(list_candidates(index.connection, asdict(asked)))
    assert found[0].num_rows == 16 and found[0].equals(found[1])
