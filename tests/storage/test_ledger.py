"""A step is recorded once, by one trainer, and reads back in its order."""

import shutil
from typing import Any

import pyarrow as pa
import pytest

from entente.telemetry.errors import DataError
from storage.index import Index, open_index
from storage.ledger import count_run, ledger_path, read_ledger, recorded_steps, write_ledger
from storage.retention import retention_facts
from storage.runs import RunPaths
from storage.shards import publish_shard
from storage.update_log import UpdateLog, read_update_log, update_log_path, write_update_log
from tests.damage import flip


@pytest.fixture
def chosen(paths: RunPaths, publish: Any) -> pa.Table:
    publish(range(3), forks=4)
    rows, _ = open_index(paths).select_batch(1, policy_version=0, start_groups=9)
    assert rows.num_rows > 4
    return rows


def test_the_second_trainer_loses_the_step_and_leaves_the_first_s_bytes(paths: RunPaths, chosen: pa.Table) -> None:
    assert write_ledger(paths, 137, chosen, {"policy_version": "136"}) is True
    path = ledger_path(paths, 137)
    before = path.read_bytes()
    assert write_ledger(paths, 137, chosen.slice(0, 2), {}) is False
    assert path.read_bytes() == before
    assert [entry.name for entry in path.parent.iterdir()] == ["step-000137.arrow"]


def test_a_record_reads_back_in_its_order(paths: RunPaths, chosen: pa.Table) -> None:
    reversed_rows = chosen.take(list(range(chosen.num_rows))[::-1])
    write_ledger(paths, 2, reversed_rows, {"policy_version": "1"})
    read = read_ledger(paths, 2)
    assert read is not None
    assert read.to_pylist() == reversed_rows.to_pylist()
    assert read.schema.metadata[b"policy_version"] == b"1"


def test_steps_are_listed_in_order_and_a_file_being_written_is_none(paths: RunPaths, chosen: pa.Table) -> None:
    for step in (3, 1):
        assert write_ledger(paths, step, chosen, {})
    (paths.ledger / ".step-000009.arrow.1-2.tmp").touch()
    assert recorded_steps(paths) == [1, 3]
    assert read_ledger(paths, 2) is None


def test_rows_from_which_the_step_could_not_be_repeated_are_refused(paths: RunPaths, chosen: pa.Table) -> None:
    with pytest.raises(DataError, match="without checksum"):
        write_ledger(paths, 1, chosen.drop_columns(["checksum"]), {})


def test_a_damaged_record_is_an_error_and_never_an_unused_row(paths: RunPaths, chosen: pa.Table) -> None:
    write_ledger(paths, 1, chosen, {})
    path = ledger_path(paths, 1)
    flip(path)
    with pytest.raises(DataError, match="step-000001"):
        read_ledger(paths, 1)
    index = Index(paths)
    for _ in range(2):  # not only once: a second look must not take the rows for unused
        with pytest.raises(DataError, match="step-000001"):
            index.refresh()


def test_a_ledger_or_an_update_log_under_another_name_is_refused(paths: RunPaths, chosen: pa.Table) -> None:
    write_ledger(paths, 40, chosen, {})
    shutil.copyfile(ledger_path(paths, 40), ledger_path(paths, 41))
    for read in (lambda: read_ledger(paths, 41), Index(paths).refresh, lambda: retention_facts(paths, ())):
        with pytest.raises(DataError, match=r"step-000041.arrow records step 40, which"):
            read()
    log = UpdateLog(updates=[], device="cpu", threads=1, torch="2")
    write_update_log(paths, 40, log)
    assert read_update_log(paths, 40) == log
    shutil.copyfile(update_log_path(paths, 40), update_log_path(paths, 41))
    with pytest.raises(DataError, match="is the log of step 40: it"):
        read_update_log(paths, 41)


def test_probes_are_no_decisions_of_the_run_but_their_rejected_orders_count(paths, rows, rng):
    for producer, forks in (("local", 3), ("probe", 2)):
        played = [
            rows.make_decision(rng, producer, start_group=0, fork=fork, phase_index=0, phase="S1901M", orders_rejected=1)
            for fork in range(forks)
        ]
        phases = [rows.make_phase(start_group=0, fork=fork, phase_index=0, phase="S1901M") for fork in range(forks)]
        publish_shard(paths, producer, 0, played, phases, {}, next_start_group=1)
    assert (count_run(paths).decisions, count_run(paths).orders_rejected) == (3, 5)
