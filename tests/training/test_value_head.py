"""A value head learns what separate prompts would teach it, outlives its process bit for bit, and belongs to one base model."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from decoding.model_files import base_identity
from game.scores import Standing
from game.snapshot import POWERS, centres_in
from inference.settings import InferenceSettings
from inference.value_reader import ValueReader
from records.value_head import AVERAGES, CENTRES_SCALE, HEAD_FILE, base_head, read_head, write_head
from storage.adapters import publish_adapter, read_adapter
from storage.gather import Batch
from storage.index import open_index
from storage.ledger import MAIN, read_ledger
from storage.runs import RunPaths
from storage.settings import StorageSettings
from storage.shards import open_plies
from telemetry.errors import DataError, InputError
from telemetry.metrics import check
from tests.training.batches import three_levels
from training.advantages import advantages_of
from training.padded_rows import pad
from training.policy import Policy
from training.replay import replay_step
from training.results import Accumulated, Gauges
from training.settings import TrainingSettings
from training.step_metrics import explained
from training.trainer import Trainer
from training.trie_plan import plan
from training.update import Updater
from training.value_head import ValueHead, squared_errors

SETTINGS = TrainingSettings(learning_rate=1e-2, lora_rank=4, lora_alpha=8, device="cpu", value_weight=0.5)
STORAGE = StorageSettings(max_policy_lag=3)


@pytest.fixture(scope="module")
def trained(exact_run, model, tmp_path_factory) -> tuple[RunPaths, list[dict[str, float]]]:
    """A run of two steps with a value head, and what its steps reported; tests change copies of it."""
    paths = exact_run(tmp_path_factory.mktemp("trained") / "run", groups=2, forks=3)
    trainer = Trainer(paths, Policy(model, SETTINGS), SETTINGS, STORAGE)
    return paths, [trainer.step(step, 1).metrics for step in (1, 2)]


@pytest.fixture
def paths(trained, tmp_path: Path) -> RunPaths:
    return RunPaths(shutil.copytree(trained[0].root, tmp_path / "copy"))


def with_ends(batch: Batch) -> Batch:
    ends = np.random.default_rng(0).uniform(0, 1, (len(batch.returns), 2)).astype(np.float32)
    return replace(batch, ends=ends)


def stirred(model: Path, settings: TrainingSettings = SETTINGS) -> Policy:
    """A policy whose adapter and head have left their initial weights."""
    policy, dice = Policy(model, settings), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in policy.trained_parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=dice))
    return policy


@pytest.mark.parametrize("layout", ["one micro-batch", "many micro-batches", "padded"])
def test_loss_and_gradient_are_those_of_separate_prompts(model: Path, layout: str):
    """Oracle: each prompt alone through the model, in float64."""
    batch, policy = with_ends(three_levels(3)), stirred(model)
    policy.model.double()
    head, causal, rows = policy.value_head.double(), policy.model.base_model.model, range(len(batch.returns))
    micro_batches: Any = (
        [pad(batch, rows)] if layout == "padded" else plan(batch, rows, 40 if "many" in layout else 4096).micro_batches
    )
    assert len(micro_batches) > 1 or "many" not in layout
    seen = np.concatenate([micro.value_rows for micro in micro_batches])
    found = torch.zeros((), dtype=torch.float64)
    for micro in micro_batches:
        values = policy.masked_logprobs(micro).values
        found = found + squared_errors(values, torch.from_numpy(batch.ends[micro.value_rows]))
    wanted = torch.zeros((), dtype=torch.float64)
    for row in seen:
        first = batch.input_offsets[row]
        prompt = torch.from_numpy(batch.input_ids[first : first + batch.prompt_lens[row]].astype(np.int64))
        state = causal.model(input_ids=prompt[None]).last_hidden_state[:, -1]
        wanted = wanted + (head(state) - torch.from_numpy(batch.ends[row])).square().sum() / 2
    assert len(seen) == len(set(seen.tolist())) > 8 and found.item() == pytest.approx(wanted.item(), abs=1e-6)
    weights = policy.trained_parameters()
    for one, other in zip(*(torch.autograd.grad(loss, weights) for loss in (found, wanted)), strict=True):
        assert torch.allclose(one, other, atol=1e-6)
    assert any(grad.abs().max() > 1e-3 for grad in torch.autograd.grad(causal_loss(policy, batch), policy.parameters()))


def causal_loss(policy: Policy, batch: Batch) -> torch.Tensor:
    """The head's loss alone."""
    (micro,) = plan(batch, range(len(batch.returns)), 4096).micro_batches
    return squared_errors(policy.masked_logprobs(micro).values, torch.from_numpy(batch.ends[micro.value_rows]))


