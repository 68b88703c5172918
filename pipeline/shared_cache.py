"""The state cache of some settings beside the runs, also where these lie in a bucket.

`state_cache` knows local folders only. Here a version is fetched before it is looked up; whoever builds one shares it
(`FILES.share`).
"""

from pathlib import Path

from state_cache.settings import CacheSettings
from state_cache.store import find_cache, version_name
from storage.files import FILES
from storage.runs import CACHE_FOLDER


def find_shared_cache(runs_root: Path, settings: CacheSettings) -> Path | None:
    """The published folder for these settings under `runs_root`; None if there is none."""
    root = runs_root / CACHE_FOLDER
    FILES.fetch_folder(root / version_name(settings))
    return find_cache(root, settings)
