"""The value head as a baseline: estimates of a loop, no bias, equal from packed and separate prompts, and bit for bit again."""

import itertools
import math
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from records.value_head import CENTRES_SCALE
from storage.ends import sequences_of
from storage.gather import Batch
from storage.ledger import MAIN, read_ledger
from storage.runs import RunPaths
from storage.settings import StorageSettings
from telemetry.errors import InputError
from tests.training.batches import three_levels
from training.advantages import leave_one_out
from training.lab import compare
from training.policy import Policy
from training.replay import replay_step
from training.settings import TrainingSettings
from training.trainer import Trainer
from training.update import Updater
from training.value_baseline import check_value_baseline, estimates, weights_of

VALUE = {"value_weight": 0.5, "advantage_baseline": "value"}
SETTINGS = TrainingSettings(learning_rate=1e-2, lora_rank=4, lora_alpha=8, device="cpu", **VALUE, gae_lambda=0.7)
STORAGE = StorageSettings(max_policy_lag=3)
BLEND = {"centres_gained": 1.0, "sos_share": 2.0, "final_centres_gained": 0.5}


def by_loop(ends: list, values: list, boards: list, gae_lambda: float) -> list[float]:
    """Estimates of one fork, from rewards and foretold returns; ends, values and figures of the boards are pairs by decision."""
    squares, centres = BLEND["sos_share"], BLEND["centres_gained"] + BLEND["final_centres_gained"]

    def worth(pair: tuple[float, float]) -> float:
        return squares * pair[0] + centres * CENTRES_SCALE * pair[1]

    last = len(ends) - 1
    rewards = [worth(boards[i + 1] if i < last else ends[i]) - worth(boards[i]) for i in range(len(ends))]
    foretold = [worth(values[i]) - worth(boards[i]) for i in range(len(ends))] + [0.0]
    differences = [rewards[i] + foretold[i + 1] - foretold[i] for i in range(len(ends))]
    return [math.fsum(gae_lambda ** (k - i) * differences[k] for k in range(i, len(ends))) for i in range(len(ends))]


@pytest.mark.parametrize("gae_lambda", [0.0, 0.6, 1.0])
def test_estimates_are_those_of_a_loop_over_temporal_differences(gae_lambda: float):
    dice = np.random.default_rng(3)
    rows, wanted = [], []
    for number, decisions in enumerate((1, 4, 2, 3)):
        end = [dice.uniform(size=2)] * decisions
        values, boards = dice.uniform(size=(2, decisions, 2))
        wanted += by_loop(end, values.tolist(), boards.tolist(), gae_lambda)
        rows += [(end[i], values[i], (number, 3 * i + number)) for i in range(decisions)]
    mixed = dice.permutation(len(rows))
    ends, values, sequences = (np.array([rows[place][part] for place in mixed]) for part in range(3))
    found = estimates(ends, values, sequences, weights_of(BLEND), gae_lambda)
    np.testing.assert_allclose(found, np.array(wanted)[mixed], atol=1e-12)
    assert len(estimates(ends[:0], values[:0], sequences[:0], weights_of(BLEND), gae_lambda)) == 0, "a step of lessons alone"


def test_a_wrong_head_leaves_the_expected_gradient_as_it_is():
    """All pairs of forks that reach one of two boards and choose one of two order sets there, with their probabilities."""
    reached, chosen, ends = (0.3, 0.7), ((0.2, 0.8), (0.6, 0.4)), ((0.1, 0.9), (0.5, 0.3))
    forks = list(itertools.product((0, 1), (0, 1)))

    def expected_gradient(head: tuple[float, float]) -> list[float]:
        """By the log-odds of the first order set on each board."""
        slope = [0.0, 0.0]
        for one, other in itertools.product(forks, forks):
            chance = math.prod(reached[board] * chosen[board][order] for board, order in (one, other))
            end = np.array([[0.0, ends[board][order]] for board, order in (one, other)], np.float32)
            values = np.array([[0.0, head[board]] for board, _ in (one, other)], np.float32)
            found = estimates(end, values, np.array([[0, 1], [1, 1]]), weights_of(BLEND), 1.0)
            advantage = leave_one_out(found, np.array([0, 0]))[0]
            slope[one[0]] += chance * advantage * ((one[1] == 0) - chosen[one[0]][0])
        return slope

    assert expected_gradient((0.9, -4.0)) == pytest.approx(expected_gradient((0.0, 0.0)), abs=1e-5)
    assert max(map(abs, expected_gradient((0.0, 0.0)))) > 0.1


