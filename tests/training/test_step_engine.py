"""What may not change a gradient does not: too little memory, recomputation, compiled blocks. What is not finite is named."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.trainer_cases import Case, made_up_batch, model_of, stir_adapter
from entente.telemetry.errors import TrainingError
from entente.training import update
from entente.training.policy import Policy
from entente.training.settings import CPU_TOKENS, GPU_TOKENS, TrainingSettings
from entente.training.trainer import Trainer
from entente.training.update import LEAST_TOKENS, Updater
from storage.ledger import read_ledger
from storage.settings import StorageSettings
from tests.training.parallel_worker import CONFIG
from tests.training.whole_step import whole_step

CASE = Case(positions=4, forks=4, own=60, completion=12, spread=0.3)


@pytest.fixture
def batch():
    return made_up_batch(CASE, vocabulary=CONFIG.vocab_size)


def updater_for(**settings) -> Updater:
    given = TrainingSettings(device="cpu", **settings)
    policy = Policy(model_of(CONFIG), given)
    stir_adapter(policy.parameters())
    return Updater(policy, given)


def gradient_of(updater: Updater, batch) -> np.ndarray:
    updater.accumulate(batch, range(CASE.rows), batch.returns.astype(np.float32))
    return np.concatenate([weight.grad.double().flatten().numpy() for weight in updater.policy.parameters()])


def off(one: np.ndarray, other: np.ndarray) -> float:
    return float(np.linalg.norm(one - other) / np.linalg.norm(other))


def test_an_update_that_runs_out_of_memory_half_way_is_done_again_in_halves_with_the_same_gradient(batch, monkeypatch):
    """With a card that holds out for one forward and backward of a larger budget, so that some of the gradient stands already."""
    expected = gradient_of(updater_for(), batch)
    small, done = updater_for(token_budget=1024), []
    honest = type(small.policy).masked_logprobs

    def with_little_memory(self, micro, reference):
        if small.tokens > 128 and (small.tokens > 256 or small.tokens in done):
            raise torch.OutOfMemoryError("CUDA out of memory")
        done.append(small.tokens)
        return honest(self, micro, reference)

    monkeypatch.setattr("entente.training.update.LEAST_TOKENS", 64)
    monkeypatch.setattr(type(small.policy), "masked_logprobs", with_little_memory)
    assert off(gradient_of(small, batch), expected) < 1e-6
    assert small.tokens == 128 and done.count(256) == 1 and done.count(128) > 2


class Waits(TorchDispatchMode):
    """Notes forwards, backwards and numbers that the host reads, for which it waits."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if name.startswith(("aten.embedding", "aten._local_scalar_dense", "aten.nonzero")):
            self.seen.append("forward" if "embedding" in name else "wait")
        return func(*args, **(kwargs or {}))


def test_the_host_waits_for_the_device_once_all_micro_batches_are_on_their_way(batch):
    updater = updater_for(token_budget=128)
    with Waits() as noted:
        gradient_of(updater, batch)
    assert noted.seen.count("forward") > 2
    assert "wait" not in noted.seen[: -noted.seen[::-1].index("forward")], noted.seen


def budget_of(tokens: int, device: str = "cpu", *, splits: bool = False) -> Updater:
    """An updater whose policy is on a device that need not be here."""
    policy: Any = SimpleNamespace(device=torch.device(device), parameters=lambda: [torch.nn.Parameter(torch.zeros(1))])
    peers: Any = object() if splits else None
    return Updater(policy, TrainingSettings(token_budget=tokens, fsdp=splits), peers)


@pytest.mark.parametrize(("device", "given", "expected"), [("cpu", 0, CPU_TOKENS), ("cuda", 0, GPU_TOKENS), ("cuda", 700, 700)])
def test_a_budget_that_is_given_is_used(device: str, given: int, expected: int):
    assert budget_of(given, device).tokens == expected


@pytest.mark.parametrize(
    ("updater", "refusal"),
    [
        pytest.param(
            budget_of(4096), rf"{LEAST_TOKENS} unique tokens does not fit .* training.gradient_checkpointing", id="smallest"
        ),
        # Processes that split the base run their forwards together, so none repeats one alone.
        pytest.param(budget_of(0, splits=True), r"4096 unique tokens does not fit .* training.token_budget", id="split base"),
    ],
)
def test_what_does_not_fit_into_memory_is_an_error_with_a_cure(updater: Updater, refusal: str, monkeypatch: pytest.MonkeyPatch):
    nothing: Any = None

    def out_of_memory(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(updater, "_forward_and_backward", out_of_memory)
    monkeypatch.setattr(update.gc, "collect", lambda: 0)  # seconds, in a process with many modules
    with pytest.raises(TrainingError, match=refusal):
        updater.gradient(nothing, [])


def blocks_run(updater: Updater) -> list[int]:
    runs: list[int] = []
    updater.policy.model.base_model.model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: runs.append(1))
    return runs


def test_recomputation_runs_blocks_twice_and_changes_the_gradient_by_rounding_alone(batch):
    plain, thrifty = updater_for(), updater_for(gradient_checkpointing=True)
    once, twice = blocks_run(plain), blocks_run(thrifty)
    kept, again = gradient_of(plain, batch), gradient_of(thrifty, batch)
    assert np.linalg.norm(again - kept) <= 1e-5 * np.linalg.norm(kept)
    assert len(twice) == 2 * len(once) > 0


def test_decisions_of_an_update_that_is_not_finite_are_logged_and_three_stop_the_run(
    exact_run, model, monkeypatch, tmp_path, caplog
):
    paths = exact_run(tmp_path / "run", groups=4, forks=4)
    settings = TrainingSettings(learning_rate=1e-2)
    trainer = Trainer(paths, Policy(model, settings), settings, StorageSettings())
    before = [weight.detach().clone() for weight in trainer._policy.parameters()]
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", lambda *_: torch.tensor(float("inf")))
    for step in (1, 2):
        assert whole_step(trainer, step, 1).metrics["train/skipped"] == 1.0
    with pytest.raises(TrainingError, match=r"3 updates in a row: lower training.learning_rate, and inspect the decisions"):
        whole_step(trainer, 3, 1)
    assert all(torch.equal(old, new) for old, new in zip(before, trainer._policy.parameters(), strict=True))
    for step in (1, 2, 3):
        ledger = read_ledger(paths, step)
        assert ledger is not None and str(sorted(ledger["decision_id"].to_pylist())) in [
            str(sorted(record.args[1])) for record in caplog.records if "is skipped" in record.msg
        ]
