"""The runs of one folder as pages: what `server.py` answers with. Reads files, and starts child processes when a page asks."""

import json
import secrets
import threading
import time
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from markupsafe import Markup

from entente.game.board import Board
from entente.game.snapshot import POWERS
from entente.inference.memory_plan import size_text
from entente.reports.compare_page import html_of as compare_html
from entente.reports.compared import compare_runs
from entente.reports.games import GameName, find_game
from entente.reports.inspect_rows import Inspector
from entente.reports.page import Surroundings, commands, owner_of
from entente.reports.read_run import MetricsFile, RunLine, run_line
from entente.reports.replay_page import replay_html
from entente.reports.replayed import replay_game
from entente.reports.sentences import state
from entente.reports.write_page import page_template
from entente.settings.find_model import model_of, model_or_none
from entente.settings.layers import settings_of
from entente.settings.run_settings import RunSettings
from entente.telemetry.errors import EntenteError, InputError
from entente.telemetry.stages import STAGES
from entente.view.jobs import Jobs
from entente.view.live_run import Drawer, LiveRun, run_mark
from entente.view.run_pages import (
    OVERLAYS,
    ROWS,
    SECONDS,
    SqlOfRun,
    decision_page,
    group_page,
    parquet_of,
    sql_result,
    step_page,
    weights_for,
)
from storage.files import file_marks, is_held
from storage.ledger import ledger_path
from storage.run_sql import QUERIES
from storage.run_views import VIEWS
from storage.runs import RunPaths, run_names
from storage.shards import shard_names

_HERE = Path(__file__).parent
_MOST_LIVE = 8
_EVERY_MS, _SOON_MS = 2000, 500
"""Between two requests of an open page: usually, and while it waits for a part or a job."""
NONCE = secrets.token_hex(16)
"""Stands for the nonce while a page is made, so that equal pages have equal texts."""
WHAT_IF = {"phase": "", "power": "FRANCE", "orders": "", "version": "", "players": "dumbbot", "forks": "64", "years": "2"}


