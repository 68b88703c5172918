"""Settings come in layers, contradict nothing, and complain in one sentence; threads never exceed the cores."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from flows.keep_ahead import TASK_COST_S, TASK_COST_SHARE, groups_per_task
from flows.run_settings import PipelineSettings, RunSettings, layered_settings, one_sentence, preset_names
from flows.thread_plan import plan_threads
from telemetry.errors import InputError


def test_a_file_overrides_the_preset_and_a_flag_overrides_both(tmp_path: Path):
    first, second = tmp_path / "a.toml", tmp_path / "b.toml"
    first.write_text("steps = 5\n[rollouts]\nforks_per_group = 4\nstart_groups = 3\n")
    second.write_text("[rollouts]\nstart_groups = 7\n")
    settings = layered_settings("laptop", [first, second], {"rollouts": {"forks_per_group": 6}})
    assert (settings.steps, settings.rollouts.start_groups, settings.rollouts.forks_per_group) == (5, 7, 6)
    assert settings.rollouts.horizon_years == layered_settings("laptop").rollouts.horizon_years


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_is_sound(name: str):
    assert layered_settings(name).steps > 0


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        ({"pipeline": {"buffer_depth": 3, "deterministic": False}}, "buffer_depth 3 exceeds storage.max_policy_lag 2"),
        ({"pipeline": {"buffer_depth": 1}}, "deterministic needs pipeline.buffer_depth 0, not 1"),
        ({"rollouts": {"opponents": "nobody"}}, "nobody"),
        ({"evaluation": {"opponents": ("random", "nobody")}}, "nobody"),
        ({"tiny_model": {"teacher": "nobody"}}, "nobody"),
        ({"evaluation": {"positions": 9999}}, "evaluation.positions 9999 exceeds cache.held_out_snapshots"),
        ({"run": "../elsewhere"}, "cannot name a folder"),
        ({"stepz": 1}, "there is no setting 'stepz'"),
        ({"training": {"lora": 1}}, "there is no setting 'training.lora'"),
        ({"steps": 0}, "steps: input should be greater than or equal to 1, got 0"),
        ({"training": {"learning_rate": "fast"}}, "training.learning_rate: .* got 'fast'"),
        ({"inference": {"threads": 4096}}, "4096"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_settings_that_cannot_work_are_refused_in_a_sentence(overrides: dict, sentence: str):
    with pytest.raises(InputError, match=sentence) as refused:
        layered_settings("laptop", (), overrides)
    assert "\n" not in str(refused.value)


def test_unknown_presets_and_unreadable_files_are_named(tmp_path: Path):
    with pytest.raises(InputError, match="no preset 'desktop'; known: cluster, laptop, single-gpu"):
        layered_settings("desktop")
    for text in ("steps = ", "\udcff"):
        file = tmp_path / "broken.toml"
        file.write_bytes(text.encode(errors="surrogateescape"))
        with pytest.raises(InputError, match="broken"):
            layered_settings("laptop", [file])
    with pytest.raises(InputError, match="missing"):
        layered_settings("laptop", [tmp_path / "missing.toml"])


def test_several_complaints_are_counted():
    with pytest.raises(ValidationError) as caught:
        RunSettings.model_validate({"steps": 0, "nonsense": 1})
    assert one_sentence(caught.value).endswith("(and 1 more)")


@pytest.mark.parametrize("cores", [1, 2, 4, 16])
def test_processes_that_compute_at_once_never_have_more_threads_than_cores(cores: int):
    engine, trainer = plan_threads(cores=cores, engine=0, trainer=0, overlap=True)
    assert engine >= 1 and trainer >= 1 and engine + trainer <= max(2, cores)
    assert plan_threads(cores=cores, engine=0, trainer=0, overlap=False) == (cores, cores)


def test_a_wish_that_does_not_fit_names_both_values():
    with pytest.raises(InputError, match=r"inference.threads 2 and training.threads 2 exceed the 2 cores"):
        plan_threads(cores=2, engine=2, trainer=2, overlap=True)
    assert plan_threads(cores=8, engine=6, trainer=0, overlap=True) == (6, 2)


def test_a_rollout_task_takes_as_many_groups_as_keep_prefect_cheap():
    settings = PipelineSettings()
    assert groups_per_task(16, settings, None) == 16, "nothing is measured yet"
    for group_s in (0.05, 0.2, 0.9, 5.0):
        taken = groups_per_task(1000, settings, group_s)
        assert TASK_COST_SHARE * taken * group_s + 1e-9 >= TASK_COST_S
        assert taken == 1 or TASK_COST_SHARE * (taken - 1) * group_s < TASK_COST_S
    assert groups_per_task(8, settings, 0.001) == 8
    assert groups_per_task(8, PipelineSettings(deterministic=True, buffer_depth=0), 60.0) == 8
    assert groups_per_task(8, PipelineSettings(groups_per_task=3), 60.0) == 3


def test_flows_import_without_torch_or_vllm():
    program = "import sys, flows.train_policy; print([name for name in ('torch', 'vllm', 'wandb') if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=os.environ | {"PYTHONWARNINGS": "ignore"}
    )
    assert done.stdout.strip() == "[]", done.stderr
