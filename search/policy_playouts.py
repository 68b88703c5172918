"""Playouts in which the searching version plays: the asynchronous path of forks, because an engine draws its orders.

Much slower than `search.playouts`. Playouts of one round run at the same time, so the engine draws for them together.
"""

from collections.abc import Sequence

from game.players import player
from rollouts.deciders import Decider, DecisionRequest
from rollouts.fork import ForkPlan, play_fork
from rollouts.seeds import dice
from search.playouts import seats_of, value_of
from search.settings import POLICY_PLAYS, SearchSettings
from telemetry.errors import EngineError

_VERSION, _SEARCHED = "the version", "the searched power"
"""Names of seats. They name no scripted player, and not the seat whose decisions a fork records."""


async def play_out_with_policy(
    request: DecisionRequest, orders: Sequence[str], name: str, settings: SearchSettings, policy: Decider, game: str
) -> float:
    """As `search.playouts.play_out`, with `policy` in the seats that draw 'policy'.

    Args:
        game: name of the playout, unique among games in progress.

    Raises:
        EngineError: a decision failed.
    """
    seats = seats_of(name, settings)
    own = seats[request.power]
    board = request.board.fork()
    plan = ForkPlan(
        name=game,
        shared_name=name,
        dice=name,
        seats={power: _VERSION if who == POLICY_PLAYS else who for power, who in seats.items()} | {request.power: _SEARCHED},
        horizon_years=settings.years,
        temperature=request.temperature,
        snapshot_id=request.snapshot_id,
    )
    deciders = {_VERSION: policy, _SEARCHED: _GivenOrders(orders, policy if own == POLICY_PLAYS else _Scripted(own))}
    fork = await play_fork(plan, board, None, None, deciders=deciders, record_plies=False)
    if fork.end is None or fork.status != "complete":
        raise EngineError(f"a playout of {request.power} in {request.board.phase} failed: {fork.reason}")
    return value_of(fork.end, request.power, settings)


class _GivenOrders:
    """Gives the orders of the first phase; then `after` decides."""

    def __init__(self, orders: Sequence[str], after: Decider) -> None:
        self._orders, self._after = orders, after

    async def decide(self, request: DecisionRequest) -> Sequence[str]:
        """See `Decider`."""
        return self._orders if request.ply == 0 else await self._after.decide(request)


class _Scripted:
    """A scripted player as a decider, with the dice that a fork gives to its seat."""

    def __init__(self, name: str) -> None:
        self._name = name

    async def decide(self, request: DecisionRequest) -> Sequence[str]:
        """See `Decider`."""
        return player(self._name)(request.legal, dice(request.dice, request.board.phase, request.power), request.board)
