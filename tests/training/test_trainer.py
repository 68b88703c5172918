"""The trainer learns what it should, refuses what it must, and repeats itself bitwise."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import training.layout
import training.trainer
from storage.adapters import read_adapter
from storage.index import Index, open_index
from storage.ledger import ledger_path, read_ledger, recorded_steps
from storage.ledger_copies import checkpoint_steps, restore_ledgers
from storage.runs import RunPaths
from storage.settings import StorageSettings
from telemetry.errors import InputError, TrainingError
from tests.damage import flip
from training.advantages import leave_one_out
from training.branching import branching_tokens
from training.padded_rows import pad, padded_micro_batches
from training.policy import Policy
from training.settings import TrainingSettings
from training.trainer import Trainer
from training.update import Updater

SETTINGS = TrainingSettings(learning_rate=1e-2, lora_rank=8, lora_alpha=16)


@pytest.fixture(scope="module")
def played(exact_run, tmp_path_factory) -> RunPaths:
    """One run with rows, played once; tests copy it."""
    return exact_run(tmp_path_factory.mktemp("played") / "run", groups=4, forks=4)


@pytest.fixture
def paths(played: RunPaths, tmp_path: Path) -> RunPaths:
    shutil.copytree(played.root, tmp_path / "copy")
    return RunPaths(tmp_path / "copy")


def trainer_for(paths: RunPaths, model: Path, settings: TrainingSettings = SETTINGS) -> Trainer:
    return Trainer(paths, Policy(model, settings), settings, StorageSettings())


def whole_batch(paths: RunPaths):
    index = open_index(paths)
    return index.gather(index.fresh_rows(policy_version=0, limit=10_000))


def chosen_logprobs(policy: Policy, batch) -> np.ndarray:
    """Sum over branching tokens of each row's masked logprobs."""
    sums = np.zeros(len(batch.prompt_lens))
    with torch.no_grad():
        for rows in padded_micro_batches(batch, range(len(batch.prompt_lens)), 8):
            np.add.at(sums, rows.batch_row, policy.masked_logprobs(rows).chosen.numpy())
    return sums


def test_at_lag_zero_trainer_and_sampler_agree(paths, model):
    trainer = trainer_for(paths, model)
    found = trainer.measure_mismatch()
    assert trainer._updater.layout.packed, trainer._updater.layout.fallback
    assert found.tokens > 100 and found.largest < 1e-4


@pytest.mark.parametrize("lie", [{"temperature": 0.7}, {"forget_mask": True}], ids=["another temperature", "no mask"])
def test_rows_drawn_under_another_mask_or_temperature_stop_the_run(run_with_rows, exact_engine, model, lie):
    trainer = trainer_for(run_with_rows(exact_engine(**lie), groups=1, forks=2), model)
    with pytest.raises(TrainingError, match=r"disagree on version 0.*does not start"):
        trainer.measure_mismatch()


def test_a_row_with_one_legal_id_too_few_stops_the_run(run_with_rows, exact_engine, model, monkeypatch):
    """The trainer's legal sets come from the rows: an altered set is another distribution."""
    from rollouts import fork

    decide = fork._draw_decisions

    async def narrowed(*arguments):
        answers = await decide(*arguments)
        for power, answer in answers.items():
            ids, offsets = answer.legal_ids, answer.legal_offsets
            widest = int(np.argmax(np.diff(offsets)))
            drawn = answer.generation.token_ids[widest]
            place = next(at for at in range(offsets[widest], offsets[widest + 1]) if ids[at] != drawn)
            cut = offsets.copy()
            cut[widest + 1 :] -= 1
            answers[power] = replace(answer, legal_ids=np.delete(ids, place), legal_offsets=cut)
        return answers

    monkeypatch.setattr(fork, "_draw_decisions", narrowed)
    with pytest.raises(TrainingError, match="disagree"):
        trainer_for(run_with_rows(exact_engine(), groups=1, forks=2), model).measure_mismatch()


