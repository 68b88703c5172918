"""Runs as objects: their rows as DuckDB relations, their games as boards, and what a few commands do as functions.

An object holds where a run lies. Files are read when something is asked of it. Nothing here computes: the rows are those of
`entente sql`, the boards those of `entente replay`, the pages those of `entente report` and `entente compare`. An error is the
sentence that the command says.
"""

import html
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cli.options import which_run
from storage.files import FILES
from storage.run_roots import as_given, located
from storage.runs import LATEST, RunPaths, check_name, runs_in
from telemetry.errors import InputError

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection, DuckDBPyRelation

    from game.board import Board
    from pipeline.run_settings import RunSettings
    from reports.games import GameName
    from reports.replayed import ReplayedGame, ShownPly


class Run:
    """One run. Each view of `entente sql` is an attribute: `run.decisions`, `run.tokens`, `run.batches`.

    The first question opens the run's rows as they are then; `entente.run(name)` opens them anew. DuckDB shows the rows of a
    relation, and `.df()`, `.arrow()`, `.fetchall()`, `.filter()` and others go on from it.
    """

    def __init__(self, paths: RunPaths, as_of: int | None = None) -> None:
        self.paths, self._as_of = paths, as_of

    @property
    def name(self) -> str:
        """The name of its folder."""
        return self.paths.root.name

    @property
    def settings(self) -> "RunSettings":
        """Its settings; of its newest lineage, or of the step of `as_of`."""
        from pipeline.run_settings import settings_at, settings_of

        return settings_of(self.paths) if self._as_of is None else settings_at(self.paths, self._as_of)

    def as_of(self, step: int) -> "Run":
        """The run as it was when the rows of this step were chosen."""
        return Run(self.paths, step)

    def sql(self, question: str) -> "DuckDBPyRelation":
        """One SELECT over the views of `entente sql`, or @NAME for a ready question, as a relation.

        Raises:
            InputError: the question is not a single SELECT, or DuckDB refuses it.
        """
        from storage.asking import ready_query, relation

        return relation(self._connection, ready_query(question[1:]) if question.startswith("@") else question)

    @property
    def steps(self) -> "DuckDBPyRelation":
        """A row for each step, a column for each of its metrics; the view `metrics` has a row for each figure."""
        names = [name for (name,) in self.sql("SELECT DISTINCT name FROM metrics ORDER BY name").fetchall()]
        columns = [f"last(value) FILTER (name = {_quoted(name, chr(39))}) AS {_quoted(name, chr(34))}" for name in names]
        return self.sql(f"SELECT {', '.join(['step', *columns])} FROM metrics GROUP BY step ORDER BY step")

    @property
    def scores(self) -> "DuckDBPyRelation":
        """A row for each stored score, in the order in which they were measured: centres gained, and the 95 % interval.

        Raises:
            DataError: a file of a score is damaged.
        """
        import pyarrow as pa

        from evaluation.score_files import read_scores

        texts, numbers = ("label", "player", "opponents"), ("policy_version", "forks", "positions", "source_games")
        kinds = dict.fromkeys(texts, pa.string()) | dict.fromkeys(numbers, pa.int32())
        kinds |= dict.fromkeys(("mean", "low", "high"), pa.float64())
        rows = []
        for label, record in read_scores(self.paths).items():
            score = record.score
            low, high = score.estimate.interval or (None, None)
            counts = {"forks": score.forks, "positions": score.positions, "source_games": score.source_games}
            who = {"player": record.player, "opponents": record.opponents, "policy_version": record.policy_version}
            rows.append({"label": label, **who, "mean": score.mean, "low": low, "high": high, **counts})
        return self._connection.from_arrow(pa.Table.from_pylist(rows, pa.schema(list(kinds.items()))))

    @property
    def games(self) -> "list[GameName]":
        """The games that were played for training, oldest first; `game(each.name)` opens one."""
        from reports.games import games_of

        return games_of(self._connection)

    def game(self, asked: str) -> "Game":
        """One game: START_GROUP/FORK as "12/3", "latest", "best", "worst", or the id of one of its decisions.

        Raises:
            InputError: there is no such game, or its boards are gone.
            DataError: its rows are damaged.
        """
        from pipeline.plans.find_model import model_or_none
        from reports.replayed import read_game

        settings = self.settings
        model = model_or_none(settings, self.paths.root.parent, self.name)
        storage = settings.storage
        return Game(read_game(self.paths, str(asked), model, blend=storage.blend, discount=storage.discount), self.paths)

    @cached_property
    def _connection(self) -> "DuckDBPyConnection":
        from cli.sql import asked_run
        from storage.asking import connect_run

        asked, _ = asked_run(self.settings, self.paths.root)
        return connect_run(asked, as_of=self._as_of)

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_"):
            from storage.asking import VIEWS

            if name in VIEWS:
                return self.sql(f"FROM {name}")
        raise AttributeError(f"a run has no '{name}'")

    def __dir__(self) -> list[str]:
        from storage.asking import VIEWS

        return sorted({*super().__dir__(), *VIEWS})

    def __repr__(self) -> str:
        then = "" if self._as_of is None else f" as of step {self._as_of}"
        return f"<run {self.name!r} in {as_given(self.paths.root.parent)}{then}>"


