"""The first step in which two runs differ, and why.

Steps are compared in the order in which a step is made: settings, then rows and lessons, then weights. Checksums and hashes that
the runs recorded decide; no row is read but those of the step that differs. So two runs of thousands of equal steps are compared
in a second. What explains a difference is named only if it was recorded: settings that enter rows or weights, versions, threads.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

import pyarrow as pa

from reports.settings_tree import flat
from storage.arrow_files import read_metadata
from storage.files import FILES
from storage.json_files import read_object
from storage.ledger import MAIN, ledger_path, read_ledger
from storage.lessons import LEDGER_KEY
from storage.lineages import current_lineage, last_step, read_lineage
from storage.outcome import Outcome, read_outcome
from storage.runs import RunPaths
from storage.schema import as_array
from storage.shards import SHARD_NAME
from telemetry.errors import DataError

Kind = Literal["nothing", "base", "settings", "rows", "lessons", "weights", "unknown"]
_SAME_ROW = ("decision_id", "checksum")
"""Columns of a ledger that are equal for equal rows; the id alone names a place in the rollouts, whatever was played there."""
_SHARDS_TRIED = 8
_CHOICE = "selection"
"""Entry of a ledger's metadata with the query by which its rows were chosen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstDifference:
    """The first step of two runs that differs."""

    first: str
    second: str
    """Names of the two runs."""
    kind: Kind
    """What differs; "nothing" if all steps that both have are equal, "unknown" if a file that would tell is gone or damaged."""
    step: int
    """That step; with "nothing" the last step that both have; 0: the runs differ before their first step."""
    sentence: str
    """What differs."""
    reasons: tuple[str, ...] = ()
    """What was recorded that may explain it, each a sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """The recorded steps of a run."""

    paths: RunPaths
    settings: Mapping[str, Any]
    """The run's current settings tree."""
    environment: Mapping[str, str]
    """Its machine and versions; empty if they were not recorded."""
    lineages: Sequence[tuple[str, int]]
    """The lineages of its history, newest first, each with the last step before its own."""

    @property
    def name(self) -> str:
        return self.paths.root.name

    def settings_at(self, step: int) -> dict[str, Any]:
        """Dotted name -> value of the settings of the lineage that recorded the step."""
        file = self.paths.ledger / self.lineage(step) / "settings.json"
        return flat(read_object(file) if file.is_file() else self.settings)

    def lineage(self, step: int) -> str:
        """The lineage that recorded the step."""
        return next((name for name, after in self.lineages if step > after), MAIN)


def read_lineages(paths: RunPaths) -> list[tuple[str, int]]:
    """The lineages of a run's history, as `History.lineages`.

    Raises:
        DataError: the record of one is damaged.
    """
    name, found = current_lineage(paths), list[tuple[str, int]]()
    while (fork := read_lineage(paths, name)) is not None:
        found.append((name, fork.after_step))
        name = fork.parent
    return [*found, (name, 0)]


def first_difference(first: History, second: History, enters: Callable[[str], bool]) -> FirstDifference:
    """Compare two runs step by step, up to the first difference.

    Args:
        enters: whether the setting of this dotted name enters rows or weights.
    """

    def found(kind: Kind, step: int, sentence: str, *reasons: str) -> FirstDifference:
        return FirstDifference(
            first=first.name, second=second.name, kind=kind, step=step, sentence=sentence, reasons=tuple(filter(None, reasons))
        )

    try:
        bases = [_base_model(each.paths) for each in (first, second)]
        if all(bases) and bases[0] != bases[1]:
            names = [str(each.settings.get("inference", {}).get("model")) for each in (first, second)]
            said = "They train other base models" + (f", {names[0]} and {names[1]}." if names[0] != names[1] else ".")
            return found("base", 0, said, _settings_reason(first, second, 1, enters))
        last = min(last_step(first.paths), last_step(second.paths))
        for step in range(1, last + 1):
            names = [each.lineage(step) for each in (first, second)]
            ledgers = [ledger_path(each.paths, name, step) for each, name in zip((first, second), names, strict=True)]
            ours, theirs = (read_metadata(file) for file in ledgers)
            if difference := _at(first, second, step, (ours, theirs), names, enters):
                kind, said, reasons = difference
                if kind == "unknown" and step == last:  # it may be in progress
                    last -= 1
                    break
                return found(kind, step, said, *reasons)
    except DataError as error:
        return found("unknown", 0, f"Where they begin to differ cannot be known: {error}")
    if not last:
        return found("unknown", 0, "One of them has no finished step yet.")
    return found("nothing", last, f"{_first_steps(last)} the same bit for bit: rows, order and weights.", _longer(first, second))


