"""Players of a match: resolves names to scripted players, policy versions, models and endpoints before any game starts.

    'base', 'newest', 'v20', 'other:v20'        a version of the run, or of another run
    'models/whole-192'                          the folder of a model that was made here, or of an adapter
    'openai:model@http://host:port/v1'          an OpenAI-compatible endpoint
    '<player>+search'                           any of these but an endpoint, with a search

The name of a resolved player has the version's number, so a match with 'newest' can be repeated later with the same version.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from entente.decoding.base_identity import form_hashes, identity_of, weights_hash
from entente.decoding.model_files import recipe_prompts, resolve_model
from entente.evaluation.adapter_folders import adapter_prompts, is_adapter, open_adapter
from entente.evaluation.settings import PlaySettings
from entente.game.prompts import PromptSettings
from entente.game.scripted import PLAYERS, SEARCHES, check_player, is_player
from entente.players.endpoint import read_endpoint
from entente.players.opponents import is_endpoint
from entente.players.search import check_search
from entente.records.policy_version import BASE, BASE_VERSION, PolicyVersion
from entente.telemetry.errors import InputError
from storage.adapters import published_versions, read_adapter
from storage.run_base import identity_in
from storage.runs import RunPaths, check_name, hashes_file

_VERSION = re.compile(r"(?:(?P<run>[^:]+):)?(?P<version>base|newest|v\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Contestant:
    name: str
    """Name in tables: 'mover', 'v20', 'other:v20', or one of these with '+search'."""
    run: str = ""
    """The run of the version; empty for a model and for a scripted player."""
    version: int = BASE_VERSION
    adapter_hash: str = ""
    """Hash of the adapter, 'base' for the base model; empty for a whole model and for a scripted player."""
    adapter: Path | None = None
    """Folder of the adapter; None for everything else."""
    model: Path | None = None
    """Folder of a model that plays without a run, the base of an adapter from outside; None for everything else."""
    weights_hash: str = ""
    """Hash of the model's weights, the identity of an adapter's base, or that of a run's base with its prompts; empty for
    everything else."""
    form: str = ""
    """Identity of config, tokenizer, chat template and prompts of a model or adapter from a folder; empty for everything else."""
    searches: bool = False

    @property
    def policy(self) -> PolicyVersion:
        return PolicyVersion(version=self.version, adapter_hash=self.adapter_hash, adapter=self.adapter)

    @property
    def identity(self) -> dict[str, str]:
        """What its samples depend on, besides the code; two policies with equal values play alike."""
        return {"weights": self.weights_hash, "adapter": self.adapter_hash, "form": self.form}

    @property
    def fingerprint(self) -> str:
        """Hash of `identity`, 16 hex digits."""
        return identity_of(self.identity)

    @property
    def is_policy(self) -> bool:
        return bool(self.run) or self.model is not None

    @property
    def is_endpoint(self) -> bool:
        return is_endpoint(self.name)

    @property
    def without_search(self) -> "Contestant":
        """The player that proposes orders to its search; itself if it does not search."""
        return replace(self, name=self.name.removesuffix(SEARCHES), searches=False)

    def searches_by(self, play: PlaySettings) -> bool:
        """True if its name ends with '+search', or if it is a version and `play.strategy` is 'search'."""
        return self.searches or (self.is_policy and play.strategy == "search")


def check_searches(players: Sequence[Contestant], play: PlaySettings) -> None:
    """Raises InputError if one of `players` searches and `play.search` names a player that does not exist."""
    for player in players:
        if player.searches_by(play):
            check_search(play.search)


def check_play_is_used(players: Sequence[Contestant], play: PlaySettings) -> None:
    """Raises InputError if a temperature, strategy or search that was set in `play` is used by none of `players`."""
    asked = play.model_fields_set
    unused = " and ".join(f"--{name}" for name in ("temperature", "strategy") if name in asked)
    if unused and not any(player.is_policy for player in players):
        raise InputError(
            f"{unused} would have no effect, because no player is a version or a model: leave it out, or name one, such as v20 "
            "or models/whole-192"
        )
    if "search" in asked and not any(player.searches_by(play) for player in players):
        raise InputError("--search settings are given, but no player searches: name one such as v20+search or dumbbot+search")


def resolve_contestants(names: Sequence[str], run: str, runs_root: Path) -> list[Contestant]:
    """The players with these names; without a run name a version is of `run`. Raises InputError for unknown or repeated names."""
    contestants = [resolve_contestant(name, run, runs_root) for name in names]
    for index, player in enumerate(contestants):
        if player.name in [earlier.name for earlier in contestants[:index]]:
            raise InputError(f"player '{player.name}' is named twice (as '{names[index]}'): name each player once")
    return contestants


def resolve_contestant(name: str, run: str, runs_root: Path) -> Contestant:
    """The player with this name. Raises InputError if the name is unknown, or the version does not exist."""
    if name.endswith(SEARCHES):
        if (plain := name.removesuffix(SEARCHES)).endswith(SEARCHES):
            raise InputError(f"player '{name}' searches twice: leave out one '{SEARCHES}'")
        if is_endpoint(plain):
            raise InputError("an endpoint cannot search, because a search samples many proposals: leave out '+search'")
        proposer = resolve_contestant(plain, run, runs_root)
        return replace(proposer, name=proposer.name + SEARCHES, searches=True)
    if is_endpoint(name):
        return Contestant(name=read_endpoint(name).name)
    if is_player(name) and not _VERSION.fullmatch(name):
        check_player(name)
        return Contestant(name=name)
    match = _VERSION.fullmatch(name)
    if match is None and "/" in name:
        return _model(name, runs_root)
    if match is None:
        raise InputError(
            f"there is no player '{name}': name a version ('base', 'newest', 'v20', 'other:v20'), the folder of a model or an "
            f"adapter ('models/whole-192'), an endpoint ('openai:model@http://host:port/v1') or a scripted player, one of "
            f"{', '.join(PLAYERS)}; append '{SEARCHES}' to make it search"
        )
    owner = match["run"] or run
    paths = RunPaths(runs_root / check_name(owner, "run"))
    if not paths.settings.exists():
        raise InputError(f"there is no run '{owner}' in '{runs_root}', so '{name}' cannot play")
    version = resolve_version(paths, owner, match["version"])
    label = f"v{version}" if owner == run else f"{owner}:v{version}"
    if version == BASE_VERSION:  # a run of this name that was made again may have another base
        return Contestant(name=label, run=owner, adapter_hash=BASE.adapter_hash, weights_hash=identity_in(paths))
    policy = read_adapter(paths, version)
    return Contestant(name=label, run=owner, version=policy.version, adapter_hash=policy.adapter_hash, adapter=policy.adapter)


def needs_run(names: Sequence[str]) -> bool:
    matches = (_VERSION.fullmatch(name.removesuffix(SEARCHES)) for name in names)
    return any(match is not None and not match["run"] for match in matches)


def runs_code(name: str) -> bool:
    """Whether `name` is a `module:attribute`: resolving it imports the module."""
    plain = name.removesuffix(SEARCHES)
    return is_player(plain) and plain not in PLAYERS and not _VERSION.fullmatch(plain)


def _model(name: str, runs_root: Path) -> Contestant:
    if not Path(name).is_dir():
        raise InputError(f"there is no folder '{name}', so it cannot play: name the folder of a model or an adapter")
    if is_adapter(Path(name)):
        adapter = open_adapter(Path(name), runs_root)
        return Contestant(
            name=_folder_name(name),
            version=adapter.policy.version,
            adapter_hash=adapter.policy.adapter_hash,
            adapter=adapter.policy.adapter,
            model=adapter.base,
            weights_hash=adapter.identity,
            form=_form(adapter.base, adapter_prompts(Path(name), adapter.base), runs_root),
        )
    folder = resolve_model(name)
    if (prompts := recipe_prompts(folder)) is None:
        raise InputError(f"model '{name}' has no recipe.json with prompt settings: name a model that was made here")
    return Contestant(
        name=_folder_name(name),
        model=folder,
        weights_hash=weights_hash(folder, hashes_file(runs_root)),
        form=_form(folder, prompts, runs_root),
    )


def _folder_name(name: str) -> str:
    """With a slash, which tells a folder such as './dumbbot' or './v20' from the player of that name."""
    plain = Path(name).as_posix()
    return plain if "/" in plain else f"./{plain}"


def _form(base: Path, prompts: PromptSettings | None, runs_root: Path) -> str:
    asked = json.dumps(prompts.model_dump(mode="json") if prompts else None, sort_keys=True)
    return identity_of({**form_hashes(base, hashes_file(runs_root)), "prompts": asked})


def resolve_version(paths: RunPaths, run: str, wanted: str | int) -> int:
    """The version's number: 'base', 'newest', 'v20', a number, or -1 for the newest. Raises InputError if the run lacks it."""
    versions = [BASE_VERSION, *published_versions(paths)]
    if wanted in ("newest", -1):
        return versions[-1]
    number = BASE_VERSION if wanted == "base" else int(str(wanted).removeprefix("v"))
    if number not in versions:
        if number < BASE_VERSION:
            raise InputError(f"there is no policy version {number}: versions are numbers from 0, or -1 for the newest")
        if number < versions[-1]:
            raise InputError(
                f"run '{run}' has no policy version {number} any more: it was retired; the run keeps {_listed(versions)}"
            )
        raise InputError(f"run '{run}' has no policy version {number}; its newest is {versions[-1]}")
    return number


def _listed(versions: list[int]) -> str:
    names = ["base" if version == BASE_VERSION else f"v{version}" for version in versions]
    return ", ".join(names if len(names) <= 8 else [names[0], "...", *names[-6:]])
