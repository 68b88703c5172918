"""Thought tokens in the trainer: loss, gradient and figures against float64 over the whole vocabulary, row by row."""

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from entente.decoding.open_set import open_set
from entente.training import thought_logprobs
from entente.training.micro_batches import plan, probed
from entente.training.policy import Policy
from entente.training.settings import TrainingSettings
from entente.training.update import Updater
from storage.gather import Batch
from tests.training.batches import VOCABULARY, three_levels, with_thoughts
from tests.training.loss_oracle import ORACLES, Part, Token
from tests.training.test_packed_forward import SETTINGS, apart, base, gradient_of, policy_of, step

OPEN_SETS = open_set([7], VOCABULARY - 4), open_set([8, 21, 60], VOCABULARY)
"""The head has rows behind the end of the first, as heads that are padded to a round number."""


def thinking_policy(settings: TrainingSettings = SETTINGS, **more: Any) -> Policy:
    """A policy whose probabilities are far from equal."""
    return policy_of(base(initializer_range=0.3, **more), settings)


def thinking_batch(tokens: int = 3, **more: Any) -> Batch:
    """Rows with a thought, orders and forced tokens; some rows end in their thought."""
    return with_thoughts(three_levels(**more), tokens, *OPEN_SETS)


class Naive:
    """The branching tokens of a batch, one row after another, in float64, with every legal set written out."""

    def __init__(self, policy: Policy, batch: Batch) -> None:
        self._model, self.batch = copy.deepcopy(policy.model).double(), batch
        self.weights = [weight for weight in self._model.parameters() if weight.requires_grad]
        self.rows: list[int] = []
        self.places: list[int] = []
        self.thoughts: list[bool] = []
        with torch.no_grad(), self._model.disable_adapter():
            references = [over for _, over, _, _ in self._tokens()]
        found = list(self._tokens())
        self.chosen = torch.stack([over[sampled] for sampled, over, _, _ in found])
        self.entropy = torch.stack([-(over.exp() * over).sum() for _, over, _, _ in found])
        self.kl = torch.stack([(f[1].exp() * (f[1] - base)).sum() for f, base in zip(found, references, strict=True)])
        self.mass = torch.stack([mass for _, _, mass, _ in found])
        self.thoughts = [thought for _, _, _, thought in found]

    def _tokens(self) -> Any:
        """Column of the drawn token, log-probabilities of the legal ids, legal mass, and whether it is a thought token."""
        batch, self.rows, self.places = self.batch, [], []
        for row in range(len(batch.returns)):
            ids = torch.from_numpy(batch.input_ids[batch.input_offsets[row] : batch.input_offsets[row + 1]].astype(np.int64))
            logits = self._model(input_ids=ids[None]).logits[0] / float(batch.temperatures[row])
            for number, place in enumerate(range(batch.completion_offsets[row], batch.completion_offsets[row + 1])):
                legal = batch.legal_ids[batch.legal_offsets[place] : batch.legal_offsets[place + 1]].tolist()
                position = int(batch.prompt_lens[row]) + number
                if thought := legal[0] < 0:
                    legal = [token for token in range(legal[1]) if token not in (-1 - legal[0], *legal[2:])]
                if len(legal) > 1:
                    self.rows.append(row)
                    self.places.append(place)
                    over = torch.log_softmax(logits[position - 1, legal], 0)
                    mass = torch.softmax(logits[position - 1], 0)[legal].sum()
                    yield legal.index(int(ids[position])), over, mass, thought

    def parts(self, loss: str, advantages: np.ndarray) -> list[Part]:
        """Each token's part of the policy loss and its slope."""
        sampled = self.batch.behaviour_logprobs[self.places].tolist()
        tokens = zip(self.chosen.tolist(), sampled, advantages[self.rows].tolist(), self.rows, strict=True)
        return ORACLES[loss]([Token(*token) for token in tokens])

    def probes(self) -> torch.Tensor:
        """Legal masses of the probed tokens."""
        return self.mass[torch.from_numpy(probed(np.array(self.places)) & ~np.array(self.thoughts))]

    def step(self, settings: TrainingSettings, advantages: np.ndarray) -> tuple[float, torch.Tensor]:
        """Loss and gradient of the update."""
        parts = self.parts(settings.loss, advantages)
        terms = settings.kl_weight * self.kl.mean() - settings.entropy_weight * self.entropy.mean()
        terms = terms - settings.legal_mass_weight * self.probes().log().mean()
        slopes = torch.tensor([part.slope for part in parts], dtype=torch.float64)
        gradients = torch.autograd.grad((slopes * self.chosen).sum() + terms, self.weights, retain_graph=True)
        return sum(part.loss for part in parts) + float(terms.detach()), torch.cat([part.flatten() for part in gradients])


