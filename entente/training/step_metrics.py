"""Metrics of a step, from its branching tokens and rows."""

from collections.abc import Collection, Mapping, Sequence

import numpy as np
import pyarrow as pa

from entente.telemetry.metrics import ORDER_KINDS
from entente.training.micro_batches import branching_indices
from entente.training.objective import StepFigures, join_tokens
from storage.gather import Batch

_LAGS = 3


def update_metrics(updates: Sequence[StepFigures]) -> dict[str, float]:
    if not updates:
        return {"train/skipped": 1.0, "train/branching_tokens": 0.0}
    seen = join_tokens([update.tokens for update in updates])
    return {
        "train/loss": float(np.mean([update.loss for update in updates])),
        "train/grad_norm": float(np.max([update.grad_norm for update in updates])),
        "train/skipped": float(np.mean([update.skipped for update in updates])),
        "train/branching_tokens": float(len(seen)),
        "train/unique_tokens": float(sum(update.unique_tokens for update in updates)),
        "train/plan_s": sum(update.plan_s for update in updates),
        "train/forward_s": sum(update.forward_s for update in updates),
        "train/backward_s": sum(update.backward_s for update in updates),
        **_token_metrics(seen),
    }


def _token_metrics(seen: np.ndarray) -> dict[str, float]:
    ratio = np.exp(seen["log_ratio"].astype(np.float64))
    off = np.abs(ratio - 1)
    masked = _masked(seen)
    return {
        "train/ratio_deviation_p50": float(np.quantile(off, 0.5)),
        "train/ratio_deviation_p99": float(np.quantile(off, 0.99)),
        "train/ratio_deviation_max": float(off.max()),
        "train/clip_ratio_low": float(seen["clipped_low"].mean()),
        "train/clip_ratio_high": float(seen["clipped_high"].mean()),
        "train/outlier_share": float(seen["outlier"].mean()),
        "train/masked_share": float(masked.mean()),
        "train/ess_ratio": effective_share(np.where(seen["outlier"], 0.0, ratio)),
        "train/entropy": float(seen["entropy"].mean(dtype=np.float64)),
        **_quantiles("entropy", seen["entropy"], p10=0.1, p50=0.5),
        **_quantiles("legal_mass", seen["legal_mass"], p10=0.1, p50=0.5),
        **_quantiles("kl", seen["kl"], p50=0.5, p99=0.99),
        **_thought_metrics(seen),
    }


def _masked(seen: np.ndarray) -> np.ndarray:
    return seen["clipped_low"] | seen["clipped_high"] | seen["outlier"]


def masked_metrics(
    updates: Sequence[StepFigures], batch: Batch, outcomes: Mapping[int, Sequence[int]], ends: Collection[int]
) -> dict[str, float]:
    """Masked share of the branching tokens of each kind of order, with and without effect; a kind without tokens is absent.

    Args:
        outcomes: by decision id, as from `order_outcomes`.
        ends: ids of the tokens that end an order's line.
    """
    if not updates:
        return {}
    seen = join_tokens([update.tokens for update in updates])
    seen = seen[np.argsort(seen["batch_row"], kind="stable")]  # the tokens of a row are in order, and in one update
    index, _ = branching_indices(batch, np.unique(seen["batch_row"]))
    orders = _order_of_position(batch, ends)[index]
    kinds = np.full(len(seen), -1)
    for place, (row, from_end) in enumerate(zip(seen["batch_row"].tolist(), orders.tolist(), strict=True)):
        own = outcomes.get(int(batch.decision_ids[row]), ())
        if not seen["in_thought"][place] and from_end <= len(own):
            kinds[place] = own[len(own) - from_end]
    masked, metrics = _masked(seen), {}
    for number, kind in enumerate(ORDER_KINDS):
        for failed, effect in enumerate(("effect", "no_effect")):
            if (tokens := kinds == 2 * number + failed).any():
                metrics[f"train/masked_{kind}_{effect}_share"] = float(masked[tokens].mean())
    return metrics


