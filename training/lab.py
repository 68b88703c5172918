"""The loss lab: compares losses on batches that a run has trained on, without new rollouts.

The rows of each recorded step are one update of the policy of the run's newest whole checkpoint. Their policy lag is then larger
than in the run, which shows the effect of clipping. All variants share one forward and the run's own advantages.

    masked share        share of the tokens with advantage other than 0 whose slope dL/dlog pi is 0
    effective samples   (sum c)^2 / (n sum c^2) with c = |dL_t/dlog pi_t / A_t|, the weight of each token in the gradient
    gradient norm       of the adapter, before clipping
    cosine              of two variants' gradients

The run's files and locks are not touched.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers.utils.logging import disable_progress_bar

from storage.gather import Batch
from storage.index import open_index
from storage.ledger import MAIN, read_ledger, recorded_steps
from storage.ledger_copies import checkpoint_steps
from storage.lineages import lineage_at
from storage.runs import RunPaths
from storage.settings import StorageSettings
from telemetry.errors import DataError, InputError
from telemetry.progress import reporter
from training.branching import branching_decisions, branching_tokens
from training.checkpoint import TrainerState, load_checkpoint
from training.losses.choose import LOSSES, policy_loss
from training.losses.token_loss import DrawnTokens
from training.policy import Policy
from training.row_checks import find_trainable_rows, select_rows
from training.settings import TrainingSettings
from training.step_metrics import effective_share
from training.update import Updater

_NO_BOUND = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A loss to compare."""

    name: str
    settings: TrainingSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class VariantResult:
    """Figures of a variant on one recorded step; the module's docstring defines them."""

    loss: float
    masked_share: float
    effective_sample_share: float
    gradient_norm: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The variants on the recorded steps."""

    version: int
    """Policy version at which the gradients were computed."""
    steps: tuple[int, ...]
    branching_tokens: tuple[int, ...]
    """By step."""
    lags: tuple[float, ...]
    """Mean policy lag of each step's rows, relative to `version`."""
    tried: Mapping[str, tuple[VariantResult, ...]]
    """By variant, then by step."""
    cosines: Mapping[str, Mapping[str, float]]
    """Mean over the steps of the cosine between the gradients of two variants; NaN if a gradient is 0."""

    def median(self, variant: str, figure: str) -> float:
        """Median over the steps of one figure of `VariantResult`."""
        return float(np.median([getattr(step, figure) for step in self.tried[variant]]))


def variants(training: TrainingSettings, caps: Sequence[float]) -> list[Variant]:
    """The run's loss, every other built-in loss, the loss without clipping, and truncated importance weights at each cap."""
    plain = training.model_copy(update={"importance_cap": 0.0})
    names = [training.loss, *(name for name in LOSSES if name != training.loss)]
    found = [Variant(name=name, settings=plain.model_copy(update={"loss": name})) for name in names]
    free = {"loss": "clipped", "clip_low": 1.0, "clip_high": _NO_BOUND, "dual_clip": _NO_BOUND}
    found.append(Variant(name="unclipped", settings=plain.model_copy(update=free)))
    for cap in caps:
        truncated = {"loss": "clipped", "importance_cap": cap}
        found.append(Variant(name=f"truncated at {cap:g}", settings=plain.model_copy(update=truncated)))
    return found


def check_comparable(paths: RunPaths) -> None:
    """Refuse a run that has nothing to compare losses on.

    Raises:
        InputError: it has no finished step.
    """
    if not recorded_steps(paths, MAIN) or not checkpoint_steps(paths):
        raise InputError(f"run '{paths.root.name}' has no finished step to compare losses on yet: train it, or wait")


