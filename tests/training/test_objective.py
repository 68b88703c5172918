"""The whole loss of an update, from logits: against float64 loops in plain Python, its slopes against differences of those."""

import math
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from entente.training.losses import PolicyLoss, SampledTokens, TokenLoss, clipped_loss
from entente.training.masked_logprobs import TokenFigures, exact_kl, legal_entropy
from entente.training.objective import Objective, join_tokens, token_figures
from entente.training.settings import LOSSES, TrainingSettings
from tests.training.loss_oracle import ORACLES, Token, divergence, entropy, legal_mass, masked

VOCABULARY = 9
TERMS = {
    "policy alone": {},
    "with divergence": {"kl_weight": 0.3},
    "with entropy": {"entropy_weight": 0.2},
    "with legal mass": {"legal_mass_weight": 0.5},
    "with all": {"kl_weight": 0.3, "entropy_weight": 0.2, "legal_mass_weight": 0.5},
}


class Update:
    """A made-up update: positions with logits, legal sets and drawn tokens of a few decisions; every third position is probed."""

    def __init__(self, seed: int = 0) -> None:
        rng = random.Random(seed)
        self.decisions = [0, 0, 0, 1, 2, 2, 3, 3, 3, 3]
        self.sets = [sorted(rng.sample(range(VOCABULARY), rng.randint(2, 5))) for _ in self.decisions]
        self.sampled = [rng.randrange(len(legal)) for legal in self.sets]
        self.logits, self.base = ([[rng.gauss(0, 1.5) for _ in range(VOCABULARY)] for _ in self.decisions] for _ in range(2))
        self.advantages = [1.5, -0.5, 2.0, -1.25]
        now = self.policies(self.logits)
        self.behaviour = [now[at][self.sets[at][self.sampled[at]]] + rng.gauss(0, 0.5) for at in range(len(self.decisions))]
        self.probed = [at % 3 == 0 for at in range(len(self.decisions))]
        self.thoughts = [False] * len(self.decisions)

    def policies(self, logits: list[list[float]]) -> list[dict[int, float]]:
        return [masked(row, legal) for row, legal in zip(logits, self.sets, strict=True)]

    def oracle(self, name: str, settings: TrainingSettings, logits: list[list[float]]) -> float:
        """The loss by loops; weights without a gradient are those of `self.logits`."""
        policies, references, n = self.policies(logits), self.policies(self.base), len(self.decisions)
        sampled = [legal[column] for legal, column in zip(self.sets, self.sampled, strict=True)]
        tokens = [
            Token(policies[at][sampled[at]], self.behaviour[at], self.advantages[decision], decision, weighed=before[sampled[at]])
            for at, (decision, before) in enumerate(zip(self.decisions, self.policies(self.logits), strict=True))
        ]
        loss = sum(part.loss for part in ORACLES[name](tokens))
        loss += settings.kl_weight * sum(divergence(p, r) for p, r in zip(policies, references, strict=True)) / n
        loss -= settings.entropy_weight * sum(map(entropy, policies)) / n
        masses = [legal_mass(row, s) for row, s, p in zip(logits, self.sets, self.probed, strict=True) if p]
        return loss - settings.legal_mass_weight * sum(map(math.log, masses)) / len(masses)

    def found(
        self, name: str, settings: TrainingSettings, micro_batches: list[list[int]]
    ) -> tuple[float, torch.Tensor, np.ndarray]:
        """The loss and its slopes by logit as the trainer adds them up over micro-batches."""
        batch: Any = None  # its constants are given
        objective = Objective(
            settings=settings.model_copy(update={"loss": name}),
            batch=batch,
            rows=(),
            advantages=np.array(self.advantages),
            branching_tokens=len(self.decisions),
            thought_tokens=sum(self.thoughts),
            decisions=len(set(self.decisions)),
            probed_tokens=sum(self.probed),
        )
        logits, total, seen = torch.tensor(self.logits, dtype=torch.float64, requires_grad=True), 0.0, []
        for rows in micro_batches:
            at = [place for place, decision in enumerate(self.decisions) if decision in rows]
            base = torch.tensor(self.base, dtype=torch.float64) if settings.kl_weight else None
            micro = self.micro_batch(at)
            loss, computed = objective.loss(micro, self.forward(logits, base, at))
            loss.backward()
            total += loss.item()
            seen.append(token_figures(micro, computed))
        assert logits.grad is not None
        return total, logits.grad, join_tokens(seen)

    def micro_batch(self, at: list[int]) -> Any:
        columns = {"batch_row": self.decisions, "in_thought": self.thoughts, "behaviour": self.behaviour}
        return SimpleNamespace(**{name: np.array([column[place] for place in at]) for name, column in columns.items()})

    def forward(self, logits: torch.Tensor, base: torch.Tensor | None, at: list[int]) -> TokenFigures:
        legal = self.legal(logits, at)
        mass = (legal.logsumexp(1) - logits[at].logsumexp(1)).exp()
        logprobs = legal.log_softmax(1)
        chosen = logprobs[range(len(at)), [self.sampled[place] for place in at]]
        probed = torch.tensor([self.probed[place] for place in at])
        masses = torch.where(probed, mass, torch.full_like(mass, math.nan))
        found = {"chosen": chosen, "entropy": legal_entropy(logprobs), "legal_mass": masses}
        return found if base is None else found | {"kl": exact_kl(logprobs, self.legal(base, at).log_softmax(1))}

    def legal(self, logits: torch.Tensor, at: list[int]) -> torch.Tensor:
        """Logits of the legal tokens, -inf beyond a set."""
        widest = max(len(self.sets[place]) for place in at)
        rows = [torch.cat([logits[p][self.sets[p]], logits.new_full((widest - len(self.sets[p]),), -math.inf)]) for p in at]
        return torch.stack(rows)


