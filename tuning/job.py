"""The input of a candidate's process and its result, as plain values for JSON."""

from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

from inference.settings import InferenceSettings
from records.policy_version import PolicyVersion
from tuning.figures import ArmFigures

State = Literal["measured", "refused", "not started", "died", "too slow"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One candidate to measure."""

    model: Path
    settings: InferenceSettings
    requests: Path
    """File with the table of `requests.as_table`."""
    policy: PolicyVersion | None
    """Policy version whose adapter is served; None: an adapter with random weights."""
    adapter_rank: int = 16
    """Rank of an adapter with random weights."""
    concurrency: int = 0
    request_rate: float = 0.0
    rounds: int = 2
    seed: int = 0

    def as_object(self) -> dict[str, Any]:
        """The job as a JSON object."""
        return asdict(self) | {
            "model": str(self.model),
            "settings": self.settings.model_dump(mode="json"),
            "requests": str(self.requests),
            "policy": self.policy.to_json() if self.policy else None,
        }

    @classmethod
    def from_object(cls, fields_given: dict[str, Any]) -> "Job":
        """The job of an object that `as_object` returned."""
        names = {each.name for each in fields(cls)}
        return cls(
            **{name: value for name, value in fields_given.items() if name in names}
            | {
                "model": Path(fields_given["model"]),
                "settings": InferenceSettings.model_validate(fields_given["settings"]),
                "requests": Path(fields_given["requests"]),
                "policy": PolicyVersion.from_json(fields_given["policy"]) if fields_given["policy"] else None,
            }
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The result of a candidate."""

    state: State
    reason: str = ""
    """Why it was not measured, in one sentence."""
    log: str = ""
    """Last lines of its log, if it was not measured."""
    engine: str = ""
    """Name of the engine."""
    adapters: str = ""
    """How adapters were served: 'slots' or 'merge_reload'."""
    start_s: float = 0.0
    """Seconds until the engine was ready."""
    seconds: float = 0.0
    """Wall seconds of its process."""
    cpu_s: float = 0.0
    """CPU seconds of its process with the start, without an engine core in another process."""
    arms: dict[str, ArmFigures]
    """Figures by arm; empty if it was not measured."""
