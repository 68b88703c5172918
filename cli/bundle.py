"""`entente bundle`: a training step in one file, written or verified."""

import json as jsonlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from cli.options import AsJson, Run, RunsRoot, which_run
from storage.runs import LATEST
from telemetry.errors import InputError, TrainingError
from telemetry.plain_text import shown

if TYPE_CHECKING:
    from pipeline.step_bundle import Verified


def bundle(
    *,
    run: Run = LATEST,
    step: Annotated[int | None, Parameter(help="The step to bundle, counted from 1.")] = None,
    to: Annotated[Path | None, Parameter(help="The file to write; default: RUN-stepN.bundle here.")] = None,
    verify: Annotated[Path | None, Parameter(help="A bundle to verify instead; no run is needed.")] = None,
    base: Annotated[
        Path | None, Parameter(help="With --verify: folder of the base model, if the bundle is without it and the hub has none.")
    ] = None,
    runs_root: RunsRoot = Path("runs"),
    json: AsJson = False,
) -> None:
    """Put a step into one file that anybody can repeat, or verify such a file.

    A bundle holds the rows of the step, its ledger, the state before it, the adapter after it, and the base model if that is
    below 16 MB. It names no folder, address or key of this machine. --verify repeats the step: bit for bit where processor and
    versions are the same, else within a bound, and it says how far off. The exit code is 0 if it agrees, else 1; 2 if the file
    was changed.

    Examples

        entente bundle --run mine --step 7 --to step7.bundle

        entente bundle --verify step7.bundle

        entente bundle --verify step7.bundle --base downloads/base --json
    """
    if verify is not None:
        if step is not None or to is not None or run != LATEST:
            raise InputError("--verify takes a file and no run: leave out --run, --step and --to")
        return _verify(verify, base, json=json)
    if step is None:
        raise InputError("name the step to bundle with --step, or a bundle to verify with --verify")
    if base is not None:
        raise InputError("--base belongs to --verify: leave it out")
    _write(which_run(run, runs_root), step, to, runs_root, json=json)


def _write(run: str, step: int, to: Path | None, runs_root: Path, *, json: bool) -> None:
    from cli.screen import progress_shown
    from pipeline.step_bundle import write_bundle
    from pipeline.threads import apply_threads, usable_cores
    from storage.runs import RunPaths

    file = to or Path(f"{run}-step{step}.bundle")
    apply_threads(usable_cores())
    with progress_shown():
        facts = write_bundle(RunPaths(runs_root / run), step, file)
    base = "its base model" if facts.base.included else f"without its base model '{facts.base.name}'"
    again = f"it does not come out again here: {facts.repeated}" if facts.repeated else "it comes out again here, bit for bit"
    if not facts.repeated and facts.training.device != "cpu" and facts.environment["gpus"] != "none":
        again = "it comes out again here within the bounds of a GPU"
    print(f"step {step} of {run}, {base}, {file.stat().st_size / 1e6:.2f} MB; {again}")
    print(file)
    if json:
        named = facts.model_dump(mode="json", include={"run", "step", "loss", "gradient_norm", "adapter_hash", "repeated"})
        print(jsonlib.dumps({"bundle": str(file), "bytes": file.stat().st_size, **named}))


def _verify(file: Path, base: Path | None, *, json: bool) -> None:
    from cli.screen import progress_shown
    from pipeline.step_bundle import verify_bundle
    from pipeline.threads import apply_threads, usable_cores

    apply_threads(usable_cores())
    with progress_shown():
        found = verify_bundle(file, base)
    for line in _lines(found):
        print(shown(line))  # a stranger wrote the bundle
    if json:
        print(jsonlib.dumps(_result(file, found)))
    if found.replay.difference is not None:
        raise TrainingError(found.replay.difference.sentence)


def _lines(found: "Verified") -> list[str]:
    """The comparison in words."""
    facts, recorded, replayed = found.facts, found.replay.recorded, found.replay.replayed
    lines = [f"step {facts.step} of run {facts.run}, from a bundle"]
    if facts.repeated:
        lines.append(f"where it was written it did not come out again: {facts.repeated}")
    lines += [f"not the same here: {'; '.join(found.otherwise_here)}"] if found.otherwise_here else []
    if replayed is not None:
        lines += [
            f"loss           {recorded.loss!r} recorded, {replayed.loss!r} now",
            f"gradient norm  {recorded.gradient_norm!r} recorded, {replayed.gradient_norm!r} now",
            f"adapter        {recorded.adapter_hash} recorded, {replayed.adapter_hash} now",
        ]
    if found.is_bitwise:
        return [*lines, "it comes out again bit for bit"]
    if found.otherwise_here or found.replay.tolerance.loss:
        off, bound = found.farthest_off(), found.replay.tolerance
        lines += [
            f"farthest off   loss of a micro-batch {off.loss:.3g} (bound {bound.loss:g}), gradient norm {off.gradient_norm:.3g} "
            f"of itself (bound {bound.gradient_norm:g}), weights {off.weights:.3g} of an update (bound {bound.weights:g})",
        ]
        return [*lines, *([] if found.replay.difference else ["it comes out again within these bounds"])]
    return lines


def _result(file: Path, found: "Verified") -> dict[str, Any]:
    from dataclasses import asdict

    replay = found.replay
    return {
        "bundle": str(file),
        "run": found.facts.run,
        "step": found.facts.step,
        "agrees": replay.difference is None,
        "bitwise": found.is_bitwise,
        "otherwise_here": found.otherwise_here,
        "farthest_off": asdict(found.farthest_off()),
        "bound": asdict(replay.tolerance),
        "first_difference": replay.difference and asdict(replay.difference),
    }
