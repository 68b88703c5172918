"""Opens engines for the policy versions, models and adapters of a match; scripted players need none, even with search.

Versions of one base are adapters of one engine, which renumbers them, because two runs may use the same number. A model
without a run has its own engine. The engines share one thread.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from entente.decoding.base_identity import form_hashes, identity_of
from entente.decoding.codec import Codec
from entente.decoding.model_files import max_position, recipe_prompts
from entente.evaluation.adapter_folders import adapter_prompts, check_weights
from entente.evaluation.contestants import Contestant, check_searches
from entente.evaluation.settings import PlaySettings
from entente.game.prompts import DEFAULT_PROMPTS
from entente.inference.choose_engine import make_engine
from entente.inference.engine import Engine
from entente.inference.host import EngineHost, start_engine
from entente.inference.settings import InferenceSettings
from entente.players.policy import Decider, PolicyPlayer, Tokens
from entente.players.search import SearchDecider
from entente.records.policy_version import BASE_VERSION
from entente.settings.layers import settings_of
from entente.settings.run_settings import RunSettings
from entente.telemetry.errors import InputError
from entente.telemetry.machine import apply_threads, usable_cores
from entente.telemetry.process_pool import ProcessPool
from entente.telemetry.progress import reporter
from flows.open_run import prepare_model
from storage.run_base import check_base
from storage.runs import RunPaths, hashes_file


@dataclass(kw_only=True)
class OpenPlayers:
    host: EngineHost
    """The thread on which deciders must be called."""
    deciders: dict[str, Decider] = field(default_factory=dict)
    """By the player's name; scripted players that do not search have none."""
    served: dict[str, tuple[Engine, Tokens, int]] = field(default_factory=dict)
    """Name of a version -> engine, tokens and number in the engine."""
    processes: ProcessPool | None = None
    """Processes for playouts of searching players; None: on the host's thread."""

    def decider(self, player: Contestant, play: PlaySettings) -> Decider | None:
        name = player.without_search.name
        if not player.is_policy:
            return SearchDecider(play.search, proposer=name, processes=self.processes) if player.searches else None
        policy = PolicyPlayer(*self.served[name])
        if player.searches_by(play):
            return SearchDecider(play.search, policy=policy, processes=self.processes)
        return policy


@asynccontextmanager
async def open_players(players: Sequence[Contestant], runs_root: Path, play: PlaySettings) -> AsyncIterator[OpenPlayers]:
    """Open the players' deciders and engines. Raises InputError for invalid search settings, or runs with different base
    models or tokenizers."""
    check_searches(players, play)
    # A version that plays with and without search is served once.
    policies = list({each.name: each for player in players if player.is_policy for each in [player.without_search]}.values())
    async with AsyncExitStack() as stack:
        host = EngineHost("match-engine")
        stack.callback(host.close)
        opened = OpenPlayers(host=host)
        parallel = any(each.searches_by(play) for each in players) and usable_cores() > 1
        groups = await _groups(policies, runs_root, model_threads=1 if parallel else usable_cores())
        for group in groups:
            engine = make_engine(group.inference, group.model, why_named=group.why_named)
            stack.push_async_callback(_close, host, engine)
            reporter().say(f"starting an engine for {', '.join(player.name for player in group.players)}")
            await start_engine(host, engine, group.inference)
            for number, player in await _published(host, engine, group.players):
                opened.served[player.name] = engine, group.tokens[player.run], number
        if parallel:
            opened.processes = await stack.enter_async_context(ProcessPool(usable_cores()))
        for player in players:
            if (decider := opened.decider(player, play)) is not None:
                opened.deciders[player.name] = decider
        yield opened


@dataclass(frozen=True, kw_only=True)
class _Group:
    players: Sequence[Contestant]
    model: Path
    tokens: Mapping[str, Tokens]
    """By run; that of a model is ''."""
    inference: InferenceSettings
    why_named: str = ""
    """Why `inference` names an engine; empty: the settings of a run do."""


async def _groups(policies: Sequence[Contestant], runs_root: Path, model_threads: int) -> list[_Group]:
    """What each engine serves. Sets the number of threads first, because loading a tokenizer may import torch. `model_threads`
    is for a model without a run: 1 with search, whose processes use all cores."""
    models = [player for player in policies if player.model is not None]
    versions = [player for player in policies if player.model is None]
    groups, settings = list[_Group](), dict[str, RunSettings]()
    for run in dict.fromkeys(player.run for player in versions):
        settings[run] = settings_of(RunPaths(runs_root / run)).model_copy(update={"runs_root": runs_root})
    if versions:
        first = settings[versions[0].run]
        apply_threads(max(first.threads))
        bases = {run: await prepare_model(some) for run, some in settings.items()}
        for run, folder in bases.items():
            check_base(RunPaths(runs_root / run), folder)
        check_same_base(bases, runs_root)
        base = bases[versions[0].run]
        tokens = {run: Tokens(Codec(base), some.prompts) for run, some in settings.items()}
        slots = max(first.inference.adapter_slots, len(versions))
        inference = first.inference.model_copy(update={"adapter_slots": slots})
        groups.append(_Group(players=versions, model=base, tokens=tokens, inference=inference))
    elif models:
        apply_threads(model_threads)
    for player in models:
        assert player.model is not None
        if player.adapter is None:
            prompts = recipe_prompts(player.model)
        else:
            check_weights(player.policy, player.model)
            prompts = adapter_prompts(player.adapter, player.model)
        tokens = {player.run: Tokens(Codec(player.model), prompts or DEFAULT_PROMPTS)}
        inference = model_inference(player.model)
        groups.append(_Group(players=[player], model=player.model, tokens=tokens, inference=inference, why_named=_WHY_TORCH))
    return groups


_WHY_TORCH = "it starts soonest for a model without a run"


def model_inference(folder: Path) -> InferenceSettings:
    """Engine settings of a model without a run. Such a model is small: the torch engine starts sooner than vLLM, samples about
    as fast, and takes no GPU memory from another engine."""
    return InferenceSettings(model=str(folder), engine="torch", max_model_length=max_position(folder))


def check_same_base(models: Mapping[str, Path], runs_root: Path) -> None:
    """Raise InputError, naming both runs, if two runs have different base models or tokenizers."""
    identities = {run: identity_of(form_hashes(folder, hashes_file(runs_root))) for run, folder in models.items()}
    first, *others = models
    for run in others:
        if identities[run] != identities[first]:
            raise InputError(
                f"runs '{first}' and '{run}' have different base models or tokenizers, and one engine serves one base: "
                f"export a version of '{run}' with `entente export --merged`, and use that folder as the player"
            )


async def _published(host: EngineHost, engine: Engine, group: Sequence[Contestant]) -> list[tuple[int, Contestant]]:
    """Publish the versions. Returns the number of each in the engine; the base model is 0 and needs no publishing."""
    numbered = []
    for place, player in enumerate(group, start=1):
        number = BASE_VERSION if player.adapter is None else place
        if number:
            await host.run(engine.publish(replace(player.policy, version=number)))
        numbered.append((number, player))
    return numbered


async def _close(host: EngineHost, engine: Engine) -> None:
    await host.run(engine.close())
