"""Which base model a run was begun with: `base.json` in its folder has a hash of each file that makes it that model.

An adapter means nothing on other weights, so a base that was replaced is refused by the name of the file that changed.
"""

from pathlib import Path

from entente.decoding.base_identity import base_hashes, identity_of
from entente.telemetry.errors import InputError
from storage.json_files import read_object, write_json
from storage.runs import RunPaths, hashes_file


def record_base(paths: RunPaths, model: Path) -> str:
    """Write down the base model of a new run; returns its identity, as `base_identity` gives it."""
    hashes = base_hashes(model, hashes_file(paths.root.parent))
    write_json(paths.base, hashes)
    return identity_of(hashes)


def check_base(paths: RunPaths, model: Path, *, anew: bool = False) -> str:
    """Check that the folder `model` holds the base model that the run was begun with; returns its identity.

    Args:
        anew: read all of it, even if its files look unchanged.

    Raises:
        InputError: names a file that was replaced.
    """
    now = base_hashes(model, None if anew else hashes_file(paths.root.parent))
    begun = read_object(paths.base) if paths.base.is_file() else now  # a run that was killed before it wrote this has no rows
    changed = sorted(name for name in begun.keys() | now if begun.get(name) != now.get(name))
    if changed:
        others = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
        raise InputError(
            f"the base model of run '{paths.root.name}' was replaced in '{model}' ({changed[0]}{others}), and the run's adapters "
            "mean nothing on other weights: restore it, or begin a new run"
        )
    return identity_of(now)
