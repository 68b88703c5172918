"""A step in a bundle: one file from which anybody can repeat a training step and compare the result.

Inside lie the rows of the step, its ledger, the state before it (adapter, optimiser, random generators), the adapter after it,
the settings that it depends on, and the base model if that is small. They are laid out like a run, and `training.replay` repeats
the step from them, here and elsewhere. What a step does not depend on is left out, so a bundle names no path, address or key.
"""

import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from decoding.model_files import base_identity, may_be_hub_id, read_config, weight_files, weights_hash
from inference.memory_plan import read_shape
from pipeline.bundle_file import unpack_bundle_file, write_bundle_file
from pipeline.export_adapter import MOST_BASE_BYTES, copy_base
from pipeline.plans.find_model import model_here, model_of
from pipeline.published_folder import check_paths
from pipeline.run_settings import RunSettings, check_objective, enters_rows_or_weights, settings_at
from records.value_head import base_head
from storage.lineages import lineage_at
from storage.outcome import outcome_path
from storage.rewards import check_blend
from storage.runs import RunPaths
from storage.settings import StorageSettings
from telemetry.errors import EntenteError, InputError, disk_full
from telemetry.machine import code_hash, cpu_model, environment, package_version
from training.checkpoint import drop_metrics
from training.loss_name import check_loss_name
from training.recorded_step import copy_lineages, copy_step
from training.replay import EXACT, Replay, Tolerance, recorded_outcome, replay_step
from training.settings import TrainingSettings

_RUN, _MODEL = "run", "model"
"""Folders inside a bundle."""
_COMPUTING_ROOMS = ("records", "storage", "training")
"""Rooms whose code decides what a step computes."""
_MOST_THREADS = 1024


class BundledBase(BaseModel):
    """The base model of a bundle."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    """Hub id, or name of its folder on the machine that it was made on."""
    from_hub: bool
    identity: str
    """`decoding.model_files.base_identity`."""
    weights: str
    """SHA-256 of its weights."""
    included: bool
    """True if the bundle holds it."""


class BundleFacts(BaseModel):
    """What the manifest of a bundle says beside its files."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    run: str
    """Name of the run."""
    step: int = Field(ge=1)
    lineage: str
    training: TrainingSettings
    """With the run's seed."""
    storage: StorageSettings
    base: BundledBase
    loss: float
    """Loss of the step as recorded; each micro-batch's is in the step's outcome."""
    gradient_norm: float
    adapter_hash: str
    """Hash of the adapter after the step."""
    environment: dict[str, str]
    """The machine and versions that wrote the bundle."""
    repeated: str
    """What came out where the bundle was written: empty if the step was repeated bitwise, else how it differed."""


class Verified(BaseModel):
    """A bundle whose step was repeated here."""

    model_config = ConfigDict(frozen=True, arbitrary_types_allowed=True)

    facts: BundleFacts
    replay: Replay
    otherwise_here: list[str]
    """What the result may depend on and is not the same here, as "torch 2.9, here 2.10"; empty: it must be bitwise."""

    @property
    def is_bitwise(self) -> bool:
        """Whether losses, gradient norms and the adapter's weights came out bit for bit."""
        recorded, replayed = self.replay.recorded, self.replay.replayed
        return replayed is not None and recorded.adapter_hash == replayed.adapter_hash and self.farthest_off() == EXACT

    def farthest_off(self) -> Tolerance:
        """The largest differences that came out, in the units of the bound; infinite where something cannot be compared."""
        recorded, replayed, far = self.replay.recorded, self.replay.replayed, float("inf")
        if replayed is None or [*map(len, recorded.micro_batches)] != [*map(len, replayed.micro_batches)]:
            return Tolerance(loss=far, gradient_norm=far, weights=far)
        pairs = list(zip(recorded.updates, replayed.updates, strict=True))
        losses = [_gap(*both) for then, now in pairs for both in zip(then.micro_batches, now.micro_batches, strict=True)]
        norms = [_gap(then.gradient_norm, now.gradient_norm) / abs(then.gradient_norm or 1.0) for then, now in pairs]
        weights = self.replay.weights_off
        return Tolerance(
            loss=max(losses, default=0.0), gradient_norm=max(norms, default=0.0), weights=far if weights is None else weights
        )


