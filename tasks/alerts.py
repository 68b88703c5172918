"""Alerts of a run on their way: to whoever looks on, into the run's folder, to Prefect as events, and to the user's hooks.

Promise: raising an alert never delays or ends the run. A hook's failure is said once for each hook that fails in a new way.
"""

import asyncio
import time
import tomllib
from pathlib import Path
from typing import Self

from prefect.events import emit_event

from storage.runs import RunPaths, check_name
from telemetry.alerts import Alert, AlertSettings, Figures, Watch, carry
from telemetry.errors import InputError
from telemetry.progress import reporter

BEAT_S = 5.0
"""Seconds between two looks at how long the run has been quiet."""
EVENT = "entente.alert"
"""Prefect's name of an alert is this, a dot and the rule's."""
ALERT_FOLDER = "_alerts"
"""Beside the runs, under `runs_root`: TOML files that say where alerts go."""
_HOOKS = {"command", "webhook"}


def with_hooks(settings: AlertSettings, runs_root: Path) -> AlertSettings:
    """`settings` with the command and the webhook of the file that they name, if they name one.

    Raises:
        InputError: there is no such file, it says something else, or the settings have hooks of their own beside it.
    """
    if not settings.file:
        return settings
    if settings.command or settings.webhook:
        raise InputError("alerts.file says the command and the webhook: leave alerts.command and alerts.webhook out")
    path = runs_root / ALERT_FOLDER / f"{check_name(settings.file, 'alerts.file')}.toml"
    try:
        said = tomllib.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InputError(f"the alert file '{path}' cannot be read: {error}") from error
    if not said or not said.keys() <= _HOOKS or not all(isinstance(each, str) for each in said.values()):
        raise InputError(f'the alert file \'{path}\' says what is no hook: write command = "...", webhook = "...", or both')
    return settings.model_copy(update=said)


class AlertDesk:
    """Watches one run while its block lasts."""

    def __init__(self, paths: RunPaths, settings: AlertSettings, *, max_policy_lag: int) -> None:
        self._watch = Watch(paths.root.name, settings, max_policy_lag=max_policy_lag, folder=paths.root)
        self._settings, self._file = with_hooks(settings, paths.root.parent), paths.alerts
        self._last_step = time.monotonic()
        self._looking: asyncio.Task[None] | None = None
        self._carried: set[asyncio.Task[None]] = set()
        self._said: set[str] = set()

    def step(self, step: int, figures: Figures) -> None:
        """A step is done."""
        self._last_step = time.monotonic()
        self._raise(self._watch.step(step, figures))

    async def __aenter__(self) -> Self:
        self._looking = asyncio.create_task(self._look())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._looking is not None
        self._looking.cancel()
        await asyncio.gather(self._looking, *self._carried, return_exceptions=True)

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(BEAT_S)
            self._raise(self._watch.quiet(time.monotonic() - self._last_step))

    def _raise(self, alerts: list[Alert]) -> None:
        for alert in alerts:
            reporter().say(f"alert ({alert.name}): {alert.sentence}")
            carried = asyncio.create_task(asyncio.to_thread(self._carry, alert))
            self._carried.add(carried)
            carried.add_done_callback(self._arrived)

    def _carry(self, alert: Alert) -> None:
        raise_alert(self._file, alert, self._settings, self._said)

    def _arrived(self, carried: asyncio.Task[None]) -> None:
        self._carried.discard(carried)
        if not carried.cancelled() and (error := carried.exception()) is not None:
            reporter().say(f"an alert was lost on its way ({type(error).__name__}: {error}); the run goes on")


def raise_alert(file: Path, alert: Alert, settings: AlertSettings, said: set[str] | None = None) -> None:
    """Carry an alert to its file, to Prefect and to the hooks; blocks as long as the hooks do.

    Args:
        said: what went wrong with hooks before, and need not be said again; taken down here.
    """
    _append(file, alert.as_json() + "\n")
    emit_event(
        event=f"{EVENT}.{alert.name}",
        resource={"prefect.resource.id": f"entente.run.{alert.run}", "prefect.resource.name": alert.run},
        payload={"step": alert.step, "sentence": alert.sentence},
    )
    for trouble in carry(alert, settings):
        if said is None or trouble not in said:
            (said if said is not None else set()).add(trouble)
            reporter().say(f"{trouble}; the run goes on")


def _append(file: Path, line: str) -> None:
    with file.open("a", encoding="utf-8") as out:
        out.write(line)