def _at(
    first: History,
    second: History,
    step: int,
    metadata: tuple[Mapping[str, str], Mapping[str, str]],
    lineages: list[str],
    enters: Callable[[str], bool],
) -> tuple[Kind, str, list[str]] | None:
    """What differs in one step, in a sentence, and what may explain it; None if the step is the same in both."""
    ours, theirs = metadata
    trained_otherwise, chosen_otherwise = ours.get("settings_hash") != theirs.get("settings_hash"), _query(ours) != _query(theirs)
    other_rows = ours["content_crc32"] != theirs["content_crc32"]
    settings = _settings_reason(first, second, step, enters) if trained_otherwise or chosen_otherwise or other_rows else ""
    if trained_otherwise or (settings and chosen_otherwise):  # a shortage changes the query too, without a setting
        return "settings", f"From step {step} on they have other settings.", [settings]
    if other_rows:
        tables = [read_ledger(each.paths, name, step) for each, name in zip((first, second), lineages, strict=True)]
        assert tables[0] is not None and tables[1] is not None, "its metadata were just read"
        reasons = _rollout_reasons(first, second, step, settings)
        shortages = zip((first, second), metadata, strict=True)
        reasons += [f"{each.name}: {found['shortage']}." for each, found in shortages if found.get("shortage")]
        return "rows", _rows_sentence(step, tables[0], tables[1]), reasons
    if ours.get(LEDGER_KEY) != theirs.get(LEDGER_KEY):
        return "lessons", f"Step {step} trains on the same rows and on other lessons.", []
    outcomes = [read_outcome(each.paths, name, step) for each, name in zip((first, second), lineages, strict=True)]
    if outcomes[0] is None or outcomes[1] is None or not (outcomes[0].adapter_hash and outcomes[1].adapter_hash):
        return "unknown", f"Step {step} has the same rows, and the weights after it were not recorded.", []
    if outcomes[0].adapter_hash == outcomes[1].adapter_hash:
        return None
    reasons = _trainer_reasons(first, second, outcomes[0], outcomes[1], step)
    return "weights", f"Step {step} has the same rows and other weights: {_losses(outcomes[0], outcomes[1])}.", reasons


def _query(metadata: Mapping[str, str]) -> dict[str, Any] | None:
    """By which rule the rows were chosen, without the lineage's name, which is free."""
    text = metadata.get(_CHOICE)
    return None if text is None else {name: value for name, value in json.loads(text).items() if name != "lineage"}


def _base_model(paths: RunPaths) -> str:
    """Fingerprint of the base model that drew the run's rows, by one of its first shards; empty if none of them tells."""
    folders = (paths.shards / name for name in FILES.folders(paths.shards))
    files = (folder / name for folder in folders for name in sorted(FILES.names(folder)) if SHARD_NAME.fullmatch(name))
    for file in islice(files, _SHARDS_TRIED):
        try:
            return read_metadata(file).get("base_model", "")
        except DataError:
            continue  # a damaged shard; the report of its run names it
    return ""