def write_bundle(paths: RunPaths, step: int, to: Path) -> BundleFacts:
    """Bundle a step of the run in `paths`.

    A state before the step that is not kept is made again, which repeats earlier steps. Then the step is repeated from the
    bundle's own files. If it does not come out as recorded, the bundle is written all the same and says so: that is what a report
    of an error needs.

    Raises:
        InputError: there is no such finished step, a file that it needs is gone, or `to` exists.
        DataError: a file that it needs is damaged.
    """
    if to.exists():
        raise InputError(f"'{to}' exists: name another file, or remove it")
    settings = settings_at(paths, step)
    check_objective(settings)
    training, model = _training(settings), model_of(settings, paths.root.parent, paths.root.name)
    recorded, lineage = recorded_outcome(paths, step, training), lineage_at(paths, step)
    with tempfile.TemporaryDirectory(prefix="entente-bundle-") as scratch:
        folder = Path(scratch) / "bundle"
        inside = RunPaths(folder / _RUN).create()
        base = _bundle_base(settings, model, folder / _MODEL)
        _add_state_before(paths, inside, step)
        copy_lineages(paths, inside, lineage)
        copy_step(paths, inside, lineage, step)
        shutil.copyfile(outcome_path(paths, lineage, step), outcome_path(inside, lineage, step))
        published = paths.adapter(step).exists()
        if published:
            shutil.copytree(paths.adapter(step), inside.adapter(step))
        found = replay_step(
            inside,
            step,
            folder / _MODEL if base.included else model,
            training,
            settings.storage,
            keep=None if published else inside,
        )
        if not published:
            shutil.rmtree(inside.checkpoint(step), ignore_errors=True)  # only its adapter is needed
        if found.difference is not None and not published:
            raise InputError(
                f"version {step} of run '{paths.root.name}' is no longer published, and its step does not come out again: "
                f"{found.difference.sentence}"
            )
        facts = BundleFacts(
            run=paths.root.name,
            step=step,
            lineage=lineage,
            training=training,
            storage=settings.storage,
            base=base,
            loss=recorded.loss,
            gradient_norm=recorded.gradient_norm,
            adapter_hash=recorded.adapter_hash,
            environment=computing_environment(),
            repeated="" if found.difference is None else found.difference.sentence,
        )
        check_paths(folder, (Path.cwd(), Path.home(), paths.root.parent, model))
        write_bundle_file(to, folder, facts.model_dump(mode="json"))
    return facts


def verify_bundle(file: Path, base: Path | None = None) -> Verified:
    """Repeat the step of a bundle and compare; no run is needed.

    The result must be bitwise on a machine of the same kind with the same versions, else within `training.replay.TOLERANCES`.

    Args:
        base: folder of the base model, if the bundle does not hold it and it is not found by its hub id.

    Raises:
        InputError: the bundle is damaged, was changed, or cannot be repeated here.
    """
    with tempfile.TemporaryDirectory(prefix="entente-bundle-") as scratch:
        folder = Path(scratch) / "bundle"
        facts = _read_facts(file, unpack_bundle_file(file, folder))
        try:
            check_blend(facts.storage.blend)
            check_loss_name(facts.training.loss)
            paths = RunPaths(folder / _RUN)
            threads = recorded_outcome(paths, facts.step, facts.training).threads
            if not isinstance(threads, int) or not 1 <= threads <= _MOST_THREADS:
                raise InputError(f"its step was computed by {threads!r} threads")
            here = computing_environment()
            otherwise = [
                f"{name} {value}, here {here.get(name, 'unknown')}"
                for name, value in facts.environment.items()
                if here.get(name) != value
            ]
            model = _base_here(facts.base, folder / _MODEL, base)
            replay = replay_step(paths, facts.step, model, facts.training, facts.storage, same_machine=not otherwise)
        except Exception as error:  # files of a stranger are loaded here, and they may raise anything
            if (full := disk_full(error)) is not None:
                raise full from error
            said = (str(error).strip().splitlines() or [""])[0].replace(str(folder), str(file))
            kind = "" if isinstance(error, EntenteError) else f"{type(error).__name__}: "
            raise InputError(f"bundle '{file}' cannot be repeated: {kind}{said}") from error
    return Verified(facts=facts, replay=replay, otherwise_here=otherwise)


