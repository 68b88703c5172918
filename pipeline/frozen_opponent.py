"""The frozen policy version that plays the opponents in a share of the start groups. Its decisions are not recorded.

An engine with adapter slots serves this version beside the run's own. An engine with merged weights serves one version at a time,
so a second engine serves the frozen one.
"""

import asyncio
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

from evaluation.contestants import resolve_version
from inference.choose_engine import engine_here
from inference.engine import Engine
from inference.host import EngineHost
from inference.settings import InferenceSettings
from inference.start_engine import start_engine
from records.policy_version import BASE, BASE_VERSION
from rollouts.deciders import PolicyDecider, Tokens
from rollouts.roll_out import frozen_name
from rollouts.settings import RolloutSettings
from storage.adapters import read_adapter
from storage.runs import RunPaths
from telemetry.errors import InputError
from telemetry.progress import reporter
from workers.make_engine import make_engine, serving


@dataclass(frozen=True, kw_only=True)
class FrozenOpponent:
    """The decider of the frozen version."""

    deciders: Mapping[str, PolicyDecider] = field(default_factory=dict)
    """By name of the seat; empty if there is no frozen opponent."""
    kept: frozenset[int] = frozenset()
    """Versions that the run's engine must not retire."""


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
    """Serve the frozen version on `engine`, or on a second engine that `stack` closes.

    Args:
        engine: the run's engine; it must serve only the base model yet.

    Raises:
        InputError: the run has no such version, or its workers cannot serve it.
    """
    if not rollouts.frozen_share:
        return NO_FROZEN_OPPONENT
    version = resolve_version(paths, paths.root.name, rollouts.frozen_version)
    kind = None if inference.urls else engine_here(inference)[0]
    side_by_side = serving(kind, inference.adapters, 2) == "one"
    if kind is None and version != BASE_VERSION:
        raise InputError(
            f"rollouts.frozen_version {version} needs an engine in this process: with inference.urls only version 0 can be frozen"
        )
    player = engine
    if not side_by_side:
        player = make_engine(inference.model_copy(update={"adapters": "merge_reload"}), model)
        stack.push_async_callback(lambda: host.run(player.close()))
        reporter().say(f"starting a second engine, for policy version {version} as an opponent")
        await start_engine(host, player, inference)
    if version != BASE_VERSION:
        await host.run(player.publish(await asyncio.to_thread(read_adapter, paths, version)))
        if side_by_side:  # requests without a version use the base model until the run's own version is published
            await host.run(engine.publish(BASE))
    decider = PolicyDecider(player, tokens, version)
    return FrozenOpponent(deciders={frozen_name(rollouts): decider}, kept=frozenset({version}) if side_by_side else frozenset())
