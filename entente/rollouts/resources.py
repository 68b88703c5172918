"""The open objects of a process that plays rollouts: engine, tokens, positions, clocks. The code that opened one closes it."""

from dataclasses import dataclass, field
from pathlib import Path

from entente.inference.engine import Engine
from entente.inference.host import EngineHost
from entente.players.endpoint import EndpointSettings
from entente.players.endpoint_players import EndpointPlayers
from entente.players.past_versions import PastVersions
from entente.players.policy import Tokens
from entente.rollouts.league import League
from entente.rollouts.settings import RolloutSettings
from entente.telemetry.timing import Spans
from state_cache.store import StateCache
from storage.runs import RunPaths

PROBE = "probe"
"""Producer name of the rollouts that compare engine and trainer where others are of older versions."""


@dataclass(kw_only=True)
class RolloutResources:
    paths: RunPaths
    model: Path
    seed: int
    rollouts: RolloutSettings
    cache: StateCache
    host: EngineHost
    engine: Engine
    tokens: Tokens
    provenance: dict[str, str]
    """Written into the metadata of every shard."""
    started: tuple[int, int] | None = None
    """Marks of the run's settings, which each start writes: a worker process publishes nothing for another start. None: this
    process trains the run."""
    endpoint: EndpointSettings = field(default_factory=EndpointSettings)
    spans: Spans = field(default_factory=Spans)
    league: League = field(init=False)
    past: PastVersions = field(init=False)
    endpoints: EndpointPlayers = field(init=False)

    def __post_init__(self) -> None:
        self.league = League(self.paths, self.rollouts.start_groups)
        self.past = PastVersions(self.paths, self.engine, self.tokens, always=self.rollouts.lasting_versions)
        self.endpoints = EndpointPlayers(self.rollouts.endpoints, self.paths.answers, self.endpoint)
