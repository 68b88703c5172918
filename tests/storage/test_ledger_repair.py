"""No step of a resumed run trains a second time on the rows of a ledger that was lost or damaged."""

import shutil

import pyarrow as pa
import pytest

from entente.telemetry.errors import DataError
from storage.ledger import ROWS_SCHEMA, check_ledgers, ledger_path, ledgers_to_copy, read_ledger, restore_ledgers, write_ledger
from storage.runs import RunPaths
from storage.settings import StorageSettings
from tests.damage import flip

LAG = StorageSettings(max_policy_lag=2)


@pytest.fixture
def run(paths: RunPaths) -> RunPaths:
    """Six recorded steps; five are trained, and the checkpoints of the last two are kept."""
    rows = pa.table({field.name: pa.array(["1"] * 64).cast(field.type) for field in ROWS_SCHEMA}, ROWS_SCHEMA)
    for step in range(1, 7):
        write_ledger(paths, step, rows, {})
    paths.adapter(5).mkdir(parents=True)
    for step in (4, 5):
        paths.checkpoint(step).mkdir(parents=True)
        (paths.checkpoint(step) / "manifest.json").write_text("{}")
        for ledger in ledgers_to_copy(paths, step, LAG):
            shutil.copyfile(ledger, paths.checkpoint(step) / ledger.name)
    return paths


def lose(run: RunPaths, step: int, how: str) -> None:
    path = ledger_path(run, step)
    flip(path) if how == "damaged" else path.unlink()


@pytest.mark.parametrize("how", ["missing", "damaged"])
@pytest.mark.parametrize("step", [4, 5])
def test_a_ledger_whose_rows_could_be_drawn_again_is_restored_from_a_checkpoint(run: RunPaths, step: int, how: str) -> None:
    before = ledger_path(run, step).read_bytes()
    lose(run, step, how)
    check_ledgers(run, LAG)
    (sentence,) = restore_ledgers(run, LAG)
    assert sentence.startswith(f"restored the ledger of step {step} from checkpoint step_000005") and how in sentence
    assert ledger_path(run, step).read_bytes() == before and restore_ledgers(run, LAG) == []


@pytest.mark.parametrize("how", ["missing", "damaged"])
def test_without_a_copy_it_stops_the_run_as_long_as_its_rows_could_be_drawn(run: RunPaths, how: str) -> None:
    lose(run, 4, how)
    for checkpoint in run.checkpoints.iterdir():
        flip(checkpoint / "step-000004.arrow")
    for act in (check_ledgers, restore_ledgers):
        with pytest.raises(DataError, match=rf"step-000004.arrow is {how}.*--init-from .*:5"):
            act(run, LAG)
    # At version 5 and lag 1 the oldest row that may be drawn is of version 4; step 4 trained on rows of version 3 at most.
    (sentence,) = restore_ledgers(run, StorageSettings(max_policy_lag=1))
    assert "too old for another step" in sentence


@pytest.mark.parametrize("how", ["missing", "damaged"])
def test_one_out_of_reach_is_named_and_one_of_an_untrained_step_is_chosen_again(run: RunPaths, how: str) -> None:
    lose(run, 1, how)
    lose(run, 6, "damaged")
    first, last = restore_ledgers(run, LAG)
    assert "step 1 cannot be replayed" in first and "step 6 selects its rows again" in last
    assert read_ledger(run, 6) is None
