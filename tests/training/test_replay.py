"""A past step comes out again bitwise, the run stays as it is, and whatever does not fit is named."""

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from entente.telemetry.errors import DataError, InputError
from entente.training.policy import Policy
from entente.training.replay import EXACT, TOLERANCES, Replay, replay_step
from entente.training.settings import TrainingSettings
from entente.training.trainer import Trainer
from storage.adapters import read_adapter
from storage.ledger import ledger_path
from storage.runs import RunPaths, checkpoint_steps
from storage.settings import StorageSettings
from storage.update_log import UpdateLog, read_update_log, update_log_path
from tests.damage import flip
from tests.training.whole_step import whole_step

SETTINGS = TrainingSettings(learning_rate=1e-2, lora_rank=4, lora_alpha=8, updates_per_step=2, token_budget=150, device="cpu")
STEPS = 3


@pytest.fixture(scope="module")
def made(exact_run, model, tmp_path_factory) -> tuple[RunPaths, list[dict[str, float]]]:
    """A run of three steps of which two checkpoints are kept, and what its steps reported; tests copy it."""
    paths = exact_run(tmp_path_factory.mktemp("made") / "run", groups=4, forks=4)
    trainer = Trainer(paths, Policy(model, SETTINGS), SETTINGS, StorageSettings(max_policy_lag=STEPS))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("entente.training.trainer.KEEP_CHECKPOINTS", 2)
        reported = [whole_step(trainer, step, 1).metrics for step in range(1, STEPS + 1)]
    assert checkpoint_steps(paths) == [2, 3] and all(metrics["train/loss"] for metrics in reported)
    return paths, reported


@pytest.fixture
def paths(made, tmp_path: Path) -> RunPaths:
    return RunPaths(shutil.copytree(made[0].root, tmp_path / "copy"))


@pytest.fixture
def again(model: Path) -> Callable[..., Replay]:
    """Replay a step, under the run's settings or others."""

    def run(paths: RunPaths, step: int, training: TrainingSettings = SETTINGS, **storage) -> Replay:
        return replay_step(paths, step, model, training, StorageSettings(max_policy_lag=STEPS, **storage))

    return run


def contents(folder: Path) -> dict[str, tuple[bytes, int]]:
    """All files, byte by byte, and when they were written; hidden ones too."""
    return {str(file): (file.read_bytes(), file.stat().st_mtime_ns) for file in folder.rglob("*") if file.is_file()}


def alter(paths: RunPaths, step: int, change: Callable[[dict], object]) -> UpdateLog:
    """Write another update_log of a step over its own; what is then recorded."""
    recorded = read_update_log(paths, step)
    assert recorded is not None
    stored = {"step": step, **asdict(recorded)}
    change(stored)
    update_log_path(paths, step).write_text(json.dumps(stored))
    return read_update_log(paths, step) or recorded


def nudge(paths: RunPaths, version: int, by: float) -> None:
    """Give a published version other weights, with a manifest that fits them."""
    folder = paths.adapter(version)
    file = folder / "adapter_model.safetensors"
    save_file({name: weights + by for name, weights in load_file(file).items()}, file)
    manifest = json.loads((folder / "manifest.json").read_bytes())
    for name, stated in manifest["files"].items():
        stated["sha256"] = hashlib.sha256((folder / name).read_bytes()).hexdigest()
        stated["bytes"] = (folder / name).stat().st_size
    digests = "".join(manifest["files"][name]["sha256"] for name in ("adapter_config.json", "adapter_model.safetensors"))
    manifest["adapter_hash"] = hashlib.sha256(digests.encode()).hexdigest()[:32]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    assert read_adapter(paths, version).adapter_hash == manifest["adapter_hash"]


@pytest.mark.parametrize(("step", "start"), [(1, 0), (3, 2)])
def test_a_step_comes_out_again_bitwise_and_nothing_in_the_run_changes(made, again, step: int, start: int):
    paths, reported = made
    before = contents(paths.root)
    torch.manual_seed(999)
    found = again(paths, step)
    assert (found.start, found.difference, found.tolerance) == (start, None, EXACT)
    assert found.replayed is not None and found.replayed == found.recorded
    assert found.replayed.adapter_hash == read_adapter(paths, step).adapter_hash
    assert found.replayed.loss == reported[step - 1]["train/loss"]
    assert found.replayed.grad_norm == reported[step - 1]["train/grad_norm"]
    assert contents(paths.root) == before