@pytest.mark.parametrize("terms", TERMS.values(), ids=TERMS)
@pytest.mark.parametrize("name", sorted(LOSSES))
def test_loss_and_slopes_by_every_logit_are_those_of_the_loops(name: str, terms: dict):
    update, settings = Update(), TrainingSettings(**terms)
    loss, slopes, _ = update.found(name, settings, [[0, 1, 2, 3]])
    assert loss == pytest.approx(update.oracle(name, settings, update.logits), rel=1e-9)
    for at in range(len(update.decisions)):
        for token in range(VOCABULARY):
            ends = []
            for side in (1e-6, -1e-6):
                moved = [list(row) for row in update.logits]
                moved[at][token] += side
                ends.append(update.oracle(name, settings, moved))
            assert slopes[at, token].item() == pytest.approx((ends[0] - ends[1]) / 2e-6, abs=1e-7)


def test_a_loss_that_writes_into_its_tokens_changes_no_figure(monkeypatch: pytest.MonkeyPatch):
    def of(tokens: SampledTokens, settings: TrainingSettings) -> TokenLoss:
        tokens.behaviour.clamp_(min=-0.1)
        tokens.decisions.sub_(tokens.decisions.min())
        return clipped_loss(tokens, settings)

    update = Update()
    expected = update.found("clipped", TrainingSettings(), [[0], [1, 2, 3]])[2]
    monkeypatch.setattr("entente.training.objective.policy_loss", lambda name: PolicyLoss(of=of, per_decision=False))
    figures = update.found("clipped", TrainingSettings(), [[0], [1, 2, 3]])[2]
    for name in ("batch_row", "log_ratio"):
        assert figures[name].tolist() == expected[name].tolist()


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_how_an_update_is_cut_changes_nothing(name: str):
    update, settings = Update(), TrainingSettings(**TERMS["with all"])
    whole, cut = (update.found(name, settings, rows) for rows in ([[0, 1, 2, 3]], [[2], [0, 3], [1]]))
    assert cut[0] == pytest.approx(whole[0], rel=1e-12)
    torch.testing.assert_close(cut[1], whole[1], rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_with_a_thought_the_slopes_of_the_policy_loss_are_told_and_nothing_else_changes(name: str):
    update, settings = Update(), TrainingSettings(**TERMS["with all"])
    plain = update.found(name, settings, [[0, 1, 2, 3]])
    assert np.isnan(plain[2]["gradient"]).all() and not plain[2]["in_thought"].any()
    update.thoughts = [at % 4 == 1 for at in range(len(update.decisions))]
    loss, slopes, seen = update.found(name, settings, [[2], [0, 3], [1]])
    policies = update.policies(update.logits)
    now = [policies[at][update.sets[at][update.sampled[at]]] for at in range(len(update.decisions))]
    given = zip(now, update.behaviour, (update.advantages[decision] for decision in update.decisions), strict=True)
    parts = ORACLES[name]([Token(*token, decision) for token, decision in zip(given, update.decisions, strict=True)])
    order = np.argsort(seen["batch_row"], kind="stable")
    assert seen["gradient"][order].tolist() == pytest.approx([part.slope for part in parts], abs=1e-6)
    assert seen["in_thought"][order].tolist() == update.thoughts
    assert loss == pytest.approx(plain[0], rel=1e-12)
    torch.testing.assert_close(slopes, plain[1], rtol=1e-12, atol=1e-15)


def test_what_was_seen_is_what_the_loops_say():
    update = Update()
    _, _, seen = update.found("clipped", TrainingSettings(kl_weight=0.3), [[0, 1, 2, 3]])
    policies, references = update.policies(update.logits), update.policies(update.base)
    now = [policies[at][update.sets[at][update.sampled[at]]] for at in range(len(update.decisions))]
    assert seen["batch_row"].tolist() == update.decisions
    assert seen["log_ratio"].tolist() == pytest.approx([p - b for p, b in zip(now, update.behaviour, strict=True)], rel=1e-5)
    assert seen["entropy"].tolist() == pytest.approx([entropy(p) for p in policies], rel=1e-5)
    assert seen["kl"].tolist() == pytest.approx([divergence(p, r) for p, r in zip(policies, references, strict=True)], rel=1e-5)
    masses = [legal_mass(row, legal) for row, legal in zip(update.logits, update.sets, strict=True)]
    assert seen["legal_mass"][update.probed].tolist() == pytest.approx(
        [m for m, p in zip(masses, update.probed, strict=True) if p]
    )
    assert np.isnan(seen["legal_mass"][~np.array(update.probed)]).all()