def _rows_sentence(step: int, ours: pa.Table, theirs: pa.Table) -> str:
    """How the rows of a step differ."""
    rows = [list(zip(*(as_array(table[name]).to_pylist() for name in _SAME_ROW), strict=True)) for table in (ours, theirs)]
    if rows[0] == rows[1]:
        what = "other returns" if not ours["return"].equals(theirs["return"]) else "other advantage groups or lags"
        return f"Step {step} trains on the same rows with {what}."
    same = len({*rows[0]} & {*rows[1]})
    if same == len(rows[0]) == len(rows[1]):
        return f"Step {step} trains on the same rows in another order."
    return f"The rows of step {step} differ: of {len(rows[0]):,} and {len(rows[1]):,}, {same:,} are the same."


def _losses(ours: Outcome, theirs: Outcome) -> str:
    """Where their losses part."""
    if ours.micro_batches == theirs.micro_batches:
        return "all losses are equal, so the weights part in the optimiser or when they are written"
    for update, (one, other) in enumerate(zip(ours.micro_batches, theirs.micro_batches, strict=False), start=1):
        for place, (loss, again) in enumerate(zip(one, other, strict=False), start=1):
            if loss != again:
                return f"the loss of micro-batch {place} of update {update} is {loss!r} and {again!r}"
    return f"they have {len(ours.updates)} and {len(theirs.updates)} updates, or other micro-batches"


def _settings_reason(first: History, second: History, step: int, enters: Callable[[str], bool]) -> str:
    """The settings of the step that differ and enter rows or weights; empty if none does."""
    differ = _settings_differ(first, second, step, enters)
    return f"Settings that differ there: {'; '.join(differ)}." if differ else ""


def _settings_differ(first: History, second: History, step: int, enters: Callable[[str], bool]) -> list[str]:
    ours, theirs = first.settings_at(step), second.settings_at(step)
    names = [name for name in ours | theirs if name not in ("run", "runs_root") and enters(name)]
    return [f"{name} {ours.get(name)!r} and {theirs.get(name)!r}" for name in names if ours.get(name) != theirs.get(name)]


def _rollout_reasons(first: History, second: History, step: int, settings: str) -> list[str]:
    """What may explain other rows after equal weights; `settings`: the sentence about them."""
    before = f"The weights after step {step - 1} are the same" if step > 1 else "Both begin with the same base model"
    if settings:
        return [f"{before}, so what was played or chosen differs.", settings]
    found = [f"{before} and no setting that enters rows differs."]
    if not all(each.settings.get("pipeline", {}).get("deterministic") for each in (first, second)):
        found.append(
            "Without pipeline.deterministic, time decides which version draws a row and which rows are ready for a step."
        )
    return found + _environment_reason(first, second)


def _trainer_reasons(first: History, second: History, ours: Outcome, theirs: Outcome, step: int) -> list[str]:
    """What may explain other weights from equal rows."""
    found = [
        f"The trainers computed with other {what}: {one} and {other}."
        for what, one, other in (
            ("devices", ours.device, theirs.device),
            ("CPU threads", ours.threads, theirs.threads),
            ("versions of torch", ours.torch, theirs.torch),
        )
        if one != other
    ]
    settings = _settings_differ(first, second, step, lambda name: name.startswith("training."))
    found += [f"Settings that differ there: {'; '.join(settings)}."] if settings else []
    found += _environment_reason(first, second)
    return [*found, "To repeat the step in both runs says which of the two comes out again."]


def _environment_reason(first: History, second: History) -> list[str]:
    """What is recorded as different about their machines and versions."""
    ours, theirs = first.environment, second.environment
    differ = [f"{name} {ours[name]} and {theirs[name]}" for name in ours if name in theirs and ours[name] != theirs[name]]
    return [f"Machines or versions differ: {'; '.join(differ)}."] if differ else []


def _first_steps(last: int) -> str:
    return "Their first step is" if last == 1 else f"Their first {last:,} steps are"


def _longer(first: History, second: History) -> str:
    """Which of them has more steps; empty if none."""
    ends = [last_step(each.paths) for each in (first, second)]
    if ends[0] == ends[1]:
        return ""
    return f"{first.name} has {ends[0]:,} steps and {second.name} {ends[1]:,}."
