"""The constrained decoding of the old system: a trie of legal orders for each request, followed in Python.

As its vLLM logits processor: one trie for each request over the token ids of every legal order of every unit, each order encoded
three times (alone, with a line feed, with carriage return and line feed). State and mask are computed row by row, with a mask of
the whole vocabulary. At the end of a line the unit is done, moves to the same province are forbidden, and the whole trie is built
again. After the wanted number of orders only the closing tag is allowed. It is also allowed before, so units can be left out.
Measured there: 3.6 ms a trie, 4.2 ms a mask for a batch of 32, an estimated 5 to 13 % of a step.
Cheaper than the original: blank lines are illegal, the closing tag is one token, and a build phase counts the builds owed.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tokenizers import Tokenizer

_ENDINGS = ("", "\n", "\r\n")
MOVES, WANTED = "valid_moves", "orders_wanted"
"""Keys of `SamplingParams.extra_args`: legal orders, and their number."""


class OrderTrie:
    """The position of one completion in its trie, and the tokens allowed next."""

    def __init__(self, tokenizer: Tokenizer, moves: Mapping[str, Sequence[str]], wanted: int, eos: int, separator: int) -> None:
        """`moves`: legal orders by unit; `wanted`: number of orders after which the completion ends."""
        self._tokenizer, self._eos, self._separator = tokenizer, eos, separator
        self._moves = {unit: list(orders) for unit, orders in moves.items()}
        self._left, self._line = wanted, list[int]()
        self._build()

    def allowed(self) -> list[int]:
        """Token ids allowed next."""
        if self._left <= 0 or not self._root:
            return [self._eos]
        ids = list(self._node)
        if not self._line or self._separator in self._node:  # at the end of a whole order
            ids.append(self._eos)
        return ids

    def advance(self, token: int) -> None:
        """Follow the drawn `token`."""
        if token == self._eos:
            return
        self._line.append(token)
        self._node = self._node.get(token, {})
        if token == self._separator:
            self._end_of_line()

    def _end_of_line(self) -> None:
        order = self._tokenizer.decode(self._line, skip_special_tokens=False).strip()
        given = next((unit for unit, orders in self._moves.items() if order in orders), None)
        self._moves.pop(given, None)  # type: ignore[arg-type]  # nothing has the key None
        if target := _target(order):
            self._moves = {
                unit: [own for own in orders if _target(own) != target] or orders for unit, orders in self._moves.items()
            }
        self._left, self._line = self._left - 1, []
        self._build()

    def _build(self) -> None:
        self._root: dict[int, Any] = {}
        for orders in self._moves.values():
            for order in orders:
                for ending in _ENDINGS:
                    node = self._root
                    for token in self._tokenizer.encode(order + ending, add_special_tokens=False).ids:
                        node = node.setdefault(token, {})
        self._node = self._root


def _target(order: str) -> str:
    """The province that a unit moves to; empty for other orders."""
    words = order.split(" ")
    return words[3][:3] if len(words) > 3 and words[2] == "-" else ""


class TrieRows:
    """The rows of a batch: their tries, and the engine's growing lists of drawn tokens."""

    def __init__(self) -> None:
        self._rows: dict[int, tuple[OrderTrie, list[int]]] = {}
        self._seen: dict[int, int] = {}

    def add(self, row: int, trie: OrderTrie, output: list[int]) -> None:
        """Add a request as `row`."""
        self._rows[row], self._seen[row] = (trie, output), 0

    def remove(self, row: int) -> None:
        """Remove the request of `row`."""
        self._rows.pop(row, None)
        self._seen.pop(row, None)

    def move(self, source: int, target: int, swap: bool) -> None:
        """Move row `source` to row `target`; with `swap` exchange them."""
        there = self._rows.pop(target, None), self._seen.pop(target, 0)
        if source in self._rows:
            self._rows[target], self._seen[target] = self._rows.pop(source), self._seen.pop(source)
        if swap and there[0] is not None:
            self._rows[source], self._seen[source] = there[0], there[1]

    def mask(self, logits: torch.Tensor) -> torch.Tensor:
        """Set the logits [rows, vocabulary] of tokens that continue no legal order to -inf, in place."""
        for row, (trie, output) in self._rows.items():
            if row >= len(logits):
                continue
            while self._seen[row] < len(output) and (token := output[self._seen[row]]) >= 0:
                trie.advance(token)
                self._seen[row] += 1
            forbidden = torch.ones(logits.shape[1], dtype=torch.bool)
            forbidden[trie.allowed()] = False
            logits[row][forbidden] = float("-inf")
        return logits
