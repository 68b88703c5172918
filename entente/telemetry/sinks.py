"""Writes metrics: one JSON line per step in the run's folder, and to W&B, offline by default.

There is one `log` per step, with an explicit step number. The run's own file is authoritative. W&B may fail.
"""

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from entente.telemetry.metrics import check
from entente.telemetry.setting_marks import Settings
from entente.telemetry.wandb_run import WandbMode, WandbRun


class TelemetrySettings(Settings):
    """Where metrics go besides the run's own files."""

    wandb: WandbMode = "offline"
    """W&B mode: offline writes into the run's folder; online needs a login, and falls back to offline without one."""
    report: bool = True
    """Write the run's report.html when it is done; `entente report` writes it at any time."""


class MetricLog:
    """Appends each step's figures to `metrics.jsonl` and to W&B."""

    def __init__(
        self,
        file: Path,
        name: str,
        settings: TelemetrySettings,
        configuration: Mapping[str, Any],
        *,
        keep_to: int = -1,
    ) -> None:
        """Open both.

        Args:
            keep_to: the newest step whose checkpoint stands, of a run that is resumed: lines of later steps go, which will be
                trained again, and so does a last line that a kill cut in two.
        """
        kept = _keep_lines(file, keep_to)
        self.last_step = kept
        self._file = file.open("a", encoding="utf-8")
        self._shown = max(0, self.last_step)
        self._wandb: WandbRun | None = None
        if settings.wandb != "disabled":
            self._wandb = WandbRun(file.parent, name, settings.wandb, configuration)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Record the figures of `step` under registered names.

        Raises:
            KeyError: a name is not registered.
        """
        check(values)
        self.last_step = step
        self._file.write(json.dumps({"step": step, "time": round(time.time(), 3), **values}) + "\n")
        self._file.flush()
        if self._wandb is None:
            return
        # Final scores are logged under the last step: W&B accepts a step only once, and the run may be extended.
        last = all(name.startswith("score/") for name in values)
        self._shown = self._shown if last else step
        self._wandb.log(self._shown, values)

    def close(self) -> None:
        """Close the run's own file; W&B waits for `finish`."""
        self._file.close()

    def finish(self, report: Path | None = None, *, failed: bool = False) -> None:
        """Send the rest to W&B, with the run's report if there is one, and close W&B."""
        if self._wandb is not None:
            self._wandb.finish(report, failed=failed)
            self._wandb = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Close the file; W&B stays open for the report of a run that ended well."""
        self.close()
        if kind is not None:
            self.finish(failed=True)


def _keep_lines(file: Path, keep_to: int) -> int:
    """Keep only the complete lines of steps up to `keep_to` in `file`. Returns the last of these steps; -1 if there is none."""
    if not file.exists():
        return -1
    kept, last = list[str](), -1
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
