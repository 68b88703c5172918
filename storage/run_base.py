"""Which base model a run was begun with: `base.json` in its folder has a hash of each file that makes it that model.

An adapter means nothing on other weights, so a base that was replaced is refused by the name of the file that changed.
"""

from pathlib import Path

from entente.decoding.base_identity import base_hashes
from entente.telemetry.errors import InputError
from storage.json_files import read_object
from storage.runs import RunPaths, hashes_file


def base_of(paths: RunPaths, model: Path) -> dict[str, str]:
    """What `base.json` of a new run on the model in the folder `model` holds: see `base_hashes`."""
    return base_hashes(model, hashes_file(paths.root.parent))


def check_base(paths: RunPaths, model: Path, *, anew: bool = False) -> dict[str, str]:
    """Check that the folder `model` holds the base model that the run was begun with; returns its hashes.

    Args:
        anew: read all of it, even if its files look unchanged.

    Raises:
        InputError: names a file that was replaced.
    """
    now = base_hashes(model) if anew else base_of(paths, model)
    begun = read_object(paths.base) if paths.base.is_file() else now  # a run that was killed before it wrote this has no rows
    changed = sorted(name for name in begun.keys() | now if begun.get(name) != now.get(name))
    if changed:
        others = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
        raise InputError(
            f"the base model of run '{paths.root.name}' was replaced in '{model}' ({changed[0]}{others}), and the run's adapters "
            "mean nothing on other weights: restore it, or begin a new run"
        )
    return now
