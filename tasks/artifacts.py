"""A flow run's artifacts in Prefect's UI: progress, steps, result and measurements; also the task that writes `report.html`.

Training never waits for them: a background task sends merged updates, one key per run, reports a failing server once and
counts failures. The run's folder has everything too. Outside a flow run nothing is sent.
"""

import asyncio
import json
import re
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self
from uuid import UUID

from prefect import task
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import ArtifactCreate, ArtifactUpdate
from prefect.context import FlowRunContext

from entente.evaluation.score_files import read_scores
from entente.telemetry.errors import one_line
from entente.telemetry.progress import reporter, view_command
from storage.runs import RunPaths

PAUSE_S = 5.0
"""Seconds between updates of a run's artifacts."""
LAST_WORD_S = 15.0
"""Time limit of the final update, seconds."""
TABLE_ROWS = 100
"""Steps in the table. Prefect's UI renders every row; metrics.jsonl has all steps."""
_STEP_COLUMNS = (
    ("return", "{0:+.2f}", "train/reward"),
    ("decisions", "{0:.0f}", "train/decisions"),
    ("lag", "{0:.0f}", "train/policy_lag_max"),
    ("tokens/s", "{0:.0f}", "rollout/tokens_per_s"),
    ("prefix hits", "{0:.0%}", "rollout/prefix_hit_share"),
    ("entropy", "{0:.2f}", "train/entropy"),
    ("step s", "{0:.2f}", "time/step_s"),
    ("rollout s", "{0:.2f}", "time/rollout_s"),
    ("waited s", "{0:.2f}", "time/rollout_wait_s"),
    ("train s", "{0:.2f}", "time/train_s"),
    ("publish s", "{0:.2f}", "time/publish_s"),
    ("Prefect", "{0:.1%}", "time/orchestration_share"),
    ("GPU", "{0:.0%}", "gpu/utilisation"),
)


class RunPage:
    """Progress and steps of a training run as artifacts. `step` returns at once; a background task sends."""

    def __init__(self, folder: Path, steps: int, *, done: int = 0) -> None:
        """`done`: steps that a resumed run has done, of which its earlier flow runs have the rows."""
        self._folder, self._run, self._steps, self._done, self._step = folder, folder.name, steps, done, done
        self._bar = _Artifact("progress", f"progress-{_slug(self._run)}")
        self._table = _Artifact("table", f"steps-{_slug(self._run)}")
        self._rows: deque[dict[str, str]] = deque(maxlen=TABLE_ROWS)
        self._news, self._closing = asyncio.Event(), asyncio.Event()
        self.failures = 0
        """Updates that did not reach the server."""

    def step(self, step: int, figures: Mapping[str, float]) -> None:
        self._step = step
        self._rows.appendleft(step_row(step, figures))
        self._news.set()

    async def __aenter__(self) -> Self:
        self._sender = asyncio.create_task(self._send(_flow_run_id()))
        return self

    async def __aexit__(self, *_: object) -> None:
        self._closing.set()
        self._news.set()
        await asyncio.wait([self._sender], timeout=LAST_WORD_S)
        if not self._sender.done():
            self.failures += 1
            self._sender.cancel()
            await asyncio.wait([self._sender])
        if self.failures:
            reporter().say(f"{self.failures} updates of the run's Prefect page were lost; the run's own files have everything")

    async def _send(self, flow_run: UUID | None) -> None:
        while flow_run is not None:
            last_time, sent_step = self._closing.is_set(), self._step
            try:
                await self._show(flow_run)
            except Exception as error:  # a failed update must not stop a run
                self.failures += 1
                if self.failures == 1:
                    reporter().say(f"the run's Prefect page was not updated ({one_line(error)}); the run continues")
            if last_time:
                return
            with suppress(TimeoutError):
                await asyncio.wait_for(self._closing.wait(), PAUSE_S)
            if self._step == sent_step and not self._closing.is_set():
                self._news.clear()
                await self._news.wait()

    async def _show(self, flow_run: UUID) -> None:
        if self._bar.is_new:
            async with get_client() as client:
                await client.set_flow_run_name(flow_run, f"train-{self._run}")
        words = f"{self._run}: {self._step} of {self._steps} steps. Look at it: `{view_command(self._folder, self._step)}`"
        await self._bar.show(flow_run, words, 100 * self._step / self._steps)
        since = f"its steps after step {self._done}" if self._done else "its steps"
        which = f"the last {TABLE_ROWS} steps" if self._step - self._done > TABLE_ROWS else since
        words = f"{self._run}: {which}, newest first. One step with its groups: `{view_command(self._folder, self._step)}`"
        await self._table.show(flow_run, words, json.dumps(list(self._rows)))