def _order_of_position(batch: Batch, ends: Collection[int]) -> np.ndarray:
    """Per completion position: the place of its order, counted from the completion's last one, which is 1."""
    starts, lengths = batch.input_offsets[:-1] + batch.prompt_lens, np.diff(batch.completion_offsets)
    at = np.repeat(starts - batch.completion_offsets[:-1], lengths) + np.arange(batch.completion_offsets[-1])
    ended = np.append(np.cumsum(np.isin(batch.input_ids[at], list(ends))[::-1])[::-1], 0)
    return ended[:-1] - np.repeat(ended[batch.completion_offsets[1:]], lengths)


def _thought_metrics(seen: np.ndarray) -> dict[str, float]:
    """Thought and order tokens separately; empty without a thought token."""
    if not seen["in_thought"].any():
        return {}
    gradients = np.abs(np.where(np.isfinite(seen["gradient"]), seen["gradient"], 0.0).astype(np.float64))
    metrics = {"train/thought_tokens": float(seen["in_thought"].sum())}
    if gradients.any():
        metrics["train/thought_grad_share"] = float(gradients[seen["in_thought"]].sum() / gradients.sum())
    for part, tokens in {"thought": seen["in_thought"], "order": ~seen["in_thought"]}.items():
        figures = {"log_ratio_mean": np.abs(seen["log_ratio"]), "entropy_mean": seen["entropy"], "kl_mean": seen["kl"]}
        for name, values in figures.items():
            known = values[tokens & np.isfinite(values)]
            if len(known):
                metrics[f"train/{part}_{name}"] = float(known.mean(dtype=np.float64))
    return metrics


def effective_share(weights: np.ndarray) -> float:
    """Effective sample size over sample size: (sum w)^2 / (n sum w^2) (Kish 1965)."""
    squares = float(np.square(weights).sum())
    return float(weights.sum()) ** 2 / (len(weights) * squares) if squares else 0.0


def _quantiles(name: str, values: np.ndarray, **which: float) -> dict[str, float]:
    known = values[np.isfinite(values)].astype(np.float64)
    return {f"train/{name}_{suffix}": float(np.quantile(known, q)) for suffix, q in which.items()} if len(known) else {}


def lag_zero_metrics(updates: Sequence[StepFigures], batch: Batch, version: int) -> dict[str, float]:
    """First-update ratios of tokens that this version sampled: whether trainer and engine agree. `version`: before the step."""
    if not updates:
        return {}
    first = updates[0].tokens
    gap = np.abs(first["log_ratio"][batch.policy_versions[first["batch_row"]] == version].astype(np.float64))
    if not len(gap):
        return {}
    return {
        "train/log_ratio_lag0_mean": float(gap.mean()),
        "train/log_ratio_lag0_p50": float(np.quantile(gap, 0.5)),
        "train/log_ratio_lag0_p99": float(np.quantile(gap, 0.99)),
        "train/log_ratio_lag0_max": float(gap.max()),
        "train/ratio_lag0_deviation_p50": float(np.quantile(np.expm1(gap), 0.5)),
        "train/ratio_lag0_deviation_p99": float(np.quantile(np.expm1(gap), 0.99)),
    }


def selection_metrics(rows: pa.Table, counts: dict[str, int], batch: Batch) -> dict[str, float]:
    """`counts` come from the selection; empty for a repeated step. A step without rows has no mean return and no lag."""
    lag = np.asarray(rows.column("policy_lag"))
    metrics = {"train/decisions": float(rows.num_rows), "train/tokens": float(len(batch.input_ids))}
    if len(batch.returns):
        metrics["train/reward"] = float(batch.returns.mean())
    return metrics | _lags(lag) | {f"train/groups_{name}": float(count) for name, count in counts.items()}


def _lags(lag: np.ndarray) -> dict[str, float]:
    if not len(lag):
        return {}
    bounds = {"train/policy_lag_p50": float(np.quantile(lag, 0.5)), "train/policy_lag_max": float(lag.max())}
    shares = {f"train/policy_lag_{value}_share": float((lag == value).mean()) for value in range(_LAGS)}
    return bounds | shares | {"train/policy_lag_more_share": float((lag >= _LAGS).mean())}


def rate_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    seconds = metrics["train/update_s"]
    names = {"train/tokens": "train/tokens_per_s", "train/branching_tokens": "train/branching_tokens_per_s"}
    names |= {"train/unique_tokens": "train/unique_tokens_per_s"}
    return {rate: metrics[name] / seconds for name, rate in names.items() if name in metrics and seconds > 0}