@dataclass(frozen=True, slots=True, repr=False)
class Game:
    """One game of a run. A notebook shows it as the page of `entente replay`."""

    replayed: "ReplayedGame"
    """Players, versions, and why it ended."""
    paths: RunPaths
    """The run that played it."""

    @property
    def phases(self) -> "tuple[ShownPly, ...]":
        """Its phases in order, the final position last: each has `phase`, `board`, `orders` by power with results and
        probabilities, and `decisions`. A notebook draws a phase with its orders.
        """
        return self.replayed.plies

    @property
    def boards(self) -> "list[Board]":
        """The board of each phase; a notebook draws it."""
        return [ply.board for ply in self.phases]

    @property
    def orders(self) -> list[dict[str, list[str]]]:
        """The orders of each phase by power; none in the final position."""
        return [{power: [given.order for given in orders] for power, orders in ply.orders.items()} for ply in self.phases]

    def __repr__(self) -> str:
        return f"<game {self.replayed.game.name} of run {self.replayed.run!r}>"

    def _repr_html_(self) -> str:
        from reports.replay_page import replay_html

        return _framed(replay_html(self.replayed, self.paths.root.parent))


@dataclass(frozen=True, slots=True)
class Page:
    """A page that was written. A notebook shows it."""

    path: Path

    def _repr_html_(self) -> str:
        return _framed(self.path.read_text())


def runs(runs_root: str | Path = "runs") -> list[Run]:
    """The runs in a folder or a bucket; the one that wrote last is last.

    Raises:
        InputError: there is no such folder.
    """
    if not (root := located(runs_root)).is_dir():
        raise InputError(f"there is no folder '{root}': name the folder of your runs with runs_root")
    return [Run(paths) for paths in runs_in(root)]


def run(name: str = LATEST, *, runs_root: str | Path = "runs") -> Run:
    """The run of this name; "latest": the one that wrote last.

    Raises:
        InputError: there is no such run, or no run can have this name.
    """
    root = located(runs_root)
    wanted = check_name(name, "run")
    paths = RunPaths(root / which_run(wanted, root))
    if not FILES.exists(paths.settings):
        from pipeline.run_settings import settings_of

        settings_of(paths)  # raises InputError, with the runs that are there
    return Run(paths)


def train(
    preset: str = "laptop", *, config: Sequence[str | Path] = (), resume: bool = False, fork_lineage: str = "", **settings: Any
) -> Run:
    """Train a run as `entente train` does, and return it.

    Args:
        preset: settings to begin with; those in stages are for the command.
        config: TOML files laid over the preset.
        resume: continue the run that `run` names.
        fork_lineage: with `resume`: continue with other settings, as a lineage of this name.
        settings: any setting by its section: `run="mine"`, `steps=40`, `training={"learning_rate": 1e-3}`.

    Raises:
        InputError: the settings cannot be used.
    """
    from cli.train import train_run
    from pipeline.run_settings import layered_settings, resumed_settings

    if fork_lineage and not resume:
        raise InputError("fork_lineage continues an existing run: give resume=True and run too")
    files = [Path(file) for file in config]
    with _as_a_command():
        chosen = (
            resumed_settings(files, settings, fork=bool(fork_lineage)) if resume else layered_settings(preset, files, settings)
        )
        paths, _ = train_run(chosen, resume=resume, fork_lineage=fork_lineage)
    return Run(paths)


def evaluate(
    name: str = LATEST,
    *,
    runs_root: str | Path = "runs",
    version: int = -1,
    positions: int | None = None,
    opponents: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Score a policy version on held-out positions; the result is that of `entente evaluate --json`. Matches are for the command.

    Args:
        version: 0 is the base, -1 the newest.
        positions: held-out positions; default: as the run was set.
        opponents: scripted opponents; default: as the run was set.

    Raises:
        InputError: there is no such run or version, or it cannot be measured so.
    """
    from cli.evaluate import evaluation_of, run_evaluation

    paths = run(name, runs_root=runs_root).paths
    root = paths.root.parent
    with _as_a_command():
        wanted = evaluation_of(paths.root.name, root, positions, None if opponents is None else [*opponents], uses_engine=True)
        return run_evaluation(paths.root.name, version, root, wanted, None, False, (), play=None)


def compare(*names: str, runs_root: str | Path = "runs", output: str | Path | None = None) -> Page:
    """The page of `entente compare`: runs side by side; patterns such as 'sweep-*' are names too.

    Raises:
        InputError: a name has no run, or there is only one.
    """
    from cli.compare import compare_on_page

    return Page(compare_on_page(names, located(runs_root), Path(output) if output else None)[1])


def report(name: str = LATEST, *, runs_root: str | Path = "runs", output: str | Path | None = None) -> Page:
    """The page of `entente report`: strength, learning curve, health, time, boards, settings.

    Raises:
        InputError: there is no such run.
    """
    from cli.report import report_run

    return Page(report_run(run(name, runs_root=runs_root).paths, Path(output) if output else None)[1])


@contextmanager
def _as_a_command() -> Iterator[None]:
    """The environment that a command prepares before it imports Prefect; warnings are as before after the block."""
    from cli.environment import prepare_environment

    with warnings.catch_warnings():
        prepare_environment(debug=False)
        yield


def _quoted(text: str, mark: str) -> str:
    return f"{mark}{text.replace(mark, 2 * mark)}{mark}"


def _framed(page: str) -> str:
    """A page as a frame of the notebook. The page's scripts cannot reach the notebook."""
    return f'<iframe sandbox="allow-scripts" srcdoc="{html.escape(page)}" style="width: 100%; height: 720px; border: 0"></iframe>'
