"""Notebook API: a run's rows as DuckDB relations, and the pages of `entente report` and `entente replay` as frames.

A `Run` holds only paths and reads files on access. Errors have the command's message, without chained exceptions."""

import html
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from entente.cli.options import which_run
from entente.telemetry.errors import EntenteError, InputError
from storage.runs import LATEST, RunPaths, check_name, runs_in

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection, DuckDBPyRelation

    from entente.settings.run_settings import RunSettings

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")


def _one_error(function: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
    @wraps(function)
    def call(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result:
        try:
            return function(*args, **kwargs)
        except EntenteError as error:
            raise error.with_traceback(None) from None

    return call


class Run:
    """One run. Each view of `entente sql` is an attribute: `run.decisions`, `run.tokens`, `run.batches`.

    The first query takes a snapshot of the run's files, and says which are left out; `entente.run(name)` takes a new one. Queries
    return DuckDB relations."""

    def __init__(self, paths: RunPaths) -> None:
        self.paths = paths

    @property
    @_one_error
    def settings(self) -> "RunSettings":
        from entente.settings.layers import settings_of

        return settings_of(self.paths)

    @_one_error
    def sql(self, question: str) -> "DuckDBPyRelation":
        """One SELECT over the views of `entente sql`, or @NAME for a prepared query. Raises InputError if it fails."""
        from storage.run_sql import ready_query, relation

        return relation(self._connection, ready_query(question[1:]) if question.startswith("@") else question)

    @property
    def steps(self) -> "DuckDBPyRelation":
        """A row per step, a column per metric. Step 0 has the comparison of trainer and engine before training, the step after
        the last the final scores."""
        names = [name for (name,) in self.sql("SELECT DISTINCT name FROM metrics ORDER BY name").fetchall()]
        columns = [f"last(value) FILTER (name = {_quoted(name, chr(39))}) AS {_quoted(name, chr(34))}" for name in names]
        return self.sql(f"SELECT {', '.join(['step', *columns])} FROM metrics GROUP BY step ORDER BY step")

    @property
    @_one_error
    def scores(self) -> "DuckDBPyRelation":
        """A row per stored score, versions in their order, then scripted players: centres gained, and the 95 % interval."""
        import pyarrow as pa

        from entente.evaluation.score_files import read_scores

        texts, numbers = ("label", "player", "opponents"), ("policy_version", "forks", "positions", "source_games")
        kinds = dict.fromkeys(texts, pa.string()) | dict.fromkeys(numbers, pa.int32())
        kinds |= dict.fromkeys(("mean", "low", "high"), pa.float64())
        rows = []
        for label, record in read_scores(self.paths, track=True).items():
            score, (low, high) = record.score, record.score.estimate.interval or (None, None)
            counts = {"forks": score.forks, "positions": score.positions, "source_games": score.source_games}
            who = {"player": record.player, "opponents": record.opponents, "policy_version": record.policy_version}
            rows.append({"label": label, **who, "mean": score.mean, "low": low, "high": high, **counts})
        return self._connection.from_arrow(pa.Table.from_pylist(rows, pa.schema(list(kinds.items()))))

    @_one_error
    def report(self) -> "Frame":
        from entente.cli.report import report_run

        return Frame(report_run(self.paths)[1].read_text(encoding="utf-8"))

    @_one_error
    def replay(self, game: str = "latest") -> "Frame":
        """The page of `entente replay` of one game: START_GROUP/FORK as "12/3", "latest", "best", "worst", or a decision's id."""
        from entente.reports.inspect_rows import Inspector
        from entente.reports.replay_page import replay_html
        from entente.reports.replayed import read_game
        from entente.settings.find_model import model_or_none

        root = self.paths.root.parent
        model = model_or_none(self.settings, root, self.paths.root.name)
        return Frame(replay_html(read_game(Inspector(self.paths, model, self.settings), game), root))

    @cached_property
    def _connection(self) -> "DuckDBPyConnection":
        from entente.reports.run_text import connect_run
        from storage.run_sql import left_out

        connection = connect_run(self.settings, self.paths.root)[0]
        if lacking := left_out(connection):  # as `entente sql` says with each answer
            sys.stderr.write(f"{lacking}\n")
        return connection

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_"):
            from storage.run_views import VIEWS

            if name in VIEWS:
                return self.sql(f"FROM {name}")
        raise AttributeError(f"a run has no '{name}'")

    def __dir__(self) -> list[str]:
        from storage.run_views import VIEWS

        return sorted({*super().__dir__(), *VIEWS})

    def __repr__(self) -> str:
        return f"<run {self.paths.root.name!r} in {self.paths.root.parent}>"


@dataclass(frozen=True, slots=True)
class Frame:
    """An HTML page, shown in a sandboxed iframe."""

    page: str

    def _repr_html_(self) -> str:
        style = "width: 100%; height: 720px; border: 0"
        return f'<iframe sandbox="allow-scripts" srcdoc="{html.escape(self.page)}" style="{style}"></iframe>'


@_one_error
def runs(runs_root: str | Path = "runs") -> list[Run]:
    if not (root := Path(runs_root)).is_dir():
        raise InputError(f"there is no folder '{root}': name the folder of your runs with runs_root")
    return [Run(paths) for paths in runs_in(root)]


@_one_error
def run(name: str = LATEST, *, runs_root: str | Path = "runs") -> Run:
    """The run `name`; "latest": the one with the last write. Raises InputError if there is none."""
    root = Path(runs_root)
    chosen_run = Run(RunPaths(root / which_run(check_name(name, "run"), root)))
    if not chosen_run.paths.settings.exists():
        _ = chosen_run.settings  # raises InputError, which lists the runs
    return chosen_run


@_one_error
def train(preset: str | None = None, *, config: Sequence[str | Path] = (), resume: bool = False, **settings: Any) -> Run:
    """Train a run as `entente train` does.

    Args:
        preset: base settings, "laptop" if None; a resumed run keeps its own.
        config: TOML files that override the preset, in order.
        settings: any setting by its section: `run="mine"`, `steps=40`, `training={"learning_rate": 1e-3}`.
    """
    from entente.cli.train import train_run
    from entente.prefect_server.environment import prepare_environment
    from entente.settings.layers import DEFAULT_PRESET, layered_settings, resumed_settings

    if resume and preset is not None:
        raise InputError(f"a resumed run keeps its own settings: leave out preset {preset!r}, and set what shall change")
    files, preset = [Path(file) for file in config], preset or DEFAULT_PRESET
    with warnings.catch_warnings():  # `prepare_environment`, which must precede the import of Prefect, silences warnings
        prepare_environment(debug=False)
        chosen = resumed_settings(files, settings) if resume else layered_settings(preset, files, settings)
        return Run(train_run(chosen, resume=resume)[0])


def _quoted(text: str, mark: str) -> str:
    return f"{mark}{text.replace(mark, 2 * mark)}{mark}"
