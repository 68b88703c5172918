"""`entente train --preset hour`: runs the stages of a staged preset, one command at a time, each as a process of its own.

A process that ended gave all its memory back, and a signal ends it as it ends the command alone. What a command prints goes to
this terminal. The figures of finished stages are drawn after each stage.
"""

import json as jsonlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from cli import end_by_signal
from cli.dry_run import show_plan
from evaluation.intervals import format_interval
from inference.memory_plan import free_memory
from pipeline.run_settings import RunSettings
from pipeline.stages import Staged, StagedPreset, StageFigure, check_machine, read_staged
from pipeline.threads import usable_cores
from reports.stages_plot import write_stages
from telemetry.errors import EngineError, InputError

_OWN = {"run", "runs_root", "seed"}
_COUNT_EVERY_S = 30.0
"""Seconds between two counts of the time that a command takes: what a kill may take from the count."""
_PROGRAM = """
from telemetry.parent import end_with_parent
end_with_parent(gently=True, parent={parent})
from cli.main import main
main()
"""


def train_in_stages(preset: str, settings: RunSettings | None, *, resume: bool, dry_run: bool, json: bool) -> None:
    """Run the stages of `preset` that are left.

    Raises:
        InputError: see `read_staged` and `check_machine`; or a setting was given that belongs to a stage.
        EngineError: a command of a stage failed; it has said why.
    """
    given = {} if settings is None else settings.model_dump(exclude_unset=True)
    if foreign := sorted(set(given) - _OWN):
        raise InputError(
            f"'{preset}' is a list of commands with settings of their own, so {', '.join(foreign)} cannot be given: "
            "change a copy of its file, and give that as --preset FILE.toml"
        )
    root = Path(given.get("runs_root", "runs"))
    staged = Staged(given.get("run") or Path(preset).stem, root)
    if resume and "seed" in given:
        raise InputError("a training that is resumed keeps its seed: leave out --seed")
    if resume:
        staged.resume()
        plan = staged.preset
    else:
        plan = read_staged(preset)
    if dry_run:
        return _show(plan, staged, json=json)
    _check_commands(plan, staged)
    check_machine(plan, cores=usable_cores(), free_bytes=free_memory())
    if not resume:
        staged.begin(plan, int(given.get("seed", 0)))
    try:
        while not staged.is_done:
            _one_stage(staged)
    except KeyboardInterrupt:
        where = "" if root == Path("runs") else f" --runs-root {root}"
        sys.stderr.write(
            f"finished work is kept; continue with: entente train --preset {preset} --run {staged.name}{where} --resume\n"
        )
        raise
    for figure in staged.figures:
        print(_line(figure))
    last = staged.model_of(staged.figures[-1].stage)
    print(f"the last model lies in {last}; meet it: entente play --against {last}")
    if json:
        print(jsonlib.dumps({"run": staged.name, "model": str(last), "stages": [asdict(each) for each in staged.figures]}))


def _check_commands(plan: StagedPreset, staged: Staged) -> None:
    """Check the words of all commands, so that a mistake in the last stage does not wait for hours.

    Raises:
        InputError: names the command, and what is wrong with it.
    """
    from cyclopts import CycloptsError

    from cli.commands import command_line
    from cli.main import sentence_of

    for stage in plan.stages:
        for words in staged.commands_of(stage, base="base", seed=0):
            try:
                command_line().parse_args(words, exit_on_error=False, print_error=False)
            except (CycloptsError, ValueError) as error:
                raise InputError(f"stage '{stage.name}' cannot run 'entente {words[0]}': {sentence_of(error)}") from error


def _one_stage(staged: Staged) -> None:
    while (words := staged.next_command()) is not None:
        _run(words, staged.spend)
        staged.command_done(words)
    out = _run(staged.match_command(), staged.spend)
    print(_line(staged.stage_done(jsonlib.loads(out.strip().splitlines()[-1]))), flush=True)
    write_stages(staged.root, [asdict(figure) for figure in staged.figures])


def _run(words: list[str], spend: Callable[[float], None]) -> str:
    """Run one command to its end; its output where it ends with a JSON object.

    Args:
        spend: called at least every `_COUNT_EVERY_S` with the seconds since its last call.

    Raises:
        EngineError: it failed.
        KeyboardInterrupt: a signal asked this process to end; the command got it too, and has ended.
    """
    sys.stderr.write(f"entente {subprocess.list2cmdline(words)}\n")
    counted, wanted = time.monotonic(), subprocess.PIPE if words[-1] == "--json" else None
    program = [sys.executable, "-P", "-c", _PROGRAM.format(parent=os.getpid()), *words]
    # In a session of its own the command gets one signal, from here, and not a second one from the terminal.
    child = subprocess.Popen(program, stdout=wanted, text=True, start_new_session=True)
    out: str | None = None
    try:
        while child.returncode is None:
            with suppress(subprocess.TimeoutExpired):
                out = child.communicate(timeout=_COUNT_EVERY_S)[0]
            spend((now := time.monotonic()) - counted)
            counted = now
    except KeyboardInterrupt:
        child.send_signal(end_by_signal.heard() or signal.SIGINT)
        child.wait()
        spend(time.monotonic() - counted)
        raise
    if child.returncode:
        raise EngineError(
            f"the stage stopped: its command ended with {child.returncode} (see above); after a repair continue with --resume"
        )
    return out or ""


def _line(figure: StageFigure) -> str:
    low_high = format_interval((figure.low, figure.high), ".3f")
    return f"{figure.stage}: {figure.measure} {figure.mean:.3f} {low_high} after {figure.hours:.1f} hours, {figure.games} games"


def _show(plan: StagedPreset, staged: Staged, *, json: bool) -> None:
    needs = {"cores": plan.cores, "memory_gib": plan.memory_gib}
    match = f"{plan.games} games of {plan.years} years, one seat against six of {plan.opponents}, measured by {plan.measure}"
    ends = {"after_each_stage": match, "ends_early": "never" if plan.target is None else f"above {plan.target:g}"}
    stages = {f"{stage.name} {number}": line for stage in plan.stages for number, line in enumerate(stage.commands, 1)}
    names = {"name": staged.name, "state": str(staged.file)}
    show_plan({"command": "train in stages", "run": names, "needs": needs, "ends": ends, "stages": stages}, json=json)
