"""Where metrics go: one JSON line per step in the run's folder, and W&B, offline unless asked otherwise.

One `log` per step with an explicit step, so that no axis is ever doubled. A sink that cannot open is an error at the
start, never later.
"""

import json
import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field

from telemetry.errors import InputError
from telemetry.metrics import check

WandbMode = Literal["offline", "online", "disabled"]


class TelemetrySettings(BaseModel):
    """Where figures go beside the run's own files."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    wandb: WandbMode = "offline"
    """W&B: offline writes under the run's folder and needs no account; online needs a login."""
    wandb_project: str = "entente"
    """W&B project that runs belong to."""
    report: bool = True
    """Write the run's report.html when it is done; `entente report` writes it at any time."""
    gpu_beat_s: Annotated[float, Field(ge=0)] = 2.0
    """Seconds between two readings of the GPUs (NVML), which go into the step's figures and the run's devices.jsonl; 0: only one
    at the end of each step."""


class MetricLog:
    """Appends each step's figures to `metrics.jsonl` and to W&B."""

    def __init__(
        self, file: Path, name: str, settings: TelemetrySettings, configuration: Mapping[str, Any], *, keep_to: int = -1
    ) -> None:
        """Open both.

        Args:
            keep_to: the newest step whose checkpoint stands, of a run that is resumed: lines of later steps go, which will be
                trained again, and so does a last line that a kill cut in two.

        Raises:
            InputError: W&B is asked for and refuses, such as for want of a login.
        """
        self.last_step = _keep_lines(file, keep_to)
        self._file = file.open("a", encoding="utf-8")
        self._wandb: Any = None
        if settings.wandb != "disabled":
            import wandb

            logging.getLogger("wandb").setLevel(logging.ERROR)
            try:
                self._wandb = wandb.init(
                    project=settings.wandb_project,
                    name=name,
                    dir=str(file.parent),
                    mode=settings.wandb,
                    # What a resumed run adds stands beside what it was; offline, W&B keeps each part in a folder of its own.
                    group=name,
                    config=dict(configuration),
                    settings=wandb.Settings(silent=True, console="off", x_disable_stats=True),
                )
            except wandb.Error as error:
                self._file.close()
                raise InputError(f"W&B cannot be opened ({error}): mend that, or set telemetry.wandb to 'offline'") from error

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Record the figures of `step` under registered names.

        Raises:
            KeyError: a name is not registered.
        """
        check(values)
        self.last_step = step
        self._file.write(json.dumps({"step": step, "time": round(time.time(), 3), **values}) + "\n")
        self._file.flush()
        if self._wandb is not None:
            self._wandb.log(dict(values), step=step)

    def close(self) -> None:
        """Flush and close both."""
        self._file.close()
        if self._wandb is not None:
            self._wandb.finish()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _keep_lines(file: Path, keep_to: int) -> int:
    """Rewrite `file` with the whole lines of steps up to `keep_to`; the last step among them, -1 if there is none."""
    if not file.exists():
        return -1
    kept: list[str] = []
    last = -1
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            step = int(json.loads(line)["step"])
        except (ValueError, KeyError, TypeError):
            continue
        if last < step <= keep_to:
            kept.append(line + "\n")
            last = step
    aside = file.with_name(f".{file.name}.tmp")
    with aside.open("w", encoding="utf-8") as out:
        out.writelines(kept)
        out.flush()
        os.fsync(out.fileno())
    os.replace(aside, file)
    return last
