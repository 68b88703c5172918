"""Order accuracy by game year and by number of units: where a model orders as its teacher does.

An order counts if each of its tokens is the likeliest legal one, given the teacher's tokens before it (teacher forcing), as in
the accuracy that DipNet reports (Paquette et al. 2019, arXiv 1909.02128).
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from entente.training.imitation.examples import Example
from entente.training.imitation.loss import HeldOutFigures

YEARS = (1901, 1903, 1906, 1911, 1916)
"""First years of the groups; the last is open."""
UNITS = (1, 3, 5, 8, 12)
"""Smallest numbers of orders of the groups; the last is open."""


def accuracy_table(examples: Sequence[Example], figures: HeldOutFigures) -> dict[str, Any]:
    """Share and number of orders: all, by year, and by number of orders in a movement phase."""
    counts = np.bincount(figures.example, minlength=len(examples))[figures.example]
    years = np.array([int(each.phase[1:-1]) for each in examples])[figures.example]
    moves = np.array([each.phase.endswith("M") for each in examples])[figures.example]
    return {
        "orders": len(figures.by_order),
        "equal": figures.orders_equal,
        "order_loss": figures.order_loss,
        "by_year": dict(_groups(figures.by_order, years, YEARS)),
        "by_units": dict(_groups(figures.by_order[moves], counts[moves], UNITS)),
    }


def _groups(equal: np.ndarray, values: np.ndarray, firsts: Sequence[int]) -> Iterator[tuple[str, dict[str, float]]]:
    for place, first in enumerate(firsts):
        last = firsts[place + 1] - 1 if place + 1 < len(firsts) else None
        inside = (values >= first) & (values <= (np.inf if last is None else last))
        if inside.any():
            name = f"{first} on" if last is None else str(first) if last == first else f"{first} to {last}"
            yield name, {"orders": int(inside.sum()), "equal": float(equal[inside].mean())}


def accuracy_sentences(tables: Mapping[str, Mapping[str, Any]]) -> list[str]:
    sentences = []
    for source, table in tables.items():
        parts = [f"{table['equal']:.1%} of {table['orders']:,} orders equal"]
        for what, groups in (("by year", table["by_year"]), ("by units", table["by_units"])):
            parts.append(f"{what}: " + ", ".join(f"{name} {group['equal']:.1%}" for name, group in groups.items()))
        sentences.append(f"{source}: {'; '.join(parts)}")
    return sentences
