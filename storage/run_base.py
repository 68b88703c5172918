"""Which base model a run was begun with: `base.json` in its folder has a hash of each file that makes it that model.

An adapter means nothing on other weights, so a base that was replaced is refused by the name of the file that changed.
"""

from collections.abc import Mapping
from pathlib import Path

from entente.decoding.base_identity import base_hashes
from entente.telemetry.errors import InputError
from storage.json_files import read_object
from storage.runs import RunPaths, hashes_file


def new_base(paths: RunPaths, model: Path) -> dict[str, str]:
    """What `base.json` of a new run on the model in the folder `model` holds: see `base_hashes`."""
    return base_hashes(model, hashes_file(paths.root.parent))


def resumed_base(paths: RunPaths, model: Path) -> dict[str, str]:
    """The same of a run that is resumed: every file is read again, even if it looks unchanged.

    Raises:
        InputError: names a file that was replaced since the run was begun.
    """
    hashes = base_hashes(model)
    if paths.base.is_file():  # a run that was killed before it wrote this has no rows
        _compare(paths, model, hashes)
    return hashes


def check_base(paths: RunPaths, model: Path) -> None:
    """Check that the folder `model` holds the base model with which the run was begun.

    Raises:
        InputError: names a file that was replaced.
    """
    if paths.base.is_file():
        _compare(paths, model, new_base(paths, model))


def _compare(paths: RunPaths, model: Path, now: Mapping[str, str]) -> None:
    begun = read_object(paths.base)
    changed = sorted(name for name in begun.keys() | now if begun.get(name) != now.get(name))
    if changed:
        others = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
        raise InputError(
            f"the base model of run '{paths.root.name}' was replaced in '{model}' ({changed[0]}{others}), and the run's adapters "
            "mean nothing on other weights: restore it, or begin a new run"
        )