async def show_result(paths: RunPaths, summary: Mapping[str, Any]) -> None:
    words = f"{paths.root.name}: result of {summary['steps']} steps"
    await _show_once(f"result-{paths.root.name}", words, lambda: result_page(paths, summary))


async def show_sentences(key: str, description: str, sentences: Callable[[], Sequence[str]]) -> None:
    """Show measurements, a paragraph per sentence. `sentences` is called in a thread; an error in it is only reported."""
    await _show_once(key, description, lambda: "\n\n".join([f"# {description}", *sentences()]))


class _Artifact:
    """One artifact of a flow run: the first `show` creates it, later ones update it."""

    def __init__(self, kind: str, key: str) -> None:
        self._kind, self._key = kind, key
        self._id: UUID | None = None

    @property
    def is_new(self) -> bool:
        return self._id is None

    async def show(self, flow_run: UUID, description: str, data: str | float) -> None:
        async with get_client() as client:
            if self._id is None:
                new = ArtifactCreate(type=self._kind, key=self._key, description=description, data=data, flow_run_id=flow_run)
                self._id = (await client.create_artifact(new)).id
            else:
                await client.update_artifact(self._id, ArtifactUpdate(description=description, data=data))


async def _show_once(key: str, description: str, make: Callable[[], str]) -> None:
    flow_run = _flow_run_id()
    if flow_run is None:
        return
    try:
        data = await asyncio.to_thread(make)
        await asyncio.wait_for(_Artifact("markdown", _slug(key)).show(flow_run, description, data), LAST_WORD_S)
    except Exception as error:  # files have the same
        reporter().say(f"Prefect's page does not show '{key}' ({one_line(error)}); nothing else is missing")


def _flow_run_id() -> UUID | None:
    context = FlowRunContext.get()
    return context.flow_run.id if context is not None and context.flow_run is not None else None


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


@task(name="report", persist_result=False, retries=0, tags=["report"])
async def write_report_page(paths: RunPaths) -> None:
    """Write the run's `report.html` in a child process, to keep DuckDB and the plots out of a process with an engine.

    A failure does not fail the run.
    """
    words = ["-P", "-m", "entente.cli.main", "report", "--run", paths.root.name, "--runs-root", str(paths.root.parent)]
    process = await asyncio.create_subprocess_exec(
        sys.executable, *words, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        _, errors = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    if process.returncode:
        last = errors.decode(errors="replace").strip().splitlines()[-1:]
        reporter().say(f"the report was not written ({' '.join(last) or process.returncode}); try `entente report`")


# -- what the pages say -----------------------------------------------------------------------------------------------------


def step_row(step: int, figures: Mapping[str, float]) -> dict[str, str]:
    row = {"step": str(step)}
    return row | {title: form.format(figures[name]) if name in figures else "" for title, form, name in _STEP_COLUMNS}


def result_page(paths: RunPaths, summary: Mapping[str, Any]) -> str:
    from entente.reports.read_run import read_settings
    from entente.reports.sentences import refreshed_positions, verdict  # loads DuckDB

    scores, report, share = read_scores(paths), paths.root / "report.html", summary.get("orchestration_share")
    parts = [
        f"# {paths.root.name}",
        verdict(scores),
        *filter(None, [refreshed_positions(read_settings(paths))]),
        *(f"{label.partition('_vs_')[0]} against {each.opponents}: {each.score.describe()}" for label, each in scores.items()),
        f"It took {summary['steps']} steps, {summary.get('decisions', 0)} decisions "
        f"and {summary.get('wall_s', 0):.0f} s; orders rejected: {summary.get('orders_rejected', 0)}; "
        f"policy lag at most {summary.get('max_policy_lag_seen', 0)}"
        + (f"; Prefect's share of the steps' time: {share:.1%}." if share is not None else "."),
        f"The report is `{report.resolve()}`." if report.exists() else f"The run is in `{paths.root.resolve()}`.",
        f"Steps, groups, decisions and games, live: `{view_command(paths.root, summary['steps'])}`.",
    ]
    return "\n\n".join(parts)