def _gap(recorded: float, again: float) -> float:
    """How far two figures are apart; two that are not finite in the same way are equal."""
    return 0.0 if recorded == again or (recorded != recorded and again != again) else abs(recorded - again)


def computing_environment() -> dict[str, str]:
    """Facts about this machine and code on which the last bits of a step depend."""
    facts = environment()
    return {
        "cpu": cpu_model(),
        "gpus": facts["gpus"],
        "torch": facts["torch"],
        "transformers": facts["transformers"],
        "peft": package_version("peft"),
        "numpy": package_version("numpy"),
        "code": code_hash(_COMPUTING_ROOMS),
    }


def _training(settings: RunSettings) -> TrainingSettings:
    """The trainer's settings on which a step depends, with the run's seed; the others are left at their defaults."""
    kept = {name: value for name, value in settings.training if enters_rows_or_weights(f"training.{name}")}
    return TrainingSettings.model_validate({**kept, "seed": settings.seed})


def _add_state_before(paths: RunPaths, inside: RunPaths, step: int) -> None:
    """Put the checkpoint before `step` into the bundle, made again if the run does not keep it; none before the first step."""
    if not (before := step - 1):
        return
    copy = inside.checkpoint(before)
    try:
        shutil.copytree(paths.checkpoint(before), copy)
    except (FileNotFoundError, shutil.Error):  # never kept, or just removed by a run in progress
        shutil.rmtree(copy, ignore_errors=True)
        settings = settings_at(paths, before)
        model = model_of(settings, paths.root.parent, paths.root.name)
        found = replay_step(paths, before, model, _training(settings), settings.storage, keep=inside)
        if found.difference is not None:
            raise InputError(
                f"the state before step {step} is not kept, and making it again gives another one: {found.difference.sentence}"
            ) from None
        shutil.rmtree(inside.adapter(before))  # the checkpoint holds it too
    drop_metrics(copy)


def _bundle_base(settings: RunSettings, model: Path, folder: Path) -> BundledBase:
    """Put the base model into the bundle, if it is small."""
    name = settings.inference.model
    from_hub = not Path(name).is_dir() and may_be_hub_id(name)
    included = sum(file.stat().st_size for file in weight_files(model)) <= MOST_BASE_BYTES
    if included:
        copy_base(model, folder)
        if base_head(model).is_file():
            base_head(folder).parent.mkdir()
            shutil.copyfile(base_head(model), base_head(folder))
    return BundledBase(
        name=name if from_hub else model.name,
        from_hub=from_hub,
        identity=base_identity(folder if included else model),
        weights=weights_hash(model),
        included=included,
    )


def _base_here(base: BundledBase, folder: Path, given: Path | None) -> Path:
    """The folder of the base model, which is the bundle's."""
    if base.included:
        found: Path | None = folder
    else:
        found = given if given is not None else model_here(base.name) if base.from_hub else None
        if found is None:
            raise InputError(f"its base model '{base.name}' is not in it and not on this machine: name its folder with --base")
    if base_identity(found) != base.identity or weights_hash(found) != base.weights:
        raise InputError(f"'{found}' is not its base model '{base.name}': the hashes differ")
    if base.included:
        _check_size(found)
    return found


def _check_size(folder: Path) -> None:
    """Refuse a model of a stranger whose config asks for more weights than its file has: loading would fill the memory."""
    shape, vocabulary = read_shape(folder), read_config(folder).get("vocab_size")
    if shape is None or not isinstance(vocabulary, int) or shape.parameters < shape.linear_parameters + vocabulary * shape.hidden:
        raise InputError("the config of its base model does not fit the weights")


def _read_facts(file: Path, record: Mapping[str, Any]) -> BundleFacts:
    try:
        return BundleFacts.model_validate(record)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise InputError(f"bundle '{file}' is not of this release: {where}: {first['msg']}") from error
