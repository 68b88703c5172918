"""The run in W&B: figures, and its report as an artifact.

There is one log call per step. A resumed run continues its W&B run, also offline, where each part has a folder of its own and
`wandb sync` puts them together. W&B takes no step twice: a step that is trained again after a kill keeps its first figures there.
A failure of W&B (no login, no network, a full quota) is reported once and does not affect the run. Data that could not be sent is
written into the run's folder.
"""

import logging
import os
import secrets
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import psutil

from entente.telemetry.progress import reporter

WandbMode = Literal["offline", "online", "disabled"]
REACH_S = 30
"""Time limit in seconds for opening W&B, and for sending the last metrics."""


class WandbRun:
    """A run in W&B; only the first failure is reported."""

    def __init__(self, folder: Path, name: str, mode: WandbMode, configuration: Mapping[str, Any]) -> None:
        """Open it, offline if online is refused. W&B's own variables WANDB_PROJECT and WANDB_RUN_GROUP name project and group.

        Args:
            folder: takes W&B's own folder `wandb/`, and the run's id and newest step, so that a resumed run finds them.
        """
        import wandb

        self._wandb: Any = wandb
        self._folder, self._name = folder, name
        self._step_file = folder / ".wandb_step"
        newest = self._step_file.read_text() if self._step_file.is_file() else ""
        self._logged_before = int(newest) if newest.isdigit() else -1
        """Newest step that an earlier part of the run has logged."""
        logging.getLogger("wandb").setLevel(logging.ERROR)
        # Staged files belong into the run's folder, not into the user's home.
        os.environ.setdefault("WANDB_DATA_DIR", str(folder / "wandb"))
        wandb.setup(wandb.Settings(silent=True))
        if mode == "online" and (refused := self._why_not_online()):
            self._say(f"W&B has no login ({refused})", "write offline", "log in by `wandb login`")
            mode = "offline"
        self._run = self._open(mode, configuration)
        if self._run is None and mode == "online":
            self._begin_again()
            self._run = self._open("offline", configuration)

    def _begin_again(self) -> None:
        """Replace W&B's process: it still holds the id of the run that failed to open, and may wait for the network for ever."""

        def end() -> None:
            with suppress(SystemExit):  # with the exit code of that process
                self._wandb.teardown()

        services = [child for child in psutil.Process().children() if child.name().startswith("wandb-core")]
        ending = threading.Thread(target=end, daemon=True)
        ending.start()
        ending.join(REACH_S)
        for service in services:
            with suppress(psutil.NoSuchProcess):
                service.kill()
        ending.join()
        self._wandb.setup(self._wandb.Settings(silent=True))

    def _why_not_online(self) -> str:
        try:
            return "" if self._wandb.login(prompt=False, verify=False) else "no API key is configured"
        except Exception as error:  # for example an invalid key
            return _one_line(error)

    def _open(self, mode: WandbMode, configuration: Mapping[str, Any]) -> Any:
        online = mode == "online"
        try:
            return self._wandb.init(
                project=os.environ.get("WANDB_PROJECT", "entente"),
                name=self._name,
                dir=str(self._folder),
                mode=mode,
                id=_id_of(self._folder),
                resume="allow",
                group=os.environ.get("WANDB_RUN_GROUP", self._name),
                config=dict(configuration),
                settings=self._wandb.Settings(
                    silent=True, console="off", x_disable_stats=True, init_timeout=REACH_S, finish_timeout=REACH_S
                ),
            )
        except Exception as error:
            what, cure = ("write offline", "mend the network") if online else ("write no more to it", "set telemetry.wandb")
            self._say(f"W&B cannot be opened ({_one_line(error)})", what, cure)
            return None

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log the metrics of a step.

        Of a step that an earlier part of the run has logged only scores are taken, into the summary.
        """
        if self._run is None:
            return
        try:
            if step <= self._logged_before:
                self._run.summary.update({name: value for name, value in values.items() if name.startswith("score/")})
                return
            self._run.log(dict(values), step=step)
            self._step_file.write_text(str(step))
        except Exception as error:
            self._give_up(error)

    def finish(self, report: Path | None = None, *, failed: bool = False) -> None:
        """Send the rest, with the run's report as an artifact if there is one."""
        if self._run is None:
            return
        try:
            if report is not None and report.is_file():
                artifact = self._wandb.Artifact(f"report-{self._run.id}", type="report", description=f"{self._name} on one page")
                artifact.add_file(str(report))
                self._run.log_artifact(artifact)
            self._run.finish(exit_code=int(failed))
        except Exception as error:
            self._give_up(error)
        self._run = None

    def _give_up(self, error: Exception) -> None:
        self._run = None
        self._say(f"W&B failed ({_one_line(error)})", "write no more to it", "look at its own logs in the run's folder wandb")

    def _say(self, wrong: str, what: str, cure: str) -> None:
        also = "; `wandb sync` sends it later" if what == "write offline" else ""
        reporter().say(f"{wrong}: the run goes on and will {what}{also}; metrics.jsonl has every figure. To mend it, {cure}.")


def _id_of(folder: Path) -> str:
    """The run's id in W&B; created once and stored in its folder."""
    file = folder / ".wandb_id"
    if not file.is_file():
        file.write_text(secrets.token_hex(4))
    return file.read_text().strip()


def _one_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return " ".join(lines[0].split()) if lines else type(error).__name__
