"""A small cache, built once."""

import pytest

from entente.game.snapshot import Snapshot
from state_cache.build import build
from state_cache.settings import CacheSettings

Built = tuple[CacheSettings, list[Snapshot], list[Snapshot]]


@pytest.fixture(scope="session")
def small() -> Built:
    settings = CacheSettings(train_snapshots=30, held_out_snapshots=14, last_year=1904, phases=("SM", "SR", "FM", "FR", "WA"))
    return settings, *build(settings)
