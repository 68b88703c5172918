"""Writes metrics: a JSON line per step in the run's folder, and to W&B, offline by default.

The run's file is authoritative. A failure of W&B (login, network, quota, variables) is reported once and does not affect the run.
"""

import json
import logging
import os
import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from pydantic import ValidationError

from entente.telemetry.errors import first_problem
from entente.telemetry.metrics import check
from entente.telemetry.progress import reporter, view_command
from entente.telemetry.setting_marks import Settings

WandbMode = Literal["offline", "online", "disabled"]
REACH_S = 30
_LONGEST = 300
"""Characters of a W&B error in a message: some repeat the value of a variable."""
_data_dirs: set[str] = set()
"""Values of WANDB_DATA_DIR that earlier runs of this process set."""


class TelemetrySettings(Settings):
    """Where metrics go besides the run's own files."""

    wandb: WandbMode = "offline"
    """W&B mode: offline writes into the run's folder; online needs a login, and falls back to offline without one. The variable
    WANDB_MODE may lower it."""
    report: bool = True
    """Write the run's report.html when it is done; `entente report` writes it at any time."""


class MetricLog:
    def __init__(
        self,
        file: Path,
        name: str,
        settings: TelemetrySettings,
        configuration: Mapping[str, Any],
        *,
        keep_to: int = -1,
    ) -> None:
        """`keep_to`: the resumed checkpoint's step; later lines, to be replayed, and a truncated last line are removed."""
        kept = _keep_lines(file, keep_to)
        self.last_step = kept
        self._file = file.open("a", encoding="utf-8")
        self._wandb_step = max(0, self.last_step)
        self._wandb: WandbRun | None = None
        if (mode := _lower_mode(settings.wandb)) != "disabled":
            self._wandb = WandbRun(file.parent, name, mode, configuration)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Raises KeyError for an unregistered name."""
        check(values)
        self.last_step = step
        self._file.write(json.dumps({"step": step, "time": round(time.time(), 3), **values}) + "\n")
        self._file.flush()
        if self._wandb is None:
            return
        # Final scores are logged under the last step: W&B accepts a step only once, and the run may be extended.
        last = all(name.startswith("score/") for name in values)
        self._wandb_step = self._wandb_step if last else step
        self._wandb.log(self._wandb_step, values)

    def close(self) -> None:
        """The run's own file; `finish` closes W&B."""
        self._file.close()

    def finish(self, report: Path | None = None, *, failed: bool = False) -> None:
        if self._wandb is not None:
            self._wandb.finish(report, failed=failed)
            self._wandb = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """After success W&B stays open for the report."""
        self.close()
        if kind is not None:
            self.finish(failed=True)


def _keep_lines(file: Path, keep_to: int) -> int:
    """Drop truncated lines and those of steps after `keep_to`. Returns the last kept step, or -1."""
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