def chained(batch: Batch) -> Batch:
    """The batch with ends, as if the forks of its first position went on at its second."""
    count = len(batch.returns)
    half = np.arange(count) % (count // 2)
    ends = np.random.default_rng(0).uniform(0, 1, (count, 2)).astype(np.float32)
    sequences = np.column_stack([half, np.arange(count) // (count // 2)]).astype(np.int64)
    return replace(batch, ends=ends[half], sequences=sequences)


@pytest.mark.parametrize(
    "changed",
    [{}, {"token_budget": 40}, {"layout": "padded", "micro_batch_rows": 5}],
    ids=["one micro-batch", "many micro-batches", "padded"],
)
def test_advantages_are_those_of_separate_prompts(model: Path, changed: dict):
    """Oracle: each prompt alone through the model, then loops."""
    batch, settings = chained(three_levels(3)), SETTINGS.model_copy(update=changed)
    policy, dice = Policy(model, settings), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in policy.trained_parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=dice))
    updater = Updater(policy, settings, blend=BLEND)
    found, _ = updater.advantages(batch, [""] * len(batch.returns))
    assert len(updater.cut(batch, range(len(batch.returns))).micro_batches) > 1 or not changed
    values = []
    for row, first in enumerate(batch.input_offsets[:-1]):
        prompt = torch.from_numpy(batch.input_ids[first : first + batch.prompt_lens[row]].astype(np.int64))
        with torch.no_grad():
            state = policy.model.base_model.model.model(input_ids=prompt[None]).last_hidden_state[:, -1]
            values.append(policy.value_head(state)[0].double().tolist())
    ends, half = batch.ends.astype(np.float64).tolist(), len(values) // 2
    wanted = np.empty(len(values))
    for row in range(half):
        pair = [row, row + half]
        boards = [(0.0, 0.0), (0.3, 0.2)]  # they cancel
        wanted[pair] = by_loop([ends[at] for at in pair], [values[at] for at in pair], boards, settings.gae_lambda)
    np.testing.assert_allclose(found, leave_one_out(wanted, batch.advantage_groups), atol=1e-4)


def test_where_forks_share_a_board_the_head_changes_nothing_and_without_it_returns_count(model: Path):
    batch = chained(three_levels(3))
    batch = replace(batch, returns=batch.ends.astype(np.float64) @ weights_of(BLEND))
    whole = SETTINGS.model_copy(update={"gae_lambda": 1.0})
    plain = whole.model_copy(update={"advantage_baseline": "group"})
    powers = [""] * len(batch.returns)
    with_head, without = (Updater(Policy(model, each), each, blend=BLEND).advantages(batch, powers)[0] for each in (whole, plain))
    np.testing.assert_allclose(with_head, without, atol=1e-4)


@pytest.fixture(scope="module")
def trained(exact_run, model, tmp_path_factory) -> RunPaths:
    """A run of two steps with the value head as baseline; tests change copies of it."""
    paths = exact_run(tmp_path_factory.mktemp("trained") / "run", groups=4, forks=3)
    trainer = Trainer(paths, Policy(model, SETTINGS), SETTINGS, STORAGE)
    for step in (1, 2):
        assert trainer.step(step, 2).metrics["train/branching_tokens"] > 0
    return paths


def test_rows_of_a_fork_and_power_are_one_sequence(trained: RunPaths):
    rows = read_ledger(trained, MAIN, 1)
    found = sequences_of(rows)
    named = [(row["shard"], row["start_group"], row["fork"], row["power"]) for row in rows.to_pylist()]
    assert found[:, 1].tolist() == rows["ply"].to_pylist()
    assert len(set(named)) == len(set(found[:, 0].tolist())) == len(set(zip(named, found[:, 0].tolist(), strict=True)))
    assert max(named.count(name) for name in named) > 1, "or nothing would follow anything"


def test_a_replay_and_a_resumed_trainer_have_the_same_bits(trained: RunPaths, model: Path, tmp_path: Path):
    paths = RunPaths(shutil.copytree(trained.root, tmp_path / "copy"))
    replay = replay_step(paths, 2, model, SETTINGS, STORAGE)
    assert replay.difference is None and replay.from_adapter is not None and replay.adapter_difference is None
    for folder in (paths.checkpoint(2), paths.adapter(2)):
        shutil.rmtree(folder)
    again = Trainer(paths, Policy(model, SETTINGS), SETTINGS, STORAGE)
    assert again.step_done == 1
    again.step(2, 2)
    weights = [(root.adapter(2) / "adapter_model.safetensors").read_bytes() for root in (trained, paths)]
    assert weights[0] == weights[1]


def test_losses_are_compared_with_the_run_s_own_baseline(trained: RunPaths, model: Path, monkeypatch: pytest.MonkeyPatch):
    seen = []
    monkeypatch.setattr("training.update.estimates", lambda *given: seen.append(given) or estimates(*given))
    found = compare(trained, model, SETTINGS, STORAGE, 1, ())
    assert len(seen) == 1 and found.tried["clipped"][0].gradient_norm > 0


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"advantage_baseline": "value"}, "needs a value head, but training.value_weight is 0"),
        ({"gae_lambda": 0.9}, "training.gae_lambda 0.9 needs training.advantage_baseline 'value', but it is 'group'"),
    ],
)
def test_settings_without_a_head_are_refused(given: dict, sentence: str):
    with pytest.raises(ValidationError, match=sentence):
        TrainingSettings(**given)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"blend": {"centres_gained": 1.0, "final_leader_gap": 0.3}}, "storage.blend weighs leader_gap, which no value head"),
        ({"discount": 0.9}, "storage.discount is 0.9, and the value head foretells ends without a discount"),
    ],
)
def test_returns_that_no_head_foretells_are_refused(given: dict, sentence: str):
    with pytest.raises(InputError, match=sentence):
        check_value_baseline(SETTINGS, StorageSettings(**given))
    check_value_baseline(SETTINGS.model_copy(update={"advantage_baseline": "group"}), StorageSettings(**given))
