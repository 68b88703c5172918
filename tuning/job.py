"""What is handed to a candidate's process, and what comes back: plain values, as JSON."""

from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

from inference.settings import InferenceSettings
from records.policy_version import PolicyVersion
from tuning.figures import ArmFigures

State = Literal["measured", "refused", "not started", "died", "too slow"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One candidate to be measured."""

    model: Path
    settings: InferenceSettings
    requests: Path
    """File that `requests.as_table` describes."""
    policy: PolicyVersion | None
    """Version of the run whose adapter is served; None: an adapter of random weights is made."""
    adapter_rank: int = 16
    """Of an adapter that is made."""
    concurrency: int = 0
    request_rate: float = 0.0
    rounds: int = 2
    seed: int = 0

    def as_object(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self) | {
            "model": str(self.model),
            "settings": self.settings.model_dump(mode="json"),
            "requests": str(self.requests),
            "policy": self.policy.to_json() if self.policy else None,
        }

    @classmethod
    def from_object(cls, fields_given: dict[str, Any]) -> "Job":
        """What `as_object` gave."""
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
    """What came of a candidate."""

    state: State
    reason: str = ""
    """One sentence, where it was not measured."""
    log: str = ""
    """Last lines of its process's log, where it was not measured."""
    engine: str = ""
    """Which engine drew."""
    adapters: str = ""
    """How versions were served in fact: 'slots' or 'merge_reload'."""
    start_s: float = 0.0
    """Seconds until its engine was ready."""
    seconds: float = 0.0
    """Seconds of its process."""
    cpu_s: float = 0.0
    """CPU seconds of its process, its start among them; where the engine core is a process of its own, without that."""
    arms: dict[str, ArmFigures]
    """Figures by arm; none where it was not measured."""
