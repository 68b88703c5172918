"""The trainer's figures are of what they say: the old way is really the old way, and a wrong path shows."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import Qwen3Config

from benchmarks import outcome, padded_rows, trainer
from benchmarks.trainer import TARGETS, bench_trainer, exactness, one_thread, speedups
from benchmarks.trainer_arms import Steps, random_steps
from benchmarks.trainer_cases import Case, made_up_batch
from entente.decoding.architectures import read_architecture
from entente.settings.layers import layered_settings
from entente.telemetry.errors import InputError
from entente.training.micro_batches import plan
from tests.training.parallel_worker import CONFIG as SMALL_CONFIG

CONFIG = Qwen3Config.from_dict(SMALL_CONFIG.to_dict() | {"tie_word_embeddings": True})
SMALL = Case(positions=2, forks=3, own=40, completion=12)


@pytest.fixture
def batch():
    return made_up_batch(SMALL, vocabulary=CONFIG.vocab_size)


# -- cases -----------------------------------------------------------------------------------------------------------------


def test_the_old_loss_is_that_of_a_plain_loop(batch):
    """Row by row, without padding or chunks, over the whole vocabulary."""
    steps, total = random_steps(CONFIG), 0.0
    for row in range(SMALL.rows):
        ids = torch.from_numpy(batch.input_ids[batch.input_offsets[row] : batch.input_offsets[row + 1]].astype(np.int64))[None]
        completion = slice(int(batch.prompt_lens[row]) - 1, ids.shape[1] - 1)
        with torch.no_grad():
            policy = torch.log_softmax(steps.policy.model(ids).logits[0, completion].double(), -1)
        now = policy.gather(1, ids[0, int(batch.prompt_lens[row]) :, None])[:, 0]
        behaviour = torch.from_numpy(batch.behaviour_logprobs[batch.completion_offsets[row] : batch.completion_offsets[row + 1]])
        ratio, advantage = torch.exp(now - behaviour), float(batch.returns[row])
        total -= float(torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).sum())
    assert steps.old()(batch) == pytest.approx(total / int(batch.completion_offsets[-1]), rel=1e-4)


# -- figures ---------------------------------------------------------------------------------------------------------------


def test_the_two_paths_agree_and_a_wrong_one_shows(monkeypatch: pytest.MonkeyPatch):
    with one_thread():
        honest = exactness(SMALL, CONFIG, seed=0)
        assert honest["loss_diff"] <= 1e-6 and honest["grad_rel_error"] <= 1e-5

        def crooked(*given):
            """As if the answers of a group stood at each other's places."""
            found = plan(*given)
            for micro in found:
                micro.positions[-1] += 1
            return found

        monkeypatch.setattr(padded_rows, "plan", crooked)
        assert exactness(SMALL, CONFIG, seed=0)["grad_rel_error"] > 1e-5


def test_times_are_the_medians_of_ratios_taken_in_turn(batch, monkeypatch: pytest.MonkeyPatch):
    """With a clock that only the arms move."""
    clock, order = [0.0], []
    speeds = {"ours": iter([1.0, 1.0, 2.0, 1.0]), "old": iter([9.0, 4.0, 4.0, 6.0])}

    def arm(name: str):
        def run(batch) -> float:
            order.append(name)
            clock[0] += next(speeds[name])
            return 0.0

        return run

    monkeypatch.setattr(outcome.time, "process_time", lambda: clock[0])
    monkeypatch.setattr(trainer.gc, "collect", lambda: 0)  # takes long among the objects of a whole suite
    monkeypatch.setattr(Steps, "ours", lambda self: arm("ours"))
    monkeypatch.setattr(Steps, "old", lambda self: arm("old"))
    found = speedups("x", random_steps(CONFIG), batch, batch, repeats=3)
    assert found["speedup_x"] == 4.0  # of 4, 2 and 6
    assert order == list(speeds) * 4
    assert 0 < found["unique_token_share_x"] < 1


def test_an_unknown_measurement_is_the_users_mistake():
    with pytest.raises(InputError, match="measures no 'g7', but recorded, g6"):
        bench_trainer(settings=layered_settings("laptop"), only=["g6", "g7"])


@pytest.mark.slow
def test_the_whole_benchmark_ends_with_one_object(entente):
    done = entente.process("bench", "trainer", "--rounds", "1", "--json", timeout=900)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["benchmark"] == "trainer" and set(told["targets"]) == set(TARGETS) - {"two_processes_over_one", "rate_share"}


def test_the_rate_share_is_the_step_s_operations_over_those_of_the_products_where_both_take_a_second(
    small_model: Path, monkeypatch: pytest.MonkeyPatch
):
    calls = []
    monkeypatch.setattr(trainer, "cpu_seconds", lambda work: calls.append(work()) or 1.0)
    found, sizes = (
        bench_trainer(settings=layered_settings("laptop"), repeats=1, model=small_model).metrics,
        read_architecture(small_model),
    )
    base, adapter = sizes.linear_parameters, sizes.lora_parameters(16)
    assert found["rate_share"] == pytest.approx(sizes.layers * (4 * base + 6 * adapter) / (2 * base))
    shapes = [tuple(product.shape) for product in calls[-1]]
    assert shapes == [(found["unique_tokens"], out) for out, _ in list(sizes.linear_layers().values())[: len(shapes)]]
    assert len(shapes) * sizes.layers == len(sizes.linear_layers())