def test_each_micro_batch_is_recorded_and_together_they_are_the_loss(made):
    recorded = read_update_log(made[0], 1)
    assert recorded is not None and max(len(update.micro_batches) for update in recorded.updates) > 1
    assert all(update.loss == pytest.approx(sum(update.micro_batches)) for update in recorded.updates)


def test_a_damaged_checkpoint_is_passed_over_named_and_left_where_it_is(paths, again, said):
    torn = paths.checkpoint(2) / "trainer.safetensors"
    torn.write_bytes(b"torn")
    shutil.rmtree(paths.adapters)
    before = sorted(paths.checkpoints.iterdir())
    found = again(paths, 3)
    assert (found.start, found.difference) == (0, None)
    assert sorted(paths.checkpoints.iterdir()) == before and any(str(torn) in line for line in said)


def test_the_first_micro_batch_that_differs_is_named(paths, again):
    def change(stored: dict) -> None:
        stored["updates"][1]["micro_batches"][-1] += 1e-9

    recorded = alter(paths, 1, change)
    found = again(paths, 1)
    last = len(recorded.updates[1].micro_batches)
    assert found.difference is not None
    assert (found.difference.step, found.difference.update, found.difference.micro_batch) == (1, 2, last)
    assert found.difference.sentence.startswith(f"micro-batch {last} of update 2 of step 1 differs: the loss was recorded as ")


@pytest.mark.parametrize(
    ("change", "what", "update"),
    [
        pytest.param(lambda stored: stored["updates"][0].update(grad_norm=1.0), "the gradient norm", 1, id="norm"),
        pytest.param(lambda stored: stored["updates"][1].update(loss=0.5), "the loss", 2, id="sum of losses"),
        pytest.param(lambda stored: stored["updates"].pop(), "the number of updates", None, id="updates"),
        pytest.param(lambda stored: stored["updates"][0]["micro_batches"].pop(), "the number of micro-batches", 1, id="batches"),
        pytest.param(lambda stored: stored.update(adapter_hash="0" * 32), "the hash of the adapter", None, id="hash"),
    ],
)
def test_whatever_else_differs_is_named(paths, again, change, what: str, update: int | None):
    alter(paths, 1, change)
    difference = again(paths, 1).difference
    assert difference is not None and (difference.what, difference.update) == (what, update)


def test_published_weights_that_are_not_those_of_the_step_are_found(paths, again):
    nudge(paths, 3, 1e-7)
    difference = again(paths, 3).difference
    assert difference is not None and difference.what == "the hash of the published adapter"
    assert difference.recorded == read_adapter(paths, 3).adapter_hash
    (paths.adapter(3) / "adapter_model.safetensors").write_bytes(b"torn")
    with pytest.raises(DataError, match="does not match its manifest"):
        again(paths, 3)


def test_where_an_earlier_step_parts_it_is_named_and_the_step_is_not_repeated(paths, again):
    shutil.rmtree(paths.checkpoints)

    def change(stored: dict) -> None:
        stored["updates"][0]["micro_batches"][0] += 1.0

    alter(paths, 2, change)
    found = again(paths, 3)
    assert found.difference is not None and (found.difference.step, found.difference.micro_batch) == (2, 1)
    assert found.replayed is None


def test_returns_that_do_not_follow_from_the_blend_are_found(paths, again):
    found = again(paths, 1, reward_weights={"centres_gained": 2.0})
    assert found.difference is not None and found.replayed == found.recorded, "the ledger's returns were trained on"
    assert "the return of decision" in found.difference.sentence
    assert found.difference.replayed == 2 * float(found.difference.recorded)


def test_it_computes_on_the_recorded_number_of_threads_and_gives_them_back(paths, again, monkeypatch):
    threads, seen = [1], []  # torch's own would compute with one thread more, and wait for it
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads[-1])
    step = Trainer.step
    monkeypatch.setattr(Trainer, "step", lambda *words: seen.append(torch.get_num_threads()) or step(*words))
    alter(paths, 1, lambda stored: stored.update(threads=2))
    again(paths, 1)
    assert (seen, threads) == ([2], [1, 2, 1])


