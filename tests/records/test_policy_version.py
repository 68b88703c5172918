"""A policy version: what makes two equal, and its folder."""

from pathlib import Path

import pytest

from entente.records.policy_version import BASE, PolicyVersion
from entente.telemetry.errors import DataError

THREE = PolicyVersion(version=3, adapter_hash="ab" * 16, adapter=Path("/runs/a/adapters/v000003"))


def test_number_and_hash_make_a_version_and_its_folder_does_not():
    assert PolicyVersion(version=3, adapter_hash="ab" * 16) == THREE
    assert PolicyVersion(version=4, adapter_hash="ab" * 16, adapter=THREE.adapter) != THREE
    assert PolicyVersion(version=3, adapter_hash="cd" * 16, adapter=THREE.adapter) != THREE


def test_a_version_without_a_folder_says_so_where_one_is_needed():
    assert THREE.folder == THREE.adapter
    with pytest.raises(DataError, match=r"version 0 \(base\) has no adapter folder"):
        _ = BASE.folder
