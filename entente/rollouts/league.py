"""The league: past versions of the run that play the opponents, more often those that the policy beats less.

Members are version 0 and the newest versions that `LEAGUE_EVERY` divides, `LEAGUE_SIZE` in all. A member's weight is
(1 - p)^2, where p is the policy's win share against it: prioritised fictitious self-play (Vinyals et al. 2019,
doi 10.1038/s41586-019-1724-z). A fork is won if the policy's power ends with more centres than the mean of the member's seats; a
tie is half a win. p counts the complete forks of the last `RECENT_STEPS` steps, with one win and one loss added.

A step's league is a file, `league/<producer>/000012.json`, published before its first start group is played and never changed.
Retried tasks, resumed runs and other processes read it, so a start group always has the same opponents.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from statistics import fmean

from entente.game.snapshot import POWERS, centres_in
from entente.players.opponents import LEAGUE, POLICY, read_opponents, seat_version, table_text
from entente.records.policy_version import BASE_VERSION
from entente.rollouts.settings import RolloutSettings
from entente.telemetry.errors import DataError, InputError
from entente.telemetry.progress import reporter
from storage.adapters import published_versions
from storage.files import names_in
from storage.league_files import LEAGUE_EVERY, RECENT_STEPS, LeagueMember, LeagueStep, publish_league, read_league
from storage.runs import RunPaths
from storage.shards import LOCAL_PRODUCER, SHARD_NAME, open_phases, open_shard

LEAGUE_SIZE = 4
"""Most members. An engine serves them in addition to the versions within the staleness budget."""

Tally = Mapping[int, tuple[float, int]]
"""Version -> (wins of the policy against it, forks)."""


class League:
    def __init__(self, paths: RunPaths, start_groups: int) -> None:
        self._paths, self._start_groups = paths, start_groups
        self._counted: dict[Path, Tally] = {}

    def settings_for(self, settings: RolloutSettings, producer: str, first_group: int, served: int) -> RolloutSettings:
        """`settings` with this start group's members, none newer than `served`, for 'league'. Raises InputError if a member's
        adapter was removed, DataError if the step's file is damaged."""
        if not settings.has_league:
            return settings
        league = self.at(producer, first_group // self._start_groups + 1, served)
        there = {BASE_VERSION, *published_versions(self._paths)}
        if gone := [member.version for member in league.members if member.version not in there]:
            raise InputError(
                f"policy version {gone[0]} of run '{self._paths.root.name}' is in its league in step {league.step}, but its "
                "adapter was removed: restore it from a copy, or start another run from a step of this one (--init-from) with "
                "other rollouts.opponents"
            )
        table = [(name, weight) for name, weight in settings.opponent_table if name != LEAGUE]
        shares = [weight for name, weight in settings.opponent_table if name == LEAGUE]
        table += [(f"v{member.version}", sum(shares) * member.weight) for member in league.members]
        return settings.model_copy(update={"opponents": table_text(table)})

    def at(self, producer: str, step: int, served: int) -> LeagueStep:
        """The league of a producer's step, from its file; the first call for a step writes it. A damaged file is a DataError."""
        league = read_league(self._paths, producer, step)
        if league is None:
            before = step if producer == LOCAL_PRODUCER else served + 1
            members = league_members(published_versions(self._paths), LEAGUE_EVERY, served)
            made = LeagueStep(step=step, served=served, members=weigh(members, self._tally(before)))
            league = publish_league(self._paths, producer, made)
        return league

    def _tally(self, before: int) -> Tally:
        folder, end = self._paths.shards / LOCAL_PRODUCER, (before - 1) * self._start_groups
        first = end - RECENT_STEPS * self._start_groups
        names = [name for name in names_in(folder) if (match := SHARD_NAME.fullmatch(name)) and first <= int(match[1]) < end]
        shards = [folder / name for name in sorted(names)]
        self._counted = {path: self._counted[path] if path in self._counted else tally_shard(path) for path in shards}
        return added(list(self._counted.values()))


def league_members(published: Collection[int], every: int, served: int) -> list[int]:
    """Version 0 and the newest versions that `every` divides, at most `LEAGUE_SIZE`; none is newer than `served`."""
    older = sorted(version for version in published if 0 < version <= served and version % every == 0)
    return [BASE_VERSION, *older[-(LEAGUE_SIZE - 1) :]]


def weigh(members: Sequence[int], tally: Tally) -> tuple[LeagueMember, ...]:
    counts = {version: tally.get(version, (0.0, 0)) for version in members}
    shares = {version: (wins + 1) / (games + 2) for version, (wins, games) in counts.items()}
    total = math.fsum((1 - share) ** 2 for share in shares.values())
    return tuple(
        LeagueMember(
            version=version,
            games=counts[version][1],
            wins=counts[version][0],
            win_share=round(share, 6),
            weight=round((1 - share) ** 2 / total, 6),
        )
        for version, share in shares.items()
    )


def added(tallies: Sequence[Tally]) -> Tally:
    versions = sorted({version for tally in tallies for version in tally})
    both = {version: [tally[version] for tally in tallies if version in tally] for version in versions}
    return {version: (sum(wins for wins, _ in pairs), sum(games for _, games in pairs)) for version, pairs in both.items()}


def tally_shard(path: Path) -> Tally:
    """Wins of the policy and forks, by opponent version, over a shard's complete forks with a decision of the policy: without
    one a fork may have failed before its first. The last recorded position counts, in a solo the one before the win. A damaged
    shard counts nothing, with a message."""
    seats: dict[int, tuple[str, str]] = {}
    complete: set[tuple[int, int]] = set()
    try:
        rows = open_shard(path)
        for row in rows.select(["start_group", "fork", "power", "opponents", "status"]).to_pylist():
            seats[row["start_group"]] = row["power"], row["opponents"]
            if row["status"] == "complete":
                complete.add((row["start_group"], row["fork"]))
        if not any(f"{POLICY}:" in opponents for _, opponents in seats.values()):
            return {}
        phases = open_phases(path, rows)
    except DataError as error:
        reporter().say(f"not counted for the league: {error}")
        return {}
    last = {
        (row["start_group"], row["fork"]): row["position"]
        for row in phases.select(["start_group", "fork", "phase_index", "position"]).sort_by("phase_index").to_pylist()
    }
    forks = [(*seats[group], position) for (group, fork), position in last.items() if (group, fork) in complete]
    return added(
        [
            tally_fork(power, opponents, dict(zip(POWERS, centres_in(position), strict=True)))
            for power, opponents, position in forks
        ]
    )


def tally_fork(power: str, opponents: str, centres: Mapping[str, int]) -> Tally:
    """The tally of one fork: `power` beats a version if it has more centres than the mean of the version's seats."""
    seats: dict[str, list[int]] = {}
    for other, seat in read_opponents(opponents, [each for each in centres if each != power]).items():
        seats.setdefault(seat, []).append(centres[other])
    tally = {}
    for seat, counts in seats.items():
        if (version := seat_version(seat)) is not None:
            ahead = centres[power] - fmean(counts)
            tally[version] = ((ahead > 0) + 0.5 * (ahead == 0), 1)
    return tally


def slots_for(rollouts: RolloutSettings, max_policy_lag: int) -> int:
    """Most adapter slots of opponents: members of the league, and members that leave during games."""
    return LEAGUE_SIZE + max_policy_lag // LEAGUE_EVERY if rollouts.has_league else 0
