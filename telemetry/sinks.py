"""Writes metrics: one JSON line per step in the run's folder, and to W&B, offline by default.

There is one `log` per step, with an explicit step number. The run's own file is authoritative. W&B may fail, and its tables are
made in another thread, so that no step waits for it.
"""

import json
import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from telemetry.metrics import check
from telemetry.progress import reporter
from telemetry.setting_marks import Settings
from telemetry.wandb_run import Table, WandbMode, WandbRun

TableMaker = Callable[[int], Sequence[Table]]
"""Makes the tables of a finished step; called in its own thread."""
TABLES_EVERY = 10
"""Steps between two sets of W&B tables, which are much larger than a step's metrics."""
_LAG_ROWS = 4000
_LAGS = {"train/policy_lag_0_share": "0", "train/policy_lag_1_share": "1", "train/policy_lag_2_share": "2",
         "train/policy_lag_more_share": "3 and more"}  # fmt: skip
"""Share of a step's rows -> their policy lag."""


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
        tables: TableMaker | None = None,
    ) -> None:
        """Open both.

        Args:
            keep_to: the newest step whose checkpoint stands, of a run that is resumed: lines of later steps go, which will be
                trained again, and so does a last line that a kill cut in two.
            tables: makes what W&B shows of a step beside its figures.
        """
        kept = _keep_lines(file, keep_to)
        self.last_step = max(kept, default=-1)
        self._file = file.open("a", encoding="utf-8")
        self._lags: deque[tuple[int, str, int]] = deque(maxlen=_LAG_ROWS)
        for step, values in kept.items():
            self._lags += lag_rows(step, values)
        self._make = tables
        self._made: Future[list[Table]] | None = None
        self._shown = max(0, self.last_step)
        self._aside = ThreadPoolExecutor(1, thread_name_prefix="tables")
        self._wandb: WandbRun | None = None
        if settings.wandb != "disabled":
            self._wandb = WandbRun(file.parent, name, settings.wandb, configuration)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Record the figures of `step` under registered names.

        The tables of a step go with the call of the next one: they are made meanwhile.

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
        self._wandb.log(self._shown, values, self._ready_tables(wait=last))
        self._lags += lag_rows(step, values)
        if step and step % TABLES_EVERY == 0 and self._made is None:
            self._made = self._aside.submit(self._tables_of, step)

    def _ready_tables(self, *, wait: bool) -> list[Table]:
        if self._made is None or not (wait or self._made.done()):
            return []
        made, self._made = self._made, None
        return made.result()

    def _tables_of(self, step: int) -> list[Table]:
        found = [Table(name="policy_lag", columns=("step", "policy lag", "decisions"), rows=list(self._lags))]
        if self._make is not None:
            try:
                found += self._make(step)
            except Exception as error:  # a failed display must not end a run
                self._make = None
                reporter().say(f"there are no more tables for W&B ({type(error).__name__}: {error}); the run goes on")
        return found

    def close(self) -> None:
        """Close the run's own file; W&B waits for `finish`."""
        self._file.close()
        self._aside.shutdown(wait=True)

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


def lag_rows(step: int, values: Mapping[str, float]) -> list[tuple[int, str, int]]:
    """A step's rows by policy lag: (step, lag, decisions); lags without rows are left out."""
    counts = {lag: round(values.get(name, 0.0) * values.get("train/decisions", 0.0)) for name, lag in _LAGS.items()}
    return [(step, lag, count) for lag, count in counts.items() if count]


def _keep_lines(file: Path, keep_to: int) -> dict[int, dict[str, float]]:
    """Keep only the complete lines of steps up to `keep_to` in `file`. Returns their metrics by step."""
    if not file.exists():
        return {}
    kept: list[str] = []
    figures: dict[int, dict[str, float]] = {}
    last = -1
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            values = json.loads(line)
            step = int(values["step"])
        except (ValueError, KeyError, TypeError):
            continue
        if last < step <= keep_to:
            kept.append(line + "\n")
            figures[step], last = values, step
    aside = file.with_name(f".{file.name}.tmp")
    with aside.open("w", encoding="utf-8") as out:
        out.writelines(kept)
        out.flush()
        os.fsync(out.fileno())
    os.replace(aside, file)
    return figures