def compare(
    paths: RunPaths, model: Path, training: TrainingSettings, storage: StorageSettings, steps: int, caps: Sequence[float]
) -> Comparison:
    """Try the variants on the newest `steps` recorded steps that had something to learn from.

    Raises:
        InputError: the run has no step yet, or none with rows.
        DataError: no checkpoint is whole, or a recorded row is damaged.
    """
    check_comparable(paths)
    disable_progress_bar()  # loading the model would show one; the steps are reported instead
    updater = Updater(Policy(model, training), training)
    state = _load_newest_checkpoint(paths, updater)
    index = open_index(paths, blend=storage.blend, discount=storage.discount)
    tried = variants(training, caps)
    used, tokens, lags, found, cosines = [], [], [], [], []
    for step in reversed(recorded_steps(paths, MAIN)):
        rows = read_ledger(paths, MAIN, step)
        if len(used) == steps or rows is None or step > state.step or not rows.num_rows:
            continue
        batch = index.gather(rows)
        sound = find_trainable_rows(batch, updater.policy.row_limits)[0]
        batch, powers = select_rows(batch, sound), rows["power"].take(sound).to_pylist()
        if not branching_tokens(batch, range(len(sound))):
            continue
        figures, gradients = _evaluate(updater, batch, powers, tried)
        used.append(step)
        found.append(figures)
        cosines.append(_cosines(gradients))
        tokens.append(branching_tokens(batch, range(len(sound))))
        lags.append(float(np.mean(state.step - batch.policy_versions)))
        reporter().stage("steps compared", len(used), steps)
    if not used:
        raise InputError(f"no step of run '{paths.root.name}' had rows to learn from: there is nothing to compare losses on")
    mean = np.mean(cosines, axis=0)
    names = [variant.name for variant in tried]
    return Comparison(
        version=state.step,
        steps=tuple(used),
        branching_tokens=tuple(tokens),
        lags=tuple(lags),
        tried={name: tuple(step[name] for step in found) for name in names},
        cosines={one: {other: float(mean[i, j]) for j, other in enumerate(names)} for i, one in enumerate(names)},
    )


def _load_newest_checkpoint(paths: RunPaths, updater: Updater) -> TrainerState:
    """Load the newest whole checkpoint into the policy.

    Raises:
        DataError: no checkpoint is whole.
    """
    for step in reversed(checkpoint_steps(paths)):
        try:
            state = load_checkpoint(paths, step, updater.policy, updater.optimiser, lineage=lineage_at(paths, step))
        except (DataError, FileNotFoundError) as error:  # damaged, or just removed by a run in progress
            reporter().say(f"passed over: {error}")
            continue
        updater.kl, updater.moving = state.kl, state.moving
        return state
    raise DataError(f"no checkpoint of run '{paths.root.name}' is whole: resume the run, which makes it again")


def _evaluate(
    updater: Updater, batch: Batch, powers: Sequence[str], tried: Sequence[Variant]
) -> tuple[dict[str, VariantResult], torch.Tensor]:
    """Figures of every variant on one batch, and their gradients [variants, adapter weights]."""
    rows, weights = range(len(batch.returns)), updater.policy.parameters()
    constants = branching_tokens(batch, rows), branching_decisions(batch, rows)
    gradients = torch.zeros(len(tried), sum(weight.numel() for weight in weights))
    losses = np.zeros(len(tried))
    slopes: list[list[np.ndarray]] = [[] for _ in tried]
    advantages = updater.advantages(batch, powers)[0]
    seen = []
    for micro in updater.cut(batch, rows).micro_batches:
        if not len(micro.batch_row):
            continue
        chosen = updater.policy.masked_logprobs(micro).chosen
        seen.append(micro.batch_row)
        for place, variant in enumerate(tried):
            leaf = chosen.detach().requires_grad_()
            kind = policy_loss(variant.settings.loss)
            tokens = DrawnTokens(
                logprobs=leaf,
                behaviour=torch.from_numpy(micro.behaviour).to(chosen.device),
                advantages=torch.from_numpy(advantages[micro.batch_row]).to(chosen.device),
                decisions=torch.from_numpy(micro.batch_row).to(chosen.device),
                anchor=chosen.detach() if variant.settings.importance_cap else None,
            )
            loss = kind.of(tokens, variant.settings).loss.sum() / kind.denominator(*constants)
            (slope,) = torch.autograd.grad(loss, leaf)
            last = place == len(tried) - 1
            parts = torch.autograd.grad(chosen, weights, grad_outputs=slope, retain_graph=not last)
            gradients[place] += torch.cat([part.flatten() for part in parts]).cpu()
            losses[place] += float(loss.detach())
            slopes[place].append(slope.cpu().numpy())
    at = np.concatenate(seen)
    figures = {
        variant.name: _figures(losses[place], np.concatenate(slopes[place]), advantages[at], gradients[place])
        for place, variant in enumerate(tried)
    }
    return figures, gradients


def _figures(loss: float, slopes: np.ndarray, advantages: np.ndarray, gradient: torch.Tensor) -> VariantResult:
    taught = advantages != 0
    weights = np.abs(slopes[taught].astype(np.float64) / advantages[taught])
    return VariantResult(
        loss=float(loss),
        masked_share=float((weights == 0).mean()) if len(weights) else 0.0,
        effective_sample_share=effective_share(weights) if len(weights) else 0.0,
        gradient_norm=float(gradient.norm()),
    )


def _cosines(gradients: torch.Tensor) -> np.ndarray:
    """Cosines of the gradients [variants, variants]."""
    unit = gradients / gradients.norm(dim=1, keepdim=True)
    return (unit @ unit.T).numpy()
