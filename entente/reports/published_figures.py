"""What to publish, and the results on its model card: only scores and matches of exactly these weights."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from entente.decoding.base_identity import weights_hash
from entente.decoding.model_files import may_be_hub_id
from entente.evaluation.contestants import Contestant
from entente.evaluation.intervals import format_interval
from entente.evaluation.match_files import MatchRecord, read_match, read_matches
from entente.evaluation.match_table import MEASURES, MatchTable
from entente.evaluation.protocols import part_of_protocol
from entente.evaluation.score_files import ScoreRecord, read_score
from entente.evaluation.settings import Measure
from entente.evaluation.strength import POLICY
from entente.game.scripted import SEARCHES
from entente.records.policy_version import BASE_VERSION
from entente.settings.run_settings import RunSettings
from entente.telemetry.errors import InputError
from storage.runs import RunPaths


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """What to publish: a base model, or a version of a run."""

    base: Path
    version: Contestant | None = None
    run: RunPaths | None = None
    settings: RunSettings | None = None
    """Settings of the run, if this is a version of one."""

    @property
    def name(self) -> str:
        return self.base.name if self.version is None else self.version.name

    @property
    def adapter(self) -> Path | None:
        return None if self.version is None else self.version.adapter

    @property
    def hub_id(self) -> str:
        """Hub id of a version's base; empty if the base is not from the hub."""
        name = "" if self.settings is None else self.settings.inference.model
        return name if not Path(name).is_dir() and may_be_hub_id(name) else ""


def measured_figures(source: Source, published: str, files: Sequence[Path]) -> dict[str, Any]:
    """Scores of the version and of its base, one per opponent and evaluation settings; matches, each with the model's name in it.

    Args:
        published: hash of the published weights.
        files: match files to include besides those of the version's run.
    """
    version, run, matches = source.version, source.run, list[tuple[MatchRecord, str]]()
    known = {published, weights_hash(source.base)} if version is None else {published} - {""}
    own = [] if run is None else read_matches(run.matches)
    for place, match in enumerate([*own, *map(_read_match, files)]):
        if any(match == earlier for earlier, _ in matches):  # a match of the version's run that was named too
            continue
        for player in match.players:
            # A copied run has another name than its matches say: in these, its own versions are those named without a run.
            of_run = (
                version is not None
                and (player.run == version.run or (place < len(own) and player.run and ":" not in player.name))
                and (player.adapter_hash, player.weights_hash) == (version.adapter_hash, version.weights_hash)
            )
            if of_run or player.weights_hash in known:  # in one seat, or in six
                matches.append((match, player.name.removesuffix(SEARCHES)))
                break
        else:
            if place >= len(own):
                raise InputError(f"'{source.name}' did not play in the match '{files[place - len(own)]}': leave the file out")
    scores: dict[int, dict[Any, ScoreRecord]] = {}
    if run is not None:
        for file in sorted(file for file in run.scores.rglob("*.json") if file.parent != run.matches):
            score = read_score(run, file.relative_to(run.scores).with_suffix("").as_posix())
            if score is not None and score.player == POLICY:
                scores.setdefault(score.policy_version, {}).setdefault((score.opponents, score.settings.question), score)
    number = BASE_VERSION if version is None else version.version
    return {"matches": matches, "scores": scores.get(number, {}).values(), "base_scores": scores.get(BASE_VERSION, {}).values()}


def _read_match(file: Path) -> MatchRecord:
    if not file.is_file():
        raise InputError(f"there is no match file '{file}': name one that exists")
    return read_match(file)


def measures_table(table: MatchTable, renamed: Callable[[str], str] = str) -> str:
    columns: dict[Measure, str] = {
        "centres": "centres",
        "sos": "share of squares",
        "win": "wins",
        "survival": "survival",
        "solo": "solos",
    }
    lines = [["player", *columns.values()], ["---"] * (1 + len(columns))]
    for row in table.players:
        measures = [(row.measures[name], ".1%" if MEASURES[name][1] else ".2f") for name in columns]
        cells = [f"{each.mean:{form}} {format_interval(each.interval, form)}" for each, form in measures]
        lines.append([renamed(row.player), *cells])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def match_figures(record: MatchRecord, known_as: str, name: str) -> dict[str, Any]:
    settings, table = record.settings, record.table

    def renamed(player: str) -> str:
        return name + player.removeprefix(known_as) if player.removesuffix(SEARCHES) == known_as else player

    asked = settings.model_copy(update={"players": (*map(renamed, settings.players),), "opponents": renamed(settings.opponents)})
    how = "; ".join(filter(None, (f"{table.games} games, {asked.description}", part_of_protocol(settings))))
    return {"how": how, "table": measures_table(table, renamed)}


def in_words(record: ScoreRecord) -> str:
    score = record.score
    interval = score.estimate.describe("+.2f", "source games")
    years = record.settings.horizon_years
    return f"{score.mean:+.2f} centres in {years} game year{'s' * (years > 1)} against {record.opponents}, {interval}"