def test_an_update_adds_its_weight_times_the_mean_over_decisions(model: Path):
    batch = three_levels(3)
    losses, rows = {}, range(len(batch.returns))
    for weight, seen in ((0.0, batch), (0.5, with_ends(batch))):
        settings = SETTINGS.model_copy(update={"value_weight": weight, "token_budget": 60})
        updater = Updater(stirred(model, settings), settings)
        advantages, _ = advantages_of(batch.returns, batch.advantage_groups, [""] * len(rows), settings, updater.moving)
        losses[weight] = updater.accumulate(seen, rows, advantages)
    values, ends = losses[0.5].foretold[:, 0], losses[0.5].foretold[:, 1]
    mean = float(np.square(values - ends).sum(dtype=np.float64) / 2 / len(values))
    assert len(losses[0.0].foretold) == 0 and mean > 0.01
    assert sum(losses[0.5].losses) - sum(losses[0.0].losses) == pytest.approx(0.5 * mean, abs=1e-5)


def test_the_head_is_clipped_apart_from_the_adapter(model: Path):
    """A head whose gradient is far too long leaves the adapter's as it is."""
    policy = Policy(model, SETTINGS)
    updater = Updater(policy, SETTINGS)
    for parameters, size in ((policy.parameters(), 1e-3), (policy.head_parameters(), 100.0)):
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, size / parameter.numel())
    updater.optimiser.step = lambda *_, **__: None  # type: ignore[method-assign]
    nothing = Accumulated(
        losses=[0.0], gauges=Gauges.join([]), unique_tokens=0, kl_weight=0.0, plan_s=0, forward_s=0, backward_s=0
    )
    update = updater.apply(nothing)
    assert update.outcome.gradient_norm < 0.01 and policy.parameters()[0].grad.sum().item() == pytest.approx(1e-3, rel=1e-3)
    norm = torch.cat([parameter.grad.flatten() for parameter in policy.head_parameters()]).norm().item()
    assert norm == pytest.approx(SETTINGS.max_gradient_norm, rel=1e-3)
    policy.head_parameters()[0].grad.fill_(float("nan"))
    assert updater.apply(nothing).skipped


def test_an_untrained_head_says_the_average():
    assert torch.allclose(ValueHead(8)(torch.randn(3, 8)), torch.tensor([AVERAGES] * 3))


def test_ends_are_those_of_the_forks_last_positions(trained):
    """Oracle: the last ply of each fork."""
    paths, _ = trained
    index = open_index(paths, ends=True)
    rows = read_ledger(paths, MAIN, 1)
    plies = open_plies(paths.shards / rows["shard"][0].as_py()).to_pylist()
    last = {(ply["start_group"], ply["fork"]): ply["position"] for ply in sorted(plies, key=lambda ply: ply["ply"])}
    wanted = []
    for row in rows.to_pylist():
        end = Standing(centres=centres_in(last[row["start_group"], row["fork"]]))
        wanted.append([end.sos_share(row["power"]), end.centres[POWERS.index(row["power"])] / CENTRES_SCALE])
    ends = index.gather(rows).ends
    assert np.allclose(ends, wanted, atol=1e-6) and ends.std(0).min() > 0
    plain = open_index(paths)
    assert plain.gather(rows).ends is None


def test_what_a_head_explains_is_a_share_of_the_variance():
    ends = np.array([[0.0, 1.0], [1.0, 1.0]], np.float32)
    assert explained(ends, ends)[0] == 1 and np.isnan(explained(ends, ends)[1])
    assert explained(np.full((2, 2), 0.5, np.float32), ends)[0] == 0
    worse, _ = explained(1 - ends, ends)
    assert worse < 0
    check({"train/value_squares_explained": worse, "train/value_centres_explained": worse})  # a metric that may be logged


