"""Ends of playouts that a value head values: their prompts, all of one round in one batch.

A leaf is the text of the prompt that a version would get there. This module plays nothing and runs no model.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from records.value_head import CENTRES_SCALE
from rollouts.deciders import Tokens
from search.playouts import Leaf
from search.settings import SearchSettings


class ValueSource(Protocol):
    """A value head with its model."""

    async def values(self, prompts: Sequence[Sequence[int]]) -> npt.NDArray[np.float32]:
        """What is foretold after each of the prompts, token ids: [n, 2] as in records/value_head.py."""
        ...


class Leaves:
    """Values the ends of playouts with the head of one version."""

    def __init__(self, source: ValueSource, tokens: Tokens) -> None:
        self._source, self._tokens = source, tokens
        self.prompts = tokens.prompts

    async def value(self, ends: Sequence[float | Leaf], settings: SearchSettings) -> list[float]:
        """Values of the ends, in the unit of `value_of`; an end that is a number has its value already."""
        leaves = [end for end in ends if isinstance(end, tuple)]
        if not leaves:
            return [end for end in ends if not isinstance(end, tuple)]
        found = await self._source.values([self._tokens.form.ids(*leaf) for leaf in leaves])
        foretold = iter((found[:, 1] * CENTRES_SCALE if settings.counted == "centres" else found[:, 0]).tolist())
        return [next(foretold) if isinstance(end, tuple) else end for end in ends]
