"""Delivers a run's alerts: to the terminal, the run's folder, and as Prefect events, which automations forward. An alert never
stops the run."""

import asyncio
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Self

from prefect.events import emit_event
from prefect.settings import get_current_settings

from entente.reports.read_run import MetricsFile
from entente.telemetry.alerts import Alert, Figures, Watch
from entente.telemetry.progress import reporter
from storage.runs import RunPaths

BEAT_S = 5.0
"""Seconds between checks for a stalled run or a full disk."""
_SLEPT_S = 60.0
"""By which the clock gets ahead of a monotonic one, which stops while a machine sleeps."""
EVENT = "entente.alert"
"""Prefix of an alert's event in Prefect, `entente.alert.<rule>`."""


class AlertDesk:
    """Watches one run; an async context manager around the steps."""

    def __init__(self, paths: RunPaths, *, max_policy_lag: int, done: int = 0) -> None:
        """`done`: steps that a resumed run has done."""
        home = get_current_settings().home
        folders = [paths.root, *([home] if (home / "prefect.db").is_file() else [])]
        logged = MetricsFile(paths.metrics).read([])
        past = [figures for step, figures in sorted(logged.items()) if 0 < step <= done]
        self._watch = Watch(paths.root.name, max_policy_lag=max_policy_lag, folders=folders, done=done, past=past)
        self._file, self._touched = paths.alerts, paths.scores
        self._last_step = time.monotonic()
        self._checking: asyncio.Task[None] | None = None

    def step(self, step: int, figures: Figures) -> None:
        self._last_step = time.monotonic()
        self._raise(self._watch.step(step, figures))

    async def __aenter__(self) -> Self:
        self._checking = asyncio.create_task(self._check_quiet())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._checking is not None
        self._checking.cancel()
        await asyncio.gather(self._checking, return_exceptions=True)

    async def _check_quiet(self) -> None:
        ahead = time.time() - time.monotonic()
        while True:
            await asyncio.sleep(BEAT_S)
            before, ahead = ahead, time.time() - time.monotonic()
            if ahead - before > _SLEPT_S:
                with suppress(OSError):
                    os.utime(self._touched)  # else recovery would take a night's sleep for a hang
            self._raise(self._watch.quiet(time.monotonic() - self._last_step))

    def _raise(self, alerts: list[Alert]) -> None:
        for alert in alerts:
            reporter().say(f"alert ({alert.name}): {alert.sentence}")
            try:
                raise_alert(self._file, alert)
            except Exception as error:  # a full disk, or Prefect: the run continues
                reporter().say(f"an alert could not be delivered ({type(error).__name__}: {error}); the run continues")


def raise_alert(file: Path, alert: Alert) -> None:
    with file.open("a", encoding="utf-8") as out:
        out.write(alert.as_json() + "\n")
    emit_event(
        event=f"{EVENT}.{alert.name}",
        resource={"prefect.resource.id": f"entente.run.{alert.run}", "prefect.resource.name": alert.run},
        payload={"step": alert.step, "sentence": alert.sentence},
    )
