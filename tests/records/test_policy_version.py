"""A policy version: what makes two equal, and its form as JSON, alone and in what the trainer reports."""

import json
from pathlib import Path

import pytest

from entente.records.policy_version import BASE, PolicyVersion
from entente.telemetry.errors import DataError
from entente.training.messages import ResumePoint, TrainedStep

THREE = PolicyVersion(version=3, adapter_hash="ab" * 16, adapter=Path("/runs/a/adapters/v000003"))


def test_number_and_hash_make_a_version_and_its_folder_does_not():
    assert PolicyVersion(version=3, adapter_hash="ab" * 16) == THREE
    assert PolicyVersion(version=4, adapter_hash="ab" * 16, adapter=THREE.adapter) != THREE
    assert PolicyVersion(version=3, adapter_hash="cd" * 16, adapter=THREE.adapter) != THREE


@pytest.mark.parametrize("policy", [BASE, THREE], ids=["base", "adapter"])
def test_it_comes_back_from_json_with_its_folder(policy: PolicyVersion):
    again = PolicyVersion.from_json(json.loads(json.dumps(policy.to_json())))
    assert again == policy and again.adapter == policy.adapter


def test_a_version_without_a_folder_says_so_where_one_is_needed():
    assert THREE.folder == THREE.adapter
    with pytest.raises(DataError, match=r"version 0 \(base\) has no adapter folder"):
        _ = BASE.folder


def test_what_the_trainer_reports_comes_back_from_json_whole():
    step = TrainedStep(published=THREE, metrics={"train/loss": 0.5})
    found = ResumePoint(last=step, set_aside=("step 4 is damaged",))
    again = ResumePoint.from_json(json.loads(json.dumps(found.to_json())))
    assert again == found and again.last.published.adapter == THREE.adapter and again.step_done == 3