def test_a_step_makes_better_decisions_likelier_and_worse_ones_rarer(paths, model):
    batch = whole_batch(paths)
    policy = Policy(model, SETTINGS)
    before = chosen_logprobs(policy, batch)
    Trainer(paths, policy, SETTINGS, StorageSettings()).step(1, 4)
    moved = chosen_logprobs(policy, batch) - before
    ledger = read_ledger(paths, 1)
    assert ledger is not None
    used = dict(zip(ledger["decision_id"].to_pylist(), ledger["return"].to_pylist(), strict=True))
    groups = dict(zip(ledger["decision_id"].to_pylist(), ledger["advantage_group"].to_pylist(), strict=True))
    at = [index for index, decision in enumerate(batch.decision_ids.tolist()) if decision in used]
    returns = np.array([used[batch.decision_ids[index]] for index in at])
    advantages = leave_one_out(returns, np.array([groups[batch.decision_ids[index]] for index in at]))
    assert np.corrcoef(advantages, moved[at])[0, 1] > 0.3


def test_a_step_packs_and_says_how_much_it_saved(paths, model):
    metrics = trainer_for(paths, model).step(1, 4).metrics
    assert metrics["train/packed"] == 1.0 and metrics["train/refused_rows"] == 0.0
    assert metrics["train/branching_tokens"] < metrics["train/unique_tokens"] < metrics["train/tokens"] / 2
    assert 0 < metrics["train/plan_s"] < metrics["train/update_s"]


def test_a_step_whose_packed_path_fails_its_check_is_padded_and_says_so(paths, model, monkeypatch):
    impossible = training.layout.LayoutTolerance(loss=-1.0, gradient=0.0)
    monkeypatch.setattr(training.layout, "TOLERANCES", {("cpu", "float32"): impossible})
    trainer = trainer_for(paths, model)
    metrics = trainer.step(1, 4).metrics
    assert metrics["train/packed"] == 0.0 and metrics["train/unique_tokens"] == metrics["train/tokens"]
    assert "rows are padded, several times slower than packed" in trainer._updater.layout.fallback


def test_a_row_at_fault_is_counted_and_the_step_goes_on_without_its_group(paths, model, monkeypatch):

    honest, seen = Index.gather, []

    def damaged(self, rows):
        batch = honest(self, rows)
        logprobs = batch.behaviour_logprobs.copy()
        logprobs[batch.completion_offsets[1]] = float("nan")
        return replace(batch, behaviour_logprobs=logprobs)

    accumulate = Updater.accumulate
    monkeypatch.setattr(Updater, "accumulate", lambda self, batch, *rest: seen.append(batch) or accumulate(self, batch, *rest))
    monkeypatch.setattr(Index, "gather", damaged)
    metrics = trainer_for(paths, model).step(1, 4).metrics
    ledger = read_ledger(paths, 1)
    assert ledger is not None and metrics["train/refused_rows"] == 1.0 and metrics["train/skipped"] == 0.0
    groups, decisions = ledger["advantage_group"].to_pylist(), ledger["decision_id"].to_pylist()
    left = {decision for decision, group in zip(decisions, groups, strict=True) if group != groups[1]}
    assert set(seen[0].decision_ids.tolist()) == left and len(left) < len(decisions)


def test_the_ledger_is_written_before_the_forward(paths, model, monkeypatch):
    trainer = trainer_for(paths, model)

    def broken(self: Policy, rows: object, reference: object = None) -> None:
        raise RuntimeError("power cut")

    monkeypatch.setattr(Policy, "masked_logprobs", broken)
    with pytest.raises(RuntimeError, match="power cut"):
        trainer.step(1, 4)
    assert recorded_steps(paths) == [1] and checkpoint_steps(paths) == []


def test_a_second_trainer_on_the_run_is_fenced_by_the_ledger(paths, model):
    first, second = trainer_for(paths, model), trainer_for(paths, model)
    first.step(1, 4)
    with pytest.raises(TrainingError, match="another trainer already holds step 1"):
        second.step(1, 4)


def test_no_decision_is_trained_twice_and_a_step_without_rows_publishes_unchanged_weights(paths, model):
    trainer = trainer_for(paths, model)
    first, second = trainer.step(1, 4), trainer.step(2, 4)
    one, two = read_ledger(paths, 1), read_ledger(paths, 2)
    assert one is not None and two is not None
    assert one.num_rows > 10 and not set(one["decision_id"].to_pylist()) & set(two["decision_id"].to_pylist())
    assert two.num_rows == 0 and second.metrics["train/skipped"] == 1.0
    assert second.published.version == 2 and second.published.adapter_hash == first.published.adapter_hash
    assert read_adapter(paths, 2).folder.name == "v000002"


