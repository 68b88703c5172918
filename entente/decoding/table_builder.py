"""Builds legal tables for one tokenizer, and reads completions as orders."""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from entente.decoding.codec import Codec
from entente.decoding.legal_table import END, LegalTable
from entente.decoding.option_trie import TokenLines, assemble
from entente.decoding.thinking import Thinking
from entente.game.legal import WAIVE, LegalOrders, OrderKind
from entente.telemetry.errors import DataError, InputError

_Options = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Rows, roots and following roots of the options of a table; see `assemble`."""


class TableBuilder:
    def __init__(self, codec: Codec, memo: int = 1024, thinking: Thinking | None = None) -> None:
        self._codec = codec
        self._thinking = thinking
        self.table = lru_cache(maxsize=memo)(self._build)
        self._lines = TokenLines()
        self._known: tuple[dict[str, int], dict[str, int]] = {}, {}
        """Rows of answer lines in `_lines`: with a line break, and with the end token."""
        if thinking is not None:
            (self._end_of_thought,) = self._lines.add([(thinking.marker, *thinking.closing)])

    def spell(self, orders: Sequence[str], legal: LegalOrders) -> list[int]:
        """Token ids of orders given in site order (builds, then waives). Raises InputError if one is not legal."""
        allowed = {WAIVE} if legal.kind is OrderKind.BUILD else set[str]()
        if illegal := set(orders) - allowed.union(*legal.options):
            raise InputError(f"{legal.power} cannot order {min(illegal)!r}: it is not legal in this {legal.kind} phase")
        return self.spell_lines(orders)

    def spell_lines(self, lines: Sequence[str]) -> list[int]:
        ids: list[int] = []
        for line in lines:
            ids.extend(self._codec.encode_order(line))
            ids.append(self._codec.separator_id)
        ids[-1] = self._codec.eos_id
        return ids

    def read(self, completion: Sequence[int], legal: LegalOrders) -> list[str]:
        """Orders of a completion, with waives, without its thought. Raises DataError if it is not a legal order set."""
        by_site = [{self._codec.encode_order(order): order for order in options} for options in legal.options]
        if legal.kind in (OrderKind.BUILD, OrderKind.DISBAND):  # a line may belong to any site, and names it
            waive = {self._codec.encode_order(WAIVE): WAIVE}
            by_site = [{ids: order for orders in (*by_site, waive) for ids, order in orders.items()}] * legal.picks
        orders, line = [], []
        for token in completion if self._thinking is None else self._thinking.split(completion)[1]:
            if token in (self._codec.separator_id, self._codec.eos_id):
                texts = by_site[len(orders)] if len(orders) < len(by_site) else {}
                if tuple(line) not in texts:
                    raise DataError(f"line {len(orders) + 1} of the completion of {legal.power} is not a legal order")
                orders.append(texts[tuple(line)])
                line = []
            else:
                line.append(int(token))
        return orders

    def order_logprobs(self, completion: Sequence[int], logprobs: Sequence[float]) -> list[float]:
        """Log-probability of each order given those before it, nats: the sum over its tokens and end mark; no thought."""
        first = 0 if self._thinking is None else len(completion) - len(self._thinking.split(completion)[1])
        ends = np.isin(completion[first:], (self._codec.separator_id, self._codec.eos_id))
        of_orders = np.asarray(logprobs, np.float64)[first:]
        sums: list[float] = np.bincount(np.cumsum(ends) - ends, of_orders).tolist()
        return sums

    def _build(self, legal: LegalOrders) -> LegalTable:
        is_per_site = legal.kind in (OrderKind.MOVEMENT, OrderKind.RETREAT)
        rows, roots, following = self._one_order_per_site(legal) if is_per_site else self._choice_of_sites(legal)
        rule = None
        if self._thinking is not None:
            # The end of the thought is a separate root, before the others.
            rule, ends_completion = self._thinking.rule, following == END
            rows = np.concatenate([[self._end_of_thought], rows])
            roots = np.concatenate([[0], roots + 1])
            following = np.concatenate([[1], np.where(ends_completion, END, following + 1)])
        offsets, token_ids, next_nodes, longest = assemble(self._lines, rows, roots, following)
        return LegalTable(
            offsets=offsets,
            token_ids=token_ids,
            next_nodes=next_nodes,
            longest=longest + (rule.budget if rule else 0),
            thought=rule,
        )

    def _rows(self, lines: Sequence[str], is_last: bool) -> list[int]:
        known = self._known[is_last]
        try:
            return [known[line] for line in lines]
        except KeyError:
            end = self._codec.eos_id if is_last else self._codec.separator_id
            new = [line for line in dict.fromkeys(lines) if line not in known]
            known.update(zip(new, self._lines.add([(*self._codec.encode_order(line), end) for line in new]), strict=True))
            return [known[line] for line in lines]

    def _one_order_per_site(self, legal: LegalOrders) -> _Options:
        last, lines = len(legal.sites) - 1, legal.options
        others = [line for own in lines[:-1] for line in own]
        self._codec.encode_orders([*others, *lines[-1]])
        rows = self._rows(others, False) + self._rows(lines[-1], True)
        roots = np.repeat(np.arange(last + 1), [len(own) for own in lines])
        return np.array(rows), roots, np.where(roots == last, END, roots + 1)

    def _choice_of_sites(self, legal: LegalOrders) -> _Options:
        """Options per state (orders so far, first open site) of a build or disband. Sites are chosen in ascending order, so each
        order set has one path."""
        picks, sites, may_waive = legal.picks, len(legal.sites), legal.kind == OrderKind.BUILD
        states = {(0, 0)}
        for ordered in range(1, picks):
            for before, first in [state for state in states if state[0] == ordered - 1]:
                states |= {(ordered, site + 1) for site in self._open_sites(before, first, picks, sites, may_waive)}
            if may_waive:
                states.add((ordered, sites))
        # States are sorted by orders so far, so every edge leads to a higher root.
        number = {state: index for index, state in enumerate(sorted(states))}

        lines = [*legal.options, (WAIVE,)]
        rows, roots, following = [], [], []
        for (ordered, first), root in number.items():
            chosen = [(site, site + 1) for site in self._open_sites(ordered, first, picks, sites, may_waive)]
            for site, first_open in [*chosen, (sites, sites)] if may_waive else chosen:  # the last entry of `lines` is a waive
                target = number.get((ordered + 1, first_open), END)
                choices = self._rows(lines[site], target == END)
                rows += choices
                roots += [root] * len(choices)
                following += [target] * len(choices)
        return np.array(rows), np.array(roots), np.array(following)

    @staticmethod
    def _open_sites(ordered: int, first: int, picks: int, sites: int, may_waive: bool) -> range:
        """Sites available for the next order. A disband must leave enough sites for the remaining ones."""
        return range(first, sites if may_waive else sites - (picks - ordered) + 1)
