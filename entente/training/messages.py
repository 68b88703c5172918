"""Messages from the trainer process to the flow, sent as JSON."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from entente.records.policy_version import PolicyVersion

MISMATCH_ALARM = 0.05
"""Largest plausible mean |log ratio| at lag 0, nats. Above it, mask, temperature, ids or weights of trainer and engine differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedStep:
    """A step that was trained and published."""

    published: PolicyVersion
    """The policy version that the step made; its number is the step's."""
    metrics: dict[str, float]
    """Metrics of the step, by their names in `entente.telemetry.metrics`."""

    def to_json(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {"published": self.published.to_json(), "metrics": self.metrics}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "TrainedStep":
        """What `to_json` wrote."""
        return cls(published=PolicyVersion.from_json(fields["published"]), metrics=fields["metrics"])


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumePoint:
    """The state from which an opened run continues."""

    last: TrainedStep
    """The newest step with a whole checkpoint; in a fresh run the base model, without metrics."""
    set_aside: tuple[str, ...]
    """One sentence for each damaged checkpoint that was skipped."""

    @property
    def step_done(self) -> int:
        """The newest step with a whole checkpoint; 0 in a fresh run."""
        return self.last.published.version

    def to_json(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {"last": self.last.to_json(), "set_aside": list(self.set_aside)}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "ResumePoint":
        """What `to_json` wrote."""
        return cls(last=TrainedStep.from_json(fields["last"]), set_aside=tuple(fields["set_aside"]))


def mismatch_warning(step: int, metrics: Mapping[str, float]) -> str:
    """A warning if trainer and engine disagree at lag 0; else empty."""
    if not metrics.get("train/mismatch_alarm"):
        return ""
    mean = metrics["train/log_ratio_lag0_mean"]
    return (
        f"step {step}: at lag 0 the log-probabilities of trainer and engine are {mean:.2g} nats apart on average, more than "
        f"{MISMATCH_ALARM}: look for a mask, a temperature, token ids or an adapter that only one of them has"
    )