def test_resume_is_bitwise(played, model, tmp_path):
    """Two steps in one go, against one step, a fresh process' worth of state, and the second step."""
    hashes = []
    for resumed in (False, True):
        shutil.copytree(played.root, tmp_path / str(resumed))
        paths = RunPaths(tmp_path / str(resumed))
        trainer = trainer_for(paths, model)
        trainer.step(1, 2)
        if resumed:
            torch.manual_seed(999)
            trainer = trainer_for(paths, model)
            assert trainer.step_done == 1
        hashes.append([trainer.step(2, 2).published.adapter_hash, read_adapter(paths, 1).adapter_hash])
    assert hashes[0] == hashes[1] and len(set(hashes[0])) == 2


def run_files(paths: RunPaths) -> dict[str, bytes]:
    """What a run's steps left that must last: ledgers and published weights, byte by byte."""
    files = [*paths.ledger.rglob("step-*"), *paths.adapters.rglob("v*/adapter_model.safetensors")]
    return {str(file.relative_to(paths.root)): file.read_bytes() for file in files}


class Killed(BaseException):
    """Stands for the moment of a kill: nothing catches it."""


@pytest.fixture(scope="module")
def undisturbed(played: RunPaths, model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[RunPaths, dict[str, bytes]]:
    """The run as it stands after its first step, and the files of one that nobody killed after its third."""
    folder = tmp_path_factory.mktemp("undisturbed")
    paths = RunPaths(folder / "whole")
    shutil.copytree(played.root, paths.root)
    trainer = trainer_for(paths, model)
    trainer.step(1, 2)
    shutil.copytree(paths.root, folder / "first")
    trainer.step(2, 1)
    trainer.step(3, 1)
    return RunPaths(folder / "first"), run_files(paths)


@pytest.mark.system
@pytest.mark.parametrize(
    ("when", "moment"),
    [
        ("before", "write_ledger"),
        ("before", "save_checkpoint"),
        ("after", "save_checkpoint"),
        ("after", "publish_adapter"),
        ("after", "write_outcome"),
    ],
)
def test_a_step_that_a_kill_cut_anywhere_is_done_once_and_ends_as_if_nothing_had_happened(
    undisturbed, model, tmp_path, monkeypatch, when: str, moment: str
):
    """Between any two of the writes of a step, which come in this order."""
    first, expected = undisturbed
    paths = RunPaths(tmp_path / "killed")
    shutil.copytree(first.root, paths.root)
    honest = getattr(training.trainer, moment)

    def cut(*arguments):
        if when == "after":
            honest(*arguments)
        raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(training.trainer, moment, cut)
        trainer_for(paths, model).step(2, 1)
    trainer = trainer_for(paths, model)
    if trainer.step_done == 1:
        trainer.step(2, 1)
    assert trainer.step_done == 2 and trainer.published == read_adapter(paths, 2)
    trainer.step(3, 1)
    used = [row for step in recorded_steps(paths) for row in read_ledger(paths, step)["decision_id"].to_pylist()]
    assert len(used) == len(set(used)) and recorded_steps(paths) == [1, 2, 3]
    assert run_files(paths) == expected


def test_a_recorded_step_uses_its_recorded_rows_even_where_a_choice_would_now_be_another(played, model, tmp_path, monkeypatch):
    """Rows that come in after the ledger was written are fresher, and must not enter the repeated step."""
    shutil.copytree(played.root, tmp_path / "run")
    paths = RunPaths(tmp_path / "run")
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(training.trainer, "save_checkpoint", lambda *_: (_ for _ in ()).throw(Killed))
        trainer_for(paths, model).step(1, 1)
    recorded = read_ledger(paths, 1)
    assert recorded is not None
    trainer = trainer_for(paths, model)
    report = trainer.step(1, 4)
    assert report.metrics["train/decisions"] == recorded.num_rows < whole_batch(paths).returns.size
    assert read_ledger(paths, 1).equals(recorded)


def test_a_damaged_checkpoint_is_set_aside_and_its_step_repeated_from_its_ledger(paths, model):
    trainer = trainer_for(paths, model)
    trainer.step(1, 2)
    trainer.step(2, 1)
    before = run_files(paths)
    flip(paths.checkpoint(2) / "trainer.safetensors")
    again = trainer_for(paths, model)
    assert again.step_done == 1 and "trainer.safetensors' is missing, truncated or altered" in again.set_aside[0]
    again.step(2, 1)
    assert run_files(paths) == before
    assert [path.name.split("-")[0] for path in paths.checkpoints.glob(".step*")] == [".step_000002.damaged"]


def test_an_adapter_that_is_damaged_or_gone_is_published_again_from_the_checkpoint(paths, model):
    before = trainer_for(paths, model).step(1, 4).published
    flip(before.folder / "adapter_model.safetensors")
    assert trainer_for(paths, model).published == before == read_adapter(paths, 1)
    shutil.rmtree(before.folder)
    assert trainer_for(paths, model).published == before == read_adapter(paths, 1)


def test_a_run_does_not_go_on_under_other_training_settings_but_may_have_other_threads(paths, model):
    trainer_for(paths, model).step(1, 4)
    with pytest.raises(InputError, match="made under other training settings"):
        trainer_for(paths, model, SETTINGS.model_copy(update={"learning_rate": 2e-2}))
    assert trainer_for(paths, model, SETTINGS.model_copy(update={"threads": 1})).step_done == 1


def test_values_that_are_not_finite_leave_the_weights_alone_and_three_in_a_row_stop(paths, model, monkeypatch):
    trainer = trainer_for(paths, model)
    before = [parameter.detach().clone() for parameter in trainer._policy.parameters()]
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", lambda *_: torch.tensor(float("nan")))
    trainer._index.refresh()
    batch = whole_batch(paths)
    groups = np.repeat(np.arange(len(batch.returns) // 2 + 1), 2)[: len(batch.returns)].astype(np.int32)
    groups[-1] = groups[-2]
    batch = type(batch)(**{name: getattr(batch, name) for name in batch.__slots__} | {"advantage_groups": groups})
    for _ in range(2):
        assert [update.skipped for update in trainer._updater.updates(batch)] == [True]
    assert all(torch.equal(old, new) for old, new in zip(before, trainer._policy.parameters(), strict=True))
    with pytest.raises(TrainingError, match="3 updates in a row"):
        list(trainer._updater.updates(batch))


def test_old_checkpoints_go_when_newer_ones_are_whole(paths, model, monkeypatch):
    monkeypatch.setattr("training.trainer.KEEP_CHECKPOINTS", 2)
    trainer = trainer_for(paths, model)
    for step in range(1, 5):
        trainer.step(step, 1)
    assert checkpoint_steps(paths) == [3, 4]


def test_padding_lists_each_branching_token_with_its_own_legal_set(paths):
    batch = whole_batch(paths)
    rows = pad(batch, range(len(batch.prompt_lens)))
    assert (
        len(rows.token_row)
        == branching_tokens(batch, range(len(batch.prompt_lens)))
        == int((np.diff(batch.legal_offsets) > 1).sum())
    )
    expected = []
    for row in range(len(batch.prompt_lens)):
        ids = batch.input_ids[batch.input_offsets[row] : batch.input_offsets[row + 1]]
        for place, position in enumerate(range(batch.completion_offsets[row], batch.completion_offsets[row + 1])):
            legal = batch.legal_ids[batch.legal_offsets[position] : batch.legal_offsets[position + 1]].tolist()
            if len(legal) > 1:
                expected.append(
                    (
                        row,
                        int(batch.prompt_lens[row]) + place - 1,
                        legal,
                        int(ids[batch.prompt_lens[row] + place]),
                    )
                )
    for index, (row, position, legal, drawn) in enumerate(expected):
        assert (rows.token_row[index], rows.token_position[index]) == (row, position)
        assert rows.legal_ids[index][rows.legal_mask[index]].tolist() == legal
        assert rows.legal_ids[index][rows.chosen[index]] == drawn


def test_a_step_of_several_updates_uses_every_decision_once_and_leaves_the_sampler_behind(paths, model, monkeypatch):
    """Each update takes its own advantage groups; from the second on, the ratio is no longer 1."""
    seen: list[list[int]] = []
    whole = Updater.accumulate
    monkeypatch.setattr(Updater, "accumulate", lambda self, batch, rows, *of: seen.append(rows) or whole(self, batch, rows, *of))
    several = trainer_for(paths, model, SETTINGS.model_copy(update={"updates_per_step": 3})).step(1, 4)
    ledger = read_ledger(paths, 1)
    assert ledger is not None and sorted(row for share in seen for row in share) == list(range(ledger.num_rows))
    groups = ledger["advantage_group"].to_pylist()
    assert len(seen) == 3 and not any(
        {groups[r] for r in one} & {groups[r] for r in other} for one in seen for other in seen if one is not other
    )
    assert several.metrics["train/ratio_off_max"] > 1e-3


def test_a_scheduled_run_takes_each_step_at_its_rate_and_resumes_bitwise(played, model, tmp_path):
    settings = SETTINGS.model_copy(update={"rate_schedule": "linear", "warm_up_steps": 1, "decay_steps": 3, "kl_weight": 0.1})
    hashes = []
    for resumed in (False, True):
        shutil.copytree(played.root, tmp_path / str(resumed))
        paths = RunPaths(tmp_path / str(resumed))
        trainer = trainer_for(paths, model, settings)
        first = trainer.step(1, 2)
        if resumed:
            trainer = trainer_for(paths, model, settings)
        second = trainer.step(2, 2)
        assert (first.metrics["train/learning_rate"], second.metrics["train/learning_rate"]) == (1e-2, 0.75e-2)
        assert trainer._updater.optimiser.param_groups[0]["lr"] == 0.75e-2
        hashes.append(second.published.adapter_hash)
    assert hashes[0] == hashes[1]
    shutil.copytree(played.root, tmp_path / "constant")
    constant = trainer_for(RunPaths(tmp_path / "constant"), model, settings.model_copy(update={"rate_schedule": "constant"}))
    constant.step(1, 2)
    assert constant.step(2, 2).published.adapter_hash != hashes[0]


def test_a_step_writes_an_index_snapshot_when_one_is_due(paths, model, monkeypatch: pytest.MonkeyPatch):
    """From where the next trainer, and whoever asks of the run, opens without reading every shard."""
    Trainer(paths, Policy(model, SETTINGS), SETTINGS, StorageSettings()).step(1, 4)
    assert list(paths.index.glob("*")) == []
    monkeypatch.setattr("training.trainer.SNAPSHOT_EVERY_SHARDS", 1)
    Trainer(paths, Policy(model, SETTINGS), SETTINGS, StorageSettings()).step(2, 4)
    assert [path.name for path in paths.index.glob("snap-000001.parquet")] == ["snap-000001.parquet"]
    index = open_index(paths)
    assert index.totals().decisions == len(whole_batch(paths).decision_ids) and index.refused == []


def test_a_step_chooses_again_where_a_chosen_shard_is_damaged_and_the_run_goes_on(paths, model, tmp_path):
    """One bit, flipped below the mapping after the shard was taken in."""
    from records.rows import Decision, Ply
    from storage.shards import open_plies, open_shard, publish_shard

    source, split = paths.shards / "local" / "000000.arrow", RunPaths(tmp_path / "split").create()
    decisions, plies = open_shard(source).to_pylist(), open_plies(source).to_pylist()
    for first in (0, 2):
        mine = range(first, first + 2)
        publish_shard(
            split,
            "local",
            first,
            [Decision(**row) for row in decisions if row["start_group"] in mine],
            [Ply(**row) for row in plies if row["start_group"] in mine],
            {},
            next_start_group=first + 2,
        )
    trainer = trainer_for(split, model)
    assert trainer.totals().decisions == len(decisions)
    damaged = split.shards / "local" / "000002.arrow"
    content = damaged.read_bytes()
    with damaged.open("r+b", buffering=0) as file:
        file.seek(content.index(np.asarray(open_shard(damaged)["input_ids"].chunk(0).values).tobytes()) + 4)
        file.write(bytes([content[file.tell()] ^ 1]))
    report = trainer.step(1, 4)
    ledger = read_ledger(split, 1)
    assert ledger is not None and set(ledger["shard"].to_pylist()) == {"local/000000.arrow"}
    assert report.metrics["train/refused_shards"] == 1
    trainer.step(2, 4)
    assert recorded_steps(split) == [1, 2]


def test_a_checkpoint_has_the_ledgers_whose_rows_may_be_drawn_again(paths, model):
    trainer_for(paths, model).step(1, 2)
    trained = ledger_path(paths, 1)
    before = trained.read_bytes()
    trained.unlink()
    assert len(restore_ledgers(paths, StorageSettings())) == 1 and trained.read_bytes() == before
    assert trainer_for(paths, model).resume_point().last.published.version == 1
