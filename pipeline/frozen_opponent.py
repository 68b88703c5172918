"""The frozen version that opponents of a share of the start groups are played by.

Where the engine serves versions side by side it holds this one too, for as long as the run plays; where it serves merged weights,
one version at a time, a second engine holds it. Its decisions are played and never kept.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

from evaluation.contestants import resolve_version
from inference.choose_engine import engine_here
from inference.engine import Engine
from inference.host import EngineHost
from inference.settings import InferenceSettings
from records.policy_version import BASE, BASE_VERSION
from rollouts.deciders import Decider, PolicyDecider, Tokens
from rollouts.roll_out import frozen_name
from rollouts.settings import RolloutSettings
from storage.adapters import read_adapter
from storage.runs import RunPaths
from telemetry.errors import InputError
from telemetry.progress import reporter
from workers.make_engine import make_engine, serving


@dataclass(frozen=True, kw_only=True)
class FrozenOpponent:
    """Who plays for the frozen version, and which versions the run's engine must therefore keep."""

    deciders: Mapping[str, Decider] = field(default_factory=dict)
    kept: frozenset[int] = frozenset()


NO_FROZEN_OPPONENT = FrozenOpponent()


async def open_frozen(
    stack: AsyncExitStack,
    paths: RunPaths,
    model: Path,
    host: EngineHost,
    engine: Engine,
    tokens: Tokens,
    rollouts: RolloutSettings,
    inference: InferenceSettings,
) -> FrozenOpponent:
    """Have the frozen version served, by `engine`, which serves the base and nothing else yet, or by one that `stack` closes.

    Raises:
        InputError: the run has no such version, or its workers cannot hold it.
    """
    if not rollouts.frozen_share:
        return NO_FROZEN_OPPONENT
    version = resolve_version(paths, paths.root.name, rollouts.frozen_version)
    kind = None if inference.urls else engine_here(inference)[0]
    side_by_side = serving(kind, inference.adapters, 2) == "one"
    if kind is None and version != BASE_VERSION:
        raise InputError(
            f"rollouts.frozen_version {version} needs an engine in this process: workers by URL can freeze the base alone, 0"
        )
    player = engine
    if not side_by_side:
        player = make_engine(inference.model_copy(update={"adapters": "merge_reload"}), model)
        stack.push_async_callback(_closed(host, player))
        reporter().say(f"starting a second engine, for policy version {version} as an opponent")
        await asyncio.wait_for(host.run(player.start()), inference.start_timeout_s)
    if version != BASE_VERSION:
        await host.run(player.publish(await asyncio.to_thread(read_adapter, paths, version)))
        if side_by_side:  # what is drawn without a version named is the base's until the run's own version comes
            await host.run(engine.publish(BASE))
    decider = PolicyDecider(player, tokens, version)
    return FrozenOpponent(deciders={frozen_name(rollouts): decider}, kept=frozenset({version}) if side_by_side else frozenset())


def _closed(host: EngineHost, engine: Engine) -> Callable[[], Awaitable[None]]:
    async def close() -> None:
        await host.run(engine.close())

    return close