@pytest.fixture(scope="module")
def naive() -> Naive:
    """Of a batch as if a third of its tokens had been drawn with far higher odds, and a third with far lower ones."""
    found = Naive(thinking_policy(), thinking_batch(forks=2))
    logprobs = found.batch.behaviour_logprobs.copy()
    logprobs[found.places] = found.chosen.detach().numpy() + 0.4 * (np.array(found.places) % 3 - 1)
    found.batch = replace(found.batch, behaviour_logprobs=logprobs)
    return found


@pytest.mark.parametrize("loss", sorted(ORACLES))
def test_loss_gradient_and_figures_are_those_of_every_id_written_out(loss: str, naive: Naive):
    terms = {"kl_weight": 0.3, "entropy_weight": 0.1, "legal_mass_weight": 0.2}
    settings = SETTINGS.model_copy(update=terms | {"loss": loss})
    policy, batch = thinking_policy(settings), naive.batch
    advantages = (batch.returns - batch.returns.mean()).astype(np.float32)
    expected, gradient = naive.step(settings, advantages)
    found = Updater(policy, settings).accumulate(batch, range(len(batch.returns)), advantages)
    assert sum(found.losses) == pytest.approx(expected, abs=1e-5)
    assert apart(gradient_of(policy).double(), gradient) < 1e-5
    seen, order = found.tokens, np.argsort(found.tokens["batch_row"], kind="stable")
    assert seen["in_thought"][order].tolist() == naive.thoughts
    figures = {
        "entropy": naive.entropy,
        "kl": naive.kl,
        "log_ratio": naive.chosen - torch.from_numpy(batch.behaviour_logprobs[naive.places]),
    }
    for name, values in figures.items():
        np.testing.assert_allclose(seen[name][order], values.detach().numpy(), atol=2e-5)
    slopes = np.array([part.slope for part in naive.parts(loss, advantages)])
    np.testing.assert_allclose(seen["gradient"][order], slopes, atol=1e-5)
    assert not np.isfinite(seen["legal_mass"][seen["in_thought"]]).any()
    assert np.isfinite(seen["legal_mass"]).sum() == len(naive.probes()) > 0
    assert slopes[naive.thoughts].any() and slopes[~np.array(naive.thoughts)].any(), "one part taught nothing"


def test_the_size_of_a_chunk_changes_neither_loss_nor_gradient(monkeypatch):
    terms = {"kl_weight": 0.3, "entropy_weight": 0.1}
    policy, batch = thinking_policy(SETTINGS.model_copy(update=terms)), thinking_batch()
    whole, oracle = step(policy, batch, **terms)
    monkeypatch.setattr(thought_logprobs, "CHUNK_LOGITS", 5 * VOCABULARY)
    chunked, gradient = step(policy, batch, **terms)
    assert abs(chunked - whole) <= 1e-6 and apart(gradient, oracle) <= 1e-6


class LargestLogits(TorchDispatchMode):
    """Notes the most rows of a tensor whose last dimension is the vocabulary; views of the head do not count."""

    def __init__(self, head: torch.Tensor) -> None:
        super().__init__()
        self.vocabulary, self.head, self.rows = len(head), head.data_ptr(), 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, tuple | list) else [made]:
            if isinstance(tensor, torch.Tensor) and tensor.shape[-1:] == (self.vocabulary,) and tensor.data_ptr() != self.head:
                self.rows = max(self.rows, tensor.numel() // self.vocabulary)
        return made


def test_no_more_logits_than_a_chunk_are_in_one_tensor(monkeypatch):
    terms, vocabulary = {"kl_weight": 0.3, "entropy_weight": 0.1}, 997
    model, batch = base(), thinking_batch()
    model.resize_token_embeddings(vocabulary, mean_resizing=False)  # no other dimension has this size
    policy = policy_of(model, SETTINGS.model_copy(update=terms))
    (micro,) = plan(batch, range(len(batch.returns)), 4096)
    probes = int(probed(micro.completion_index[~micro.in_thought]).sum())
    monkeypatch.setattr(thought_logprobs, "CHUNK_LOGITS", 2 * vocabulary + 1)
    updater = Updater(policy, SETTINGS.model_copy(update=terms | {"token_budget": 4096}))
    with LargestLogits(model.lm_head.weight) as largest:
        updater.accumulate(batch, range(len(batch.returns)), batch.returns.astype(np.float32))
    assert largest.rows == 2 < probes < micro.in_thought.sum()


def test_the_head_of_a_bfloat16_model_computes_in_float32_as_the_engines_do():
    """Logits near 30, where bfloat16 has steps of 0.125."""
    weight, hidden = (torch.randn(rows, 64, generator=torch.Generator().manual_seed(rows)).bfloat16() for rows in (50, 7))
    weight += 0.47
    hidden += 1
    with torch.autocast("cpu", torch.bfloat16):
        logits = thought_logprobs.head_logits(hidden, weight, None)
    exact = hidden.double() @ weight.double().T
    assert exact.abs().max() > 16 and logits.dtype == torch.float32
    torch.testing.assert_close(logits.double(), exact, rtol=1e-5, atol=1e-4)
