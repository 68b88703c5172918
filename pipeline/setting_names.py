"""Names of settings: which of a run's settings matter first, and which one a misspelled name probably means."""

from collections.abc import Collection, Iterator
from difflib import SequenceMatcher

from pydantic import BaseModel

FIRST_SETTINGS = (
    "run",
    "steps",
    "seed",
    "runs_root",
    "inference.model",
    "inference.urls",
    "inference.dtype",
    "inference.max_model_length",
    "rollouts.start_groups",
    "rollouts.forks_per_group",
    "rollouts.horizon_years",
    "rollouts.policy_powers",
    "rollouts.opponents",
    "training.learning_rate",
    "training.lora_rank",
    "training.updates_per_step",
    "storage.max_policy_lag",
    "pipeline.buffer_depth",
    "evaluation.positions",
    "telemetry.wandb",
)
"""The twenty settings that `entente train --help` and Prefect's form of a training run show first, in this order."""

_ALIKE = 0.6
"""Least likeness of two last parts that is worth a question; `SequenceMatcher.ratio`, of 1."""
_SHOWN = 3
"""Places that are named where several sections have a setting of the name."""


def setting_names(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Dotted names of all settings below a class, in the order in which they are declared."""
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from setting_names(field.annotation, f"{prefix}{name}.")
        else:
            yield prefix + name


def similar_names(name: str, known: Collection[str]) -> list[str]:
    """The known settings, or the section, that `name` most resembles; none where nothing is alike enough.

    A setting of exactly that name in another section comes before one that is spelled a little differently.
    """
    sections = {each.rpartition(".")[0] for each in known} - {""}
    section, _, last = name.rpartition(".")

    def likeness(other: str) -> tuple[float, float]:
        its_section, _, its_last = other.rpartition(".")
        return _likeness(last, its_last), _likeness(section, its_section)

    ranked = sorted(sorted({*known, *sections} - {name}), key=likeness, reverse=True)
    if not ranked or likeness(ranked[0])[0] < _ALIKE:
        return []
    return [each for each in ranked if each.rpartition(".")[2] == last][:_SHOWN] or ranked[:1]


def _likeness(one: str, other: str) -> float:
    """1 for equal words; a word that begins the other is alike enough to be asked about."""
    ratio = SequenceMatcher(None, one, other).ratio()
    return max(ratio, _ALIKE) if one and other.startswith(one) else ratio