class WandbRun:
    """A run in W&B; only the first failure is reported.

    A resumed run continues it, even offline (`wandb sync` merges the parts). W&B keeps the first metrics of a replayed step."""

    def __init__(self, folder: Path, name: str, mode: WandbMode, configuration: Mapping[str, Any]) -> None:
        """Open the run, offline without a login. WANDB_PROJECT and WANDB_RUN_GROUP name project and group.

        `folder` holds W&B's `wandb/`, and the run's id and newest step for a resumed run."""
        self._folder, self._name = folder, name
        self._step_file = folder / ".wandb_step"
        self._logged_before = -1
        self._wandb: Any = None
        self._run: Any = None
        try:
            self._open(mode, configuration)
        except (Exception, SystemExit) as error:
            self._say(f"W&B cannot be opened ({_one_line(error)})", "write no more to it", _cure(folder))

    def _open(self, mode: WandbMode, configuration: Mapping[str, Any]) -> None:
        import wandb

        self._wandb = wandb
        known = _id_of(self._folder, self._name)
        newest = self._step_file.read_text() if self._step_file.is_file() else ""
        self._logged_before = int(newest) if newest.isdigit() else -1
        logging.getLogger("wandb").setLevel(logging.ERROR)
        # Staged files go to the run's folder, not to the user's home.
        if os.environ.get("WANDB_DATA_DIR") in (None, *_data_dirs):
            os.environ["WANDB_DATA_DIR"] = str(self._folder / "wandb")
            _data_dirs.add(os.environ["WANDB_DATA_DIR"])
        wandb.setup(wandb.Settings(silent=True))
        if mode == "online" and (refused := self._why_not_online()):
            self._say(f"W&B has no login ({refused})", "write offline", "log in by `wandb login`")
            mode = "offline"
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "entente"),
            name=self._name,
            dir=str(self._folder),
            mode=mode,
            id=known,
            resume="allow",
            group=os.environ.get("WANDB_RUN_GROUP", self._name),
            config=dict(configuration),
            notes=f"Steps, groups, decisions and games, live: {view_command(self._folder)}",
            settings=wandb.Settings(
                silent=True, console="off", x_disable_stats=True, init_timeout=REACH_S, finish_timeout=REACH_S
            ),
        )

    def _why_not_online(self) -> str:
        try:
            return "" if self._wandb.login(prompt=False, verify=False) else "no API key is configured"
        except Exception as error:  # for example an invalid key
            return _one_line(error)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """If an earlier part of the run logged the step, add only its scores, to the summary."""
        if self._run is None:
            return
        try:
            if step <= self._logged_before:
                self._run.summary.update({name: value for name, value in values.items() if name.startswith("score/")})
                return
            self._run.log(dict(values), step=step)
            self._run.summary.update({"view": view_command(self._folder, step)})
            self._step_file.write_text(str(step))
        except Exception as error:
            self._give_up(error)

    def finish(self, report: Path | None = None, *, failed: bool = False) -> None:
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


def _id_of(folder: Path, name: str) -> str:
    """The id of the run `name` in W&B. A copied folder has the id of its original, whose name and folder are beside it: the copy
    gets a new id, under which it has logged no step, and so does a renamed run, which could be a copy from another machine. A run
    whose folder was moved keeps its id."""
    file = folder / ".wandb_id"
    text = file.read_text(errors="surrogateescape") if file.is_file() else ""
    first, _, place = text.partition("\n")
    known, _, owner = first.strip().partition(" ")
    original = Path(place, file.name)
    is_copy = bool(place) and os.path.isfile(original) and not original.samefile(file)  # False if it may not be looked at
    if is_copy:  # unless another run has taken the place of a moved one
        is_copy = original.read_text(errors="surrogateescape").startswith(f"{known} ")
    if not known or owner not in ("", name) or is_copy:
        if known:
            reporter().say(
                f"W&B gets a new entry for run '{name}' in '{folder}', because the former one is that of '{place or owner}' and "
                "keeps the steps so far"
            )
        known = secrets.token_hex(4)
        (folder / ".wandb_step").unlink(missing_ok=True)
    file.write_text(f"{known} {name}\n{folder.resolve()}", errors="surrogateescape")
    return known


def _lower_mode(mode: WandbMode) -> WandbMode:
    lowered: dict[str, WandbMode] = {"disabled": "disabled", "offline": "offline", "dryrun": "offline"}
    modes: tuple[WandbMode, ...] = ("disabled", "offline", "online")
    from_environment = lowered.get(os.environ.get("WANDB_MODE", ""), mode)
    return modes[min(modes.index(mode), modes.index(from_environment))]


def _cure(folder: Path) -> str:
    ours = {"WANDB_SILENT": "true", "WANDB_DATA_DIR": str(folder / "wandb")}
    names = [name for name, value in sorted(os.environ.items()) if name.startswith("WANDB_") and ours.get(name) != value]
    return ", ".join([*(f"correct {name}" for name in names), "mend the network or set telemetry.wandb"])


def _one_line(error: BaseException) -> str:
    if isinstance(error, ValidationError):
        return first_problem(error)[:_LONGEST]
    lines = str(error).strip().splitlines()
    return " ".join(lines[0].split())[:_LONGEST] if lines else type(error).__name__
