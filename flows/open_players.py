"""Opens engines for the policy versions of a match. Scripted players need none.

Versions of two runs may have the same number, so each version gets its own number in the engine. An engine that serves several
versions at once (LoRA slots, or the torch engine) serves them all. If it serves one at a time, as merged weights, each version
has its own engine, and the engines take turns on one thread.
"""

import hashlib
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from decoding.codec import Codec
from decoding.model_files import model_fingerprint
from evaluation.contestants import Contestant
from evaluation.repeated import RepeatedDecider
from evaluation.settings import MatchSettings
from flows.open_run import prepare_model
from inference.choose_engine import engine_here
from inference.engine import Engine
from inference.host import EngineHost
from inference.settings import InferenceSettings
from inference.start_engine import start_engine
from pipeline.run_settings import RunSettings, settings_of
from pipeline.threads import apply_threads
from records.policy_version import BASE_VERSION
from rollouts.deciders import Decider, PolicyDecider, Tokens
from storage.runs import RunPaths
from telemetry.errors import InputError
from telemetry.progress import reporter
from workers.make_engine import make_engine, serving

_HASHED_BYTES = 1 << 20
"""Bytes at the start of a weight file that are hashed to tell two models of one shape apart."""


@dataclass(kw_only=True)
class OpenPlayers:
    """Policy versions and the engines that serve them."""

    host: EngineHost
    """The thread on which deciders must be called."""
    deciders: dict[str, Decider] = field(default_factory=dict)
    """By the player's name; scripted players have none."""
    served: dict[str, tuple[Engine, Tokens, int]] = field(default_factory=dict)
    """Engine, tokens and the engine's number of each version, by the player's name."""

    def policy(self, name: str) -> tuple[Engine, Tokens]:
        """Engine and tokens of a version that its engine serves as the newest."""
        return self.served[name][:2]

    def repeated(self, name: str, repetitions: int, pick: Literal["vote", "playout"] = "vote") -> RepeatedDecider:
        """The version, drawing `repetitions` times for each decision."""
        engine, tokens, number = self.served[name]
        return RepeatedDecider(engine, tokens, number, repetitions, pick)


@asynccontextmanager
async def open_players(players: Sequence[Contestant], runs_root: Path, match: MatchSettings) -> AsyncIterator[OpenPlayers]:
    """The policy versions among `players`, each at an engine that serves it.

    Raises:
        InputError: their runs have different base models or tokenizers.
    """
    policies = [player for player in players if player.is_policy]
    async with AsyncExitStack() as stack:
        host = EngineHost("match-engine")
        stack.callback(host.close)
        opened = OpenPlayers(host=host)
        if policies:
            settings = {run: settings_of(RunPaths(runs_root / run)) for run in {player.run for player in policies}}
            settings = {run: some.model_copy(update={"runs_root": runs_root}) for run, some in settings.items()}
            first = settings[policies[0].run]
            apply_threads(max(first.threads))
            models = {run: await prepare_model(some) for run, some in settings.items()}
            check_same_base(models)
            model = models[policies[0].run]
            tokens = {run: Tokens(Codec(model), some.prompts) for run, some in settings.items()}
            for group, inference in _engines(first, policies):
                engine = make_engine(inference, model)
                stack.push_async_callback(_close, host, engine)
                reporter().say(f"starting an engine for {', '.join(player.name for player in group)}")
                await start_engine(host, engine, inference)
                for number, player in await _published(host, engine, group):
                    opened.served[player.name] = engine, tokens[player.run], number
                    opened.deciders[player.name] = (
                        opened.repeated(player.name, match.repetitions, match.pick)
                        if match.repetitions > 1
                        else PolicyDecider(engine, tokens[player.run], number)
                    )
        yield opened


def check_same_base(models: Mapping[str, Path]) -> None:
    """Refuse runs with different base models or tokenizers.

    Raises:
        InputError: names both runs and what differs.
    """
    (first, folder), *others = models.items()
    for run, other in others:
        if _digest(other / "tokenizer.json") != _digest(folder / "tokenizer.json"):
            raise InputError(f"runs '{first}' and '{run}' have different tokenizers, so their versions cannot play each other")
        weights = [sorted(each.glob("*.safetensors")) for each in (folder, other)]
        same = model_fingerprint(folder) == model_fingerprint(other)
        if not same or [_digest(file) for file in weights[0]] != [_digest(file) for file in weights[1]]:
            raise InputError(f"runs '{first}' and '{run}' have different base models, so their versions cannot play each other")


def _digest(file: Path) -> str:
    with open(file, "rb") as content:
        return hashlib.sha256(content.read(_HASHED_BYTES)).hexdigest()


def _engines(settings: RunSettings, policies: Sequence[Contestant]) -> list[tuple[list[Contestant], InferenceSettings]]:
    """The versions that each engine serves, and the engine's settings."""
    inference = settings.inference.for_evaluation
    kind = None if inference.urls else engine_here(inference)[0]
    if serving(kind, inference.adapters, len(policies)) == "each":
        return [([player], inference.model_copy(update={"adapters": "merge_reload"})) for player in policies]
    slots = max(inference.adapter_slots, len(policies))
    update: dict = {"adapter_slots": slots}
    if len(policies) > 1 and kind == "vllm_async":
        update["adapters"] = "slots"
    return [(list(policies), inference.model_copy(update=update))]


async def _published(host: EngineHost, engine: Engine, group: Sequence[Contestant]) -> list[tuple[int, Contestant]]:
    """Publish the versions and return the engine's number of each; the base model is 0 and needs no publishing."""
    numbered = []
    for place, player in enumerate(group, start=1):
        number = place if player.version else BASE_VERSION
        if number:
            await host.run(engine.publish(replace(player.policy, version=number)))
        numbered.append((number, player))
    return numbered


async def _close(host: EngineHost, engine: Engine) -> None:
    await host.run(engine.close())
