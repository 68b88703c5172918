"""Which versions an engine serves: pure bookkeeping, so every rule is tried without an engine."""

from pathlib import Path

import pytest

from inference.served import LoadedVersion, ServedVersions
from records.policy_version import PolicyVersion
from telemetry.errors import EngineError, VersionGoneError


def served(versions: ServedVersions, version: int, adapter_hash: str = "") -> LoadedVersion:
    policy = PolicyVersion(version=version, adapter_hash=adapter_hash or f"hash-{version}", adapter=Path("a"))
    made = LoadedVersion(policy=policy, slot=versions.next_slot())
    versions.add(made)
    return made


def test_an_engine_begins_with_the_base_and_the_newest_is_the_one_published_last():
    versions = ServedVersions("e", slots=4)
    assert versions.find(None).policy.version == 0 and versions.find(0).slot == 0
    for version in (3, 5, 4):
        served(versions, version)
        assert versions.find(None).policy.version == version
    versions.make_newest(5)
    assert versions.find(None).policy.version == 5
    assert {each.policy.version for each in versions} == {0, 3, 4, 5}


def test_no_slot_number_comes_twice_even_when_its_version_is_gone():
    versions = ServedVersions("e", slots=2)
    slots = []
    for version in range(1, 9):
        slots.append(served(versions, version).slot)
        versions.retire(version, keep=())
    assert slots == sorted(set(slots)) and 0 not in slots


def test_a_retired_version_is_gone_but_for_the_kept_and_the_newest():
    versions = ServedVersions("e", slots=4)
    for version in (1, 2, 3):
        served(versions, version)
    assert {gone.policy.version for gone in versions.retire(9, keep=(1,))} == {0, 2}
    assert versions.find(1).policy.version == 1 and versions.find(None).policy.version == 3
    with pytest.raises(VersionGoneError, match="engine 'e' does not serve policy version 2: ask for 3, the newest"):
        versions.find(2)


def test_more_versions_than_slots_are_refused_with_the_versions_that_hold_them():
    versions = ServedVersions("e", slots=2)
    served(versions, 4)
    served(versions, 5)
    with pytest.raises(EngineError, match=r"all 2 adapter slots .* versions 4, 5: .*inference.adapter_slots"):
        versions.next_slot()
    assert versions.find(None).policy.version == 5
    versions.retire(5, keep=())
    assert served(versions, 6).slot == 3


def test_other_weights_under_a_number_that_is_served_replace_it():
    versions = ServedVersions("e", slots=3)
    first = served(versions, 1, "one")
    moved = PolicyVersion(version=1, adapter_hash="one", adapter=Path("elsewhere"))
    assert versions.serves(moved), "the same weights may lie in another folder"
    other = LoadedVersion(policy=PolicyVersion(version=1, adapter_hash="other"), slot=versions.next_slot())
    assert not versions.serves(other.policy)
    assert versions.add(other) == [first] and versions.find(1).policy.adapter_hash == "other"