def test_a_step_reports_its_loss_and_publishes_the_head(trained, model: Path):
    paths, reported = trained
    assert all(metrics["train/value_loss"] > 0 for metrics in reported) and "train/value_squares_explained" in reported[0]
    first, second = (read_head(read_adapter(paths, version).folder / HEAD_FILE, model) for version in (1, 2))
    assert not np.array_equal(first.weight, second.weight)
    assert HEAD_FILE in json.loads((paths.adapter(2) / "manifest.json").read_text())["files"]


def test_a_resumed_trainer_and_a_replay_have_the_same_bits(paths: RunPaths, model: Path):
    assert replay_step(paths, 2, model, SETTINGS, STORAGE).difference is None
    policy = Policy(model, SETTINGS)
    assert Trainer(paths, policy, SETTINGS, STORAGE).step_done == 2
    stored = read_head(paths.adapter(2) / HEAD_FILE, model)
    assert np.array_equal(policy.value_head.weights().weight, stored.weight)


def test_a_head_that_came_out_otherwise_is_a_difference(paths: RunPaths, model: Path):
    folder = paths.adapter(2)
    stored = read_head(folder / HEAD_FILE, model)
    source = shutil.copytree(folder, paths.root / "other")
    write_head(source / HEAD_FILE, replace(stored, bias=stored.bias + 1), base_identity(model))
    with pytest.raises(DataError, match="holds other weights"):
        publish_adapter(paths, 2, source)
    shutil.rmtree(folder)
    publish_adapter(paths, 2, source)
    difference = replay_step(paths, 2, model, SETTINGS, STORAGE).difference
    assert difference is not None and "the hash of the published value head" in difference.sentence


@pytest.mark.parametrize("damage", [lambda file: file.write_bytes(file.read_bytes()[:-1]), Path.unlink], ids=["cut", "gone"])
def test_a_damaged_head_is_no_published_version(paths: RunPaths, damage: Callable[[Path], object]):
    damage(paths.adapter(2) / HEAD_FILE)
    with pytest.raises(DataError, match=r"v000002/value_head\.safetensors does not match its manifest"):
        read_adapter(paths, 2)


def test_a_head_of_another_base_is_refused_and_one_of_its_own_begins_a_run(trained, model: Path, tmp_path: Path):
    own = read_head(read_adapter(trained[0], 2).folder / HEAD_FILE, model)
    base = shutil.copytree(model, tmp_path / "base")
    write_head(base_head(base), own, "0123456789abcdef")
    with pytest.raises(InputError, match=r"is of another base model than .*; nothing was trained on"):
        Policy(base, SETTINGS)
    write_head(base_head(base), own, base_identity(base))
    assert np.array_equal(Policy(base, SETTINGS).value_head.weights().weight, own.weight)
    assert Policy(base, SETTINGS.model_copy(update={"value_weight": 0.0})).value_head is None


def test_a_reader_foretells_what_the_trainer_s_policy_does(paths: RunPaths, model: Path):
    index = open_index(paths, ends=True)
    batch = index.gather(read_ledger(paths, MAIN, 1))
    policy = Policy(model, SETTINGS)
    policy.load_adapter(paths.adapter(2))
    (micro,) = plan(batch, range(len(batch.returns)), 4096).micro_batches
    with torch.no_grad():
        wanted = policy.masked_logprobs(micro).values.numpy()
    starts, lengths = batch.input_offsets[micro.value_rows], batch.prompt_lens[micro.value_rows]
    prompts = [batch.input_ids[first : first + length].tolist() for first, length in zip(starts, lengths, strict=True)]
    reader = ValueReader(model, read_adapter(paths, 2), InferenceSettings(engine="torch"))
    assert np.allclose(reader.read(prompts), wanted, atol=1e-5) and np.ptp(wanted, 0).min() > 0


def test_a_version_without_a_head_cannot_foretell(model: Path):
    from records.policy_version import BASE

    with pytest.raises(InputError, match="policy version 0 has no value head"):
        ValueReader(model, BASE, InferenceSettings(engine="torch"))
