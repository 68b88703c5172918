"""Delivers a run's alerts: to the terminal, into the run's folder, to Prefect as events, and to the user's hooks.

An alert never delays or ends the run. The same failure of a hook is reported once.
"""

import asyncio
import time
import tomllib
from pathlib import Path
from typing import Self

from prefect.events import emit_event
from pydantic import ValidationError

from storage.runs import RunPaths, check_name
from telemetry.alerts import Alert, AlertSettings, Figures, Hooks, Watch, carry
from telemetry.errors import InputError
from telemetry.progress import reporter

BEAT_S = 5.0
"""Seconds between two checks whether the run has stalled."""
EVENT = "entente.alert"
"""An alert's event in Prefect is named `entente.alert.<rule>`."""
ALERT_FOLDER = "_alerts"
"""Folder under `runs_root` with TOML files of alert hooks."""


def hooks_of(name: str, runs_root: Path) -> Hooks:
    """The hooks of the alert file of this name; none for the empty name.

    Raises:
        InputError: there is no such file, or it holds other keys.
    """
    if not name:
        return Hooks()
    path = runs_root / ALERT_FOLDER / f"{check_name(name, 'alerts.file')}.toml"
    try:
        hooks = tomllib.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InputError(f"the alert file '{path}' cannot be read: {error}") from error
    if not hooks or not hooks.keys() <= Hooks.model_fields.keys() or not all(isinstance(each, str) for each in hooks.values()):
        raise InputError(f'the alert file \'{path}\' must hold hooks only: write command = "...", webhook = "...", or both')
    try:
        return Hooks.model_validate(hooks)
    except ValidationError as error:
        raise InputError(
            f"the alert file '{path}' cannot be used: {error.errors()[0]['msg'].removeprefix('Value error, ')}"
        ) from error


class AlertDesk:
    """Watches one run; use it as an async context manager around the steps."""

    def __init__(self, paths: RunPaths, settings: AlertSettings, *, max_policy_lag: int) -> None:
        self._watch = Watch(paths.root.name, settings, max_policy_lag=max_policy_lag, folder=paths.root)
        self._hooks, self._file = hooks_of(settings.file, paths.root.parent), paths.alerts
        self._last_step = time.monotonic()
        self._checking: asyncio.Task[None] | None = None
        self._deliveries: set[asyncio.Task[None]] = set()
        self._reported: set[str] = set()

    def step(self, step: int, figures: Figures) -> None:
        """Check the rules after a step."""
        self._last_step = time.monotonic()
        self._raise(self._watch.step(step, figures))

    async def __aenter__(self) -> Self:
        self._checking = asyncio.create_task(self._check_stalled())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._checking is not None
        self._checking.cancel()
        await asyncio.gather(self._checking, *self._deliveries, return_exceptions=True)

    async def _check_stalled(self) -> None:
        while True:
            await asyncio.sleep(BEAT_S)
            self._raise(self._watch.quiet(time.monotonic() - self._last_step))

    def _raise(self, alerts: list[Alert]) -> None:
        for alert in alerts:
            reporter().say(f"alert ({alert.name}): {alert.sentence}")
            delivery = asyncio.create_task(asyncio.to_thread(self._deliver, alert))
            self._deliveries.add(delivery)
            delivery.add_done_callback(self._delivered)

    def _deliver(self, alert: Alert) -> None:
        raise_alert(self._file, alert, self._hooks, self._reported)

    def _delivered(self, delivery: asyncio.Task[None]) -> None:
        self._deliveries.discard(delivery)
        if not delivery.cancelled() and (error := delivery.exception()) is not None:
            reporter().say(f"an alert could not be delivered ({type(error).__name__}: {error}); the run continues")


def raise_alert(file: Path, alert: Alert, hooks: Hooks, reported: set[str] | None = None) -> None:
    """Write an alert to its file, and send it to Prefect and to the hooks. Blocks until the hooks have returned.

    Args:
        reported: failures of hooks that are not reported again; new ones are added.
    """
    with file.open("a", encoding="utf-8") as out:
        out.write(alert.as_json() + "\n")
    emit_event(
        event=f"{EVENT}.{alert.name}",
        resource={"prefect.resource.id": f"entente.run.{alert.run}", "prefect.resource.name": alert.run},
        payload={"step": alert.step, "sentence": alert.sentence},
    )
    for trouble in carry(alert, hooks):
        if reported is not None:
            if trouble in reported:
                continue
            reported.add(trouble)
        reporter().say(f"{trouble}; the run continues")