class Viewer:
    """The runs of one folder, as pages. Methods are called from the server's threads."""

    def __init__(self, runs_root: Path, key: str) -> None:
        self.runs_root, self.key, self.jobs = runs_root, key, Jobs()
        self._live: dict[str, LiveRun] = {}
        self._lines: dict[str, tuple[Any, RunLine]] = {}
        self._metrics: dict[str, MetricsFile] = {}
        """Of the runs that train, whose lines are read again and again."""
        self._sql: tuple[Any, SqlOfRun] | None = None
        self._lock, self._sql_lock, self._rows_lock = (threading.Lock() for _ in range(3))
        self.drawer = Drawer(
            lambda: [live for live in [*self._live.values()] if live.is_looked_at], lambda: bool(self.training()), self._warm
        )
        for name in _HERE.glob("*.jinja"):
            page_template(name.name, _HERE)  # compiled before the first request
        self._inspectors = lru_cache(maxsize=4)(self._new_inspector)

    def link(self, kind: str, run: str = "", **query: Any) -> str:
        """The address of a page: runs, compare, or of a run: its page, step, group, decision, games, game, sql."""
        place = {"runs": "/", "run": f"/run/{quote(run, safe='')}"}.get(kind) or (
            f"/run/{quote(run, safe='')}/{kind}" if run else f"/{kind}"
        )
        return f"{place}?{urlencode({'key': self.key} | query)}"

    def _warm(self, run: str) -> None:
        """Load what the pages of its rows need, before one is requested."""
        with self._rows_lock:
            self._inspector(run)
        Board.start().legal_orders()

    def training(self) -> list[str]:
        return [name for name in run_names(self.runs_root) if is_held(RunPaths(self.runs_root / name).lock)]

    def paths(self, run: str) -> RunPaths:
        """Raises InputError for a name that is no folder of runs."""
        if run not in run_names(self.runs_root):
            raise InputError(f"there is no run '{run[:100]}' in '{self.runs_root}'")
        return RunPaths(self.runs_root / run)

    def live(self, run: str) -> LiveRun:
        paths = self.paths(run)
        with self._lock:
            if run not in self._live:
                if len(self._live) >= _MOST_LIVE:
                    del self._live[min(self._live, key=lambda name: self._live[name].asked)]
                self._live[run] = LiveRun(Surroundings(paths=paths, link=self.link, key=self.key))
            return self._live[run]

    def _inspector(self, run: str) -> Inspector:
        """For one thread at a time: hold `_rows_lock`."""
        facts, paths = self.live(run).facts(), self.paths(run)
        lags = [figures.get("train/policy_lag_max", 0.0) for figures in facts.steps.values()]
        lag = max(int(max(lags, default=0)), int(facts.settings.get("storage", {}).get("max_policy_lag", 0)))
        model = model_or_none(self.settings(run), self.runs_root, run)  # asked again, because it may be made or restored later
        return self._inspectors(run, lag, paths.settings.stat().st_mtime_ns, model)

    def _new_inspector(self, run: str, most_lag: int, written: int, model: Path | None) -> Inspector:
        return Inspector(self.paths(run), model, self.settings(run), most_lag=most_lag)

    def settings(self, run: str) -> RunSettings:
        return settings_of(self.paths(run))

    def nav(self, run: str = "", here: str = "") -> list[tuple[str, str]]:
        """Words and address of each page; the one that is open has none."""
        pages = {"Runs": self.link("runs")}
        if run:
            pages |= {run: self.link("run", run), "Games": self.link("games", run), "SQL": self.link("sql", run)}
        return list((pages | {here or run or "Runs": ""}).items())

    def page(self, template: str, nav: list[tuple[str, str]], **values: Any) -> str:
        common = {"nav": nav, "nonce": NONCE, "key": self.key, "script": _script()}
        return page_template(template, _HERE).render(common | values)

    # -- runs ---------------------------------------------------------------------------------------------------------------

    def runs_mark(self) -> Any:
        return [(name, run_mark(RunPaths(self.runs_root / name))) for name in run_names(self.runs_root)]

    def runs(self) -> str:
        lines = []
        for name, mark in self.runs_mark():
            if name not in self._lines or self._lines[name][0] != mark:
                paths = RunPaths(self.runs_root / name)
                metrics = self._metrics.pop(name, None) or MetricsFile(paths.metrics)
                if (line := run_line(paths, metrics)) is None:
                    continue
                self._lines[name] = mark, line
                if line.state == "training":
                    self._metrics[name] = metrics
            lines.append(self._lines[name][1])
        shown = [self._run_row(line) for line in sorted(lines, key=lambda line: -line.written)]
        return self.page("runs.html.jinja", self.nav(), runs=shown, root=self.runs_root, every=_EVERY_MS)

    def _run_row(self, line: RunLine) -> dict[str, Any]:
        scores = ["" if each is None else f"{each:+.2f}" for each in (line.base_score, line.trained_score, line.newest_return)]
        return {
            "name": line.name,
            "address": self.link("run", line.name),
            "state": line.state,
            "steps": f"{line.done} of {line.planned}" if line.planned else "",
            "texts": [*scores, f"{line.decisions:,}", size_text(line.size)],
            "owner": owner_of(RunPaths(self.runs_root / line.name)),
            "written": time.strftime("%Y-%m-%d %H:%M", time.localtime(line.written)),
            "trouble": line.trouble,
        }

    def compare(self, names: list[str]) -> str:
        comparison = compare_runs([self.paths(name) for name in dict.fromkeys(names)])
        nav = [
            ("Runs", self.link("runs")),
            *((run.name, self.link("run", run.name)) for run in comparison.runs),
            ("Comparison", ""),
        ]
        return compare_html(comparison, self.runs_root, nav=nav, nonce=NONCE, script=_script(), every=5 * _EVERY_MS)

    # -- one run ------------------------------------------------------------------------------------------------------------

    def run(self, run: str) -> str:
        live = self.live(run)
        parts, facts = live.parts(), live.facts()
        self.drawer.wake()
        ask = commands(facts, self.runs_root, state(facts)[0])
        every = _EVERY_MS if live.is_whole else _SOON_MS
        return self.page("page.html.jinja", self.nav(run), name=run, parts=parts, commands=ask, every=every)

    def step(self, run: str, step: int) -> str:
        values = step_page(self.live(run).facts(), self.paths(run), step, self.link)
        return self.page("step.html.jinja", self.nav(run, f"step {step}"), run=run, meanings=STAGES, **values)

    def group(self, run: str, where: dict[str, Any]) -> str:
        with self._rows_lock:
            values = group_page(self._inspector(run), run, where, self.link)
        return self.page("group.html.jinja", self.nav(run, f"group {where['start_group']}"), run=run, **values)

    def decision(self, run: str, decision: int, shard: str, overlay: str) -> str:
        if overlay not in OVERLAYS:
            raise InputError(f"there is no overlay '{overlay[:40]}': known are {', '.join(OVERLAYS)}")
        with self._rows_lock:
            rows = self._inspector(run)
            version, _, weights = weights_for(self.paths(run), rows.decision(decision, shard))
            about = self._about("decision", run, f"{decision} under version {version}")
            job = self.jobs.of(about)
            running = job is not None and job.running  # asked first: a job that ends meanwhile is shown by the next request
            recomputed, _ = job.answer() if job else (None, "")
            values = decision_page(rows, run, decision, shard, overlay, recomputed, self.link)
        ask = self.link("recompute", run, id=decision, shard=values["facts"]["shard"], overlay=overlay)
        return self.page(
            "decision.html.jinja",
            self.nav(run, "decision"),
            recompute=ask,
            weights=weights,
            job=self._job(about, run, values["link"]),
            every=_SOON_MS if running else 0,
            **values,
        )

    def recompute(self, run: str, decision: int, shard: str) -> None:
        settings, paths = self.settings(run), self.paths(run)
        model = model_of(settings, self.runs_root, run)
        with self._rows_lock:
            found = self._inspector(run).decision(decision, shard)
        version, folder, _ = weights_for(paths, found)
        job = {
            "shards": str(paths.shards.resolve()),
            "shard": found.facts["shard"],
            "row": found.facts["row"],
            "model": str(model),
            "adapter": str(folder.resolve()) if folder else None,
            "training": settings.training.model_copy(update={"seed": settings.seed}).model_dump(mode="json"),
            "advantage": found.advantage or 0.0,
        }
        # Neither more threads nor the card of a run that trains here.
        quiet = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        words, about = f"one forward under version {version}", self._about("decision", run, f"{decision} under version {version}")
        self.jobs.start(words, about, ["entente.training.recompute", json.dumps(job)], quiet)

    def games(self, run: str, shard: str, message: str = "") -> str:
        names = sorted(shard_names(self.paths(run)), key=lambda name: (int(Path(name).stem), name))
        if not names:
            message, rows = message or "No game was played yet.", list[GameName]()
        else:
            shard = shard if shard in names else names[-1]
            with self._rows_lock:
                rows = self._inspector(run).games(shard)
        place = names.index(shard) if names else 0
        return self.page(
            "games.html.jinja",
            self.nav(run, "Games"),
            run=run,
            message=message,
            shard=shard,
            newer=self.link("games", run, shard=names[place + 1]) if place + 1 < len(names) else "",
            older=self.link("games", run, shard=names[place - 1]) if place else "",
            form=self.link("game", run).partition("?")[0],
            games=[self._game_row(run, game) for game in rows],
        )

    def _game_row(self, run: str, game: GameName) -> dict[str, Any]:
        return {
            "name": game.name,
            "address": self.link("game", run, game=game.full_name, shard=game.shard),
            "powers": ", ".join(power.title() for power in game.powers),
            "version": game.version,
            "phases": f"{game.first} to {game.last}" if game.phases else "no boards",
            "gain": game.gain,
            "status": game.status,
        }

    def game(self, run: str, asked: str, shard: str, fields: dict[str, str], *, message: str = "", confirm: bool = False) -> str:
        wanted = None if shard else find_game(self.paths(run), asked)
        with self._rows_lock:
            rows = self._inspector(run)
            wanted = wanted or next((each for each in rows.games(shard) if each.full_name == asked), None)
            if wanted is None:
                raise InputError(f"shard {shard[:100]} has no game {asked[:100]}")
            found = replay_game(rows, wanted)
        game, shard = found.game.full_name, found.game.shard
        here, about = self.link("game", run, game=game, shard=shard), self._about("what-if", run, game)
        first = next((each.phase for each in found.phases if each.orders), "")
        chosen = (
            WHAT_IF
            | {"phase": first, "power": found.game.powers[0]}
            | {name: value for name, value in fields.items() if name in WHAT_IF}
        )
        chosen["power"] = chosen["power"].upper()
        job = self._job(about, run, here)
        return replay_html(
            found,
            self.runs_root,
            page_template("game.html.jinja", _HERE),
            {"decision": self.link("decision", run, id="ID", shard=shard), "what_if": here},
            nav=self.nav(run, f"game {found.game.name}"),
            nonce=NONCE,
            key=self.key,
            script=_script(),
            job=job,
            every=2 * _SOON_MS if job and job["running"] else 0,
            powers=POWERS,
            fields=chosen,
            message=message,
            confirm=confirm,
            ask=self.link("what-if", run, game=game, shard=shard),
        )

    def what_if(self, run: str, game: str, fields: dict[str, str]) -> str:
        """Start it; or the sentence that says why it has to be asked again."""
        training = self.training()
        if training and not fields.get("anyway"):
            return f"Run {training[0]} trains on this machine, and these games would slow it down: ask again to play them anyway."
        chosen = WHAT_IF | fields
        self.paths(run)
        words = ["runs", "what-if", "--json", f"--game={game}", f"--run={run}", f"--runs-root={self.runs_root}"]
        for name in ("phase", "power", "players", "forks", "years", *(("version",) if chosen["version"] else ())):
            words.append(f"--{name}={chosen[name]}")
        words += [f"--orders={chosen['orders']}"] if chosen["orders"] else []
        self.jobs.start(f"what-if in {chosen['phase']}", self._about("what-if", run, game), ["entente.cli.main", *words])
        return ""

    def _about(self, kind: str, run: str, what: str) -> str:
        """What a job is about. Another run of that name has its decisions and games under the same names, but another folder and
        other ledgers."""
        paths = self.paths(run)
        return f"{kind} {what} of {run} {paths.root.stat().st_ino} {file_marks(ledger_path(paths, 1))}"

    def _job(self, about: str, run: str, back: str) -> dict[str, Any] | None:
        job = self.jobs.of(about)
        if job is None:
            return None
        running, (result, why) = job.running, job.answer()
        line = job.last_line if running else ""
        cancel = self.link("cancel", run, about=about, back=back.replace(self.key, ""))
        return {"running": running, "words": job.words, "line": line, "why": why, "result": result, "cancel": cancel}

    # -- SQL ----------------------------------------------------------------------------------------------------------------

    def sql(self, run: str, query: str, *, ask: bool, parquet: bool) -> str | tuple[bytes, bool]:
        """The page; with `parquet` a file, and whether it is whole."""
        result, message, lacking = None, "", ""
        if ask and query.strip():
            if not self._sql_lock.acquire(blocking=False):
                message = "Another query is at work: wait for it."
            else:
                try:
                    rows = self._rows_for_sql(run)
                    answer = rows.ask(query.strip(), parquet=parquet)
                    lacking = rows.lacking()
                    if parquet:
                        return parquet_of(answer, lacking), not lacking
                    result = sql_result(answer)
                except EntenteError as error:
                    message = str(error)
                finally:
                    self._sql_lock.release()
        ready = [
            (name, text.splitlines()[0].removeprefix("-- "), self.link("sql", run, query=f"@{name}", ask=1))
            for name, text in QUERIES.items()
        ]
        values = {"query": query, "views": VIEWS, "ready": ready, "message": message, "result": result, "lacking": lacking}
        form = self.link("sql", run).partition("?")[0]
        return self.page("sql.html.jinja", self.nav(run, "SQL"), run=run, form=form, seconds=SECONDS, most=ROWS, **values)

    def _rows_for_sql(self, run: str) -> SqlOfRun:
        mark = run, run_mark(self.paths(run))[:-1]
        if self._sql is None or self._sql[0] != mark:
            if self._sql is not None:
                self._sql[1].close()
            self._sql = None
            self._sql = mark, SqlOfRun(self.settings(run), self.paths(run))
        return self._sql[1]

    def close(self) -> None:
        self.drawer.close()
        self.jobs.cancel()


@lru_cache
def _script() -> Markup:
    return Markup((_HERE / "view.js").read_text())