def test_each_step_is_repeated_as_it_was_made_where_a_resumed_run_went_on_elsewhere(paths, again, monkeypatch):
    """Step 1 ran on a GPU, step 2 with two threads, step 3 with one on the CPU."""
    shutil.rmtree(paths.checkpoints)
    allowed, threads, seen = TOLERANCES["float32"], [1], []
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads[-1])
    step = Trainer.step
    monkeypatch.setattr(Trainer, "step", lambda *words: seen.append(torch.get_num_threads()) or step(*words))

    def change(stored: dict) -> None:
        stored.update(device="cuda", adapter_hash="0" * 32)
        stored["updates"][0]["micro_batches"][0] += 0.5 * allowed.loss

    alter(paths, 1, change)
    alter(paths, 2, lambda stored: stored.update(threads=2))
    alter(paths, 3, lambda stored: stored.update(threads=1))
    found = again(paths, 3)
    assert (found.difference, found.tolerance) == (None, allowed)
    assert seen[1:] == [2, 1] and threads[-1] == 1


def test_off_the_cpu_small_differences_are_agreement_and_large_ones_are_not(paths, again):
    """The record says that a GPU made the step; rounding is then within the tolerance, other losses are not."""
    allowed = TOLERANCES["float32"]

    def change(stored: dict) -> None:
        stored.update(device="cuda", adapter_hash="0" * 32)
        stored["updates"][0]["micro_batches"][0] += 0.5 * allowed.loss
        stored["updates"][0]["grad_norm"] *= 1 + 0.5 * allowed.grad_norm

    alter(paths, 1, change)
    found = again(paths, 1)
    assert (found.difference, found.tolerance) == (None, allowed)
    alter(paths, 1, lambda stored: stored["updates"][0]["micro_batches"].__setitem__(0, 1.0))
    difference = again(paths, 1).difference
    assert difference is not None and difference.micro_batch == 1


def test_a_step_that_a_gpu_cut_into_more_micro_batches_is_compared_by_its_sums(paths, again):
    """The free memory of a card decides how many tokens a micro-batch holds."""
    alter(paths, 1, lambda stored: stored.update(device="cuda", adapter_hash="0" * 32))
    uncut = SETTINGS.model_copy(update={"token_budget": 0})
    found = again(paths, 1, uncut)
    assert found.replayed is not None and found.replayed.micro_batches != found.recorded.micro_batches
    assert found.difference is None
    alter(paths, 1, lambda stored: stored["updates"][0].update(loss=1.0))
    difference = again(paths, 1, uncut).difference
    assert difference is not None and (difference.what, difference.update) == ("the loss", 1)


@pytest.mark.parametrize(
    ("step", "spoil", "sentence"),
    [
        pytest.param(4, None, "step 4 does not exist: run 'copy' has steps 1 to 3", id="4"),
        pytest.param(
            2, lambda p: ledger_path(p, 2).unlink(), "the ledger of step 2 is missing from '{root}/ledger'", id="ledger"
        ),
        pytest.param(3, lambda p: update_log_path(p, 3).unlink(), "step 3 of run 'copy' is not done yet", id="at work"),
        pytest.param(2, lambda p: update_log_path(p, 2).unlink(), "step 2 of run 'copy' has no update log", id="update_log"),
        pytest.param(
            1,
            lambda p: (p.shards / "local" / "000000.arrow").unlink(),
            "shard '{root}/shards/local/000000.arrow', which step 1 trained on, is missing",
            id="shard",
        ),
    ],
)
def test_what_cannot_be_replayed_is_refused_in_a_sentence(paths, again, step: int, spoil, sentence: str):
    if spoil:
        spoil(paths)
    with pytest.raises(InputError) as refused:
        again(paths, step)
    assert str(refused.value).startswith(sentence.format(root=paths.root))


def test_other_training_settings_than_the_step_s_are_refused(paths, again):
    with pytest.raises(InputError, match=r"step 1 of run 'copy' was made under other training settings"):
        again(paths, 1, SETTINGS.model_copy(update={"clip_low": 0.1}))
    assert again(paths, 1, SETTINGS.model_copy(update={"threads": 1})).difference is None


def test_a_damaged_shard_is_named_where_it_lies(paths, again):
    shard = paths.shards / "local" / "000000.arrow"
    flip(shard)
    with pytest.raises(DataError) as refused:
        again(paths, 1)
    assert str(shard) in str(refused.value) and "entente-replay" not in str(refused.value)


def test_an_update_log_that_was_altered_beyond_reading_is_an_error(paths, again):
    update_log_path(paths, 1).write_text("{}")
    with pytest.raises(DataError, match="is not the log of a step"):
        again(paths, 1)
