"""The base model of a run: `base.json` in its folder has a hash of each of its files. A replaced base is refused, with the
name of the changed file, because an adapter is useless with other weights."""

import json
from collections.abc import Mapping
from pathlib import Path

from entente.decoding.base_identity import FORM, form_hashes, identity_of
from entente.telemetry.errors import InputError
from storage.json_files import read_object
from storage.runs import RunPaths, hashes_file


def new_base(paths: RunPaths, model: Path) -> dict[str, str]:
    """Content of `base.json` for a new run: see `form_hashes`."""
    return form_hashes(model, hashes_file(paths.root.parent))


def resumed_base(paths: RunPaths, model: Path) -> dict[str, str]:
    """Like `new_base` for a resumed run: rereads every file, even if it looks unchanged; InputError names a replaced file."""
    hashes = form_hashes(model)
    if paths.base.is_file():  # a run that was killed before it wrote this has no rows
        _compare(paths, model, hashes)
    return hashes


def check_base(paths: RunPaths, model: Path) -> None:
    """Check that `model` is the run's base model; raises InputError with the name of a replaced file."""
    if paths.base.is_file():
        _compare(paths, model, new_base(paths, model))


def identity_in(paths: RunPaths) -> str:
    """Identity of the run's base and its form of prompts; empty if the run was killed before it wrote its base."""
    if not paths.base.is_file():
        return ""
    prompts = json.dumps(read_object(paths.settings).get("prompts"), sort_keys=True)
    return identity_of({**read_object(paths.base), "prompts": prompts})


def _compare(paths: RunPaths, model: Path, now: Mapping[str, str]) -> None:
    begun = read_object(paths.base)
    known = begun.keys() | now.keys() - {name for name in FORM if name not in begun}  # an earlier release wrote none of these
    changed = sorted(name for name in known if begun.get(name) != now.get(name))
    if changed:
        others = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
        raise InputError(
            f"the base model of run '{paths.root.name}' was replaced in '{model}' ({changed[0]}{others}), and the run's adapters "
            "were trained with the former one: restore it, or start a new run"
        )
