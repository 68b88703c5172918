"""The loss lab: figures against the trainer's own and against loops, and a run that stays as it was."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from storage.index import open_index
from storage.ledger import MAIN, read_ledger
from storage.outcome import read_outcome
from storage.runs import RunPaths
from storage.settings import StorageSettings
from telemetry.errors import DataError, InputError
from training.lab import Comparison, compare, variants
from training.losses.choose import LOSSES
from training.policy import Policy
from training.settings import TrainingSettings
from training.trainer import Trainer
from training.update import Updater

SETTINGS = TrainingSettings(learning_rate=1e-2, lora_rank=4, lora_alpha=8, device="cpu")
STEPS = 2


@pytest.fixture(scope="module")
def made(exact_run, model, tmp_path_factory) -> RunPaths:
    """A run of two steps; tests that alter it copy it."""
    paths = exact_run(tmp_path_factory.mktemp("lab") / "run", groups=3, forks=4)
    trainer = Trainer(paths, Policy(model, SETTINGS), SETTINGS, StorageSettings())
    for step in range(1, STEPS + 1):
        trainer.step(step, 1)
    return paths


@pytest.fixture(scope="module")
def found(made, model) -> Comparison:
    return compare(made, model, SETTINGS, StorageSettings(), steps=9, caps=[1.0, 2.0])


def test_every_loss_and_cap_is_tried_on_every_recorded_step(found):
    assert found.version == STEPS and found.steps == (2, 1) and min(found.branching_tokens) > 10
    assert list(found.tried) == [
        "clipped",
        "cispo",
        "dppo",
        "gspo",
        "sequence_mean",
        "unclipped",
        "truncated at 1",
        "truncated at 2",
    ]
    assert all(len(tried) == len(found.steps) for tried in found.tried.values())
    assert found.lags == (STEPS, STEPS), "all rows are of version 0"


def test_its_figures_are_what_the_trainer_would_have_made_of_the_rows(made, model, found):
    """Loss, gradient norm and the share of masked tokens, by the code that trains, from the same checkpoint."""
    for name in LOSSES:
        settings = SETTINGS.model_copy(update={"loss": name})
        trainer = Trainer(made, Policy(model, SETTINGS), SETTINGS, StorageSettings())
        updater = Updater(trainer._updater.policy, settings)
        for place, step in enumerate(found.steps):
            rows = read_ledger(made, MAIN, step)
            index = open_index(made)
            batch = index.gather(rows)
            update = updater.accumulate(batch, range(rows.num_rows), advantages(batch))
            tried, gauges = found.tried[name][place], update.gauges
            norm = torch.cat([weight.grad.flatten() for weight in updater.policy.parameters()]).norm()
            assert tried.loss == pytest.approx(sum(update.losses), abs=1e-6)
            assert tried.gradient_norm == pytest.approx(float(norm), rel=1e-4)
            taught = advantages(batch)[gauges.batch_row] != 0
            bounded = gauges.clipped_low | gauges.clipped_high | gauges.left_out
            assert tried.masked_share == pytest.approx(float(bounded[taught].mean()), abs=1e-9)


def advantages(batch) -> np.ndarray:
    from training.advantages import leave_one_out

    return leave_one_out(batch.returns, batch.advantage_groups).astype(np.float32)


def test_a_gradient_points_where_it_points(found):
    names = list(found.tried)
    for one in names:
        assert found.cosines[one][one] == pytest.approx(1, abs=1e-5)
        assert all(found.cosines[one][other] == pytest.approx(found.cosines[other][one], abs=1e-6) for other in names)
        assert all(-1.00001 <= found.cosines[one][other] <= 1.00001 for other in names)
    assert found.cosines["clipped"]["unclipped"] > 0.5


def test_without_bounds_nothing_is_masked_and_a_lower_cap_evens_the_weights_out(found):
    for step in range(len(found.steps)):
        assert found.tried["unclipped"][step].masked_share == 0
        shares = [found.tried[name][step].effective_sample_share for name in ("truncated at 1", "truncated at 2", "unclipped")]
        assert 1 >= shares[0] >= shares[1] >= shares[2] - 1e-6 > 0


def test_the_run_s_own_loss_comes_first():
    tried = variants(SETTINGS.model_copy(update={"loss": "gspo", "importance_cap": 2.0}), [3.0])
    assert [variant.name for variant in tried][:3] == ["gspo", "cispo", "clipped"]
    assert [variant.settings.importance_cap for variant in tried] == [0.0] * 6 + [3.0]


def test_the_run_is_not_changed(made, model):
    before = {str(file): (file.read_bytes(), file.stat().st_mtime_ns) for file in made.root.rglob("*") if file.is_file()}
    compare(made, model, SETTINGS, StorageSettings(), steps=1, caps=[])
    assert {str(file): (file.read_bytes(), file.stat().st_mtime_ns) for file in made.root.rglob("*") if file.is_file()} == before


def test_its_newest_whole_checkpoint_is_taken_and_without_one_it_says_so(made, model, tmp_path):
    paths = RunPaths(shutil.copytree(made.root, tmp_path / "copy"))
    (paths.checkpoint(2) / "trainer.safetensors").write_bytes(b"torn")
    older = compare(paths, model, SETTINGS, StorageSettings(), steps=3, caps=[])
    assert older.version == 1 and older.steps == (1,), "step 2 is not yet behind it"
    (paths.checkpoint(1) / "trainer.safetensors").write_bytes(b"torn")
    with pytest.raises(DataError, match="no checkpoint of run 'copy' is whole: resume the run"):
        compare(paths, model, SETTINGS, StorageSettings(), steps=3, caps=[])


def test_a_run_without_a_step_is_refused_in_one_sentence(tmp_path: Path, model):
    with pytest.raises(InputError, match="run 'empty' has no finished step to compare losses on yet"):
        compare(RunPaths(tmp_path / "empty").create(), model, SETTINGS, StorageSettings(), steps=1, caps=[])


def test_what_the_trainer_recorded_at_lag_zero_is_found_again(made, model, tmp_path):
    """At the version that a step was trained from, the run's own loss has the value and norm of its record."""
    paths = RunPaths(shutil.copytree(made.root, tmp_path / "copy"))
    shutil.rmtree(paths.checkpoint(2))
    recorded = read_outcome(paths, MAIN, 2)
    assert recorded is not None
    updater = Updater(Policy(model, SETTINGS), SETTINGS)
    from training.lab import _evaluate, _load_newest_checkpoint

    assert _load_newest_checkpoint(paths, updater).step == 1
    index = open_index(paths)
    rows = read_ledger(paths, MAIN, 2)
    figures, _ = _evaluate(updater, index.gather(rows), rows["power"].to_pylist(), variants(SETTINGS, []))
    assert figures["clipped"].loss == pytest.approx(recorded.loss, abs=1e-6)
    assert figures["clipped"].gradient_norm == pytest.approx(recorded.gradient_norm, rel=1e-4)
