"""Names of settings: the twenty most important ones, and suggestions for a misspelled name."""

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

_SIMILARITY_MIN = 0.6
"""Lowest similarity of two last parts for a suggestion (`SequenceMatcher.ratio`, 0 to 1)."""
_SUGGESTIONS_MAX = 3
"""Suggestions at most, if several sections have a setting of that name."""


def setting_names(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Dotted names of all settings below a class, in the order in which they are declared."""
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from setting_names(field.annotation, f"{prefix}{name}.")
        else:
            yield prefix + name


def similar_names(name: str, known: Collection[str]) -> list[str]:
    """The known settings or the section most similar to `name`; empty if none is similar enough.

    A setting with exactly that last part in another section ranks before a similar spelling.
    """
    sections = {each.rpartition(".")[0] for each in known} - {""}
    section, _, last = name.rpartition(".")

    def similarity(other: str) -> tuple[float, float]:
        its_section, _, its_last = other.rpartition(".")
        return _similarity(last, its_last), _similarity(section, its_section)

    ranked = sorted(sorted({*known, *sections} - {name}), key=similarity, reverse=True)
    if not ranked or similarity(ranked[0])[0] < _SIMILARITY_MIN:
        return []
    return [each for each in ranked if each.rpartition(".")[2] == last][:_SUGGESTIONS_MAX] or ranked[:1]


def _similarity(one: str, other: str) -> float:
    """1 for equal words; at least _SIMILARITY_MIN if `one` is a prefix of `other`."""
    ratio = SequenceMatcher(None, one, other).ratio()
    return max(ratio, _SIMILARITY_MIN) if one and other.startswith(one) else ratio
