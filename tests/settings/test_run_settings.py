"""Settings come in layers, contradict nothing, and complain in one sentence; threads never exceed the cores."""

import json
import os
import re
import shutil
import socket
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from entente.game.prompts import PromptSettings
from entente.inference.settings import InferenceSettings
from entente.settings import layers
from entente.settings.layers import (
    check_prompts,
    check_what_is_there,
    deployed_preset,
    layered_settings,
    one_sentence,
    preset_names,
    rate_warning,
    resumed_settings,
    settings_of,
)
from entente.settings.run_settings import PipelineSettings, RunSettings
from entente.telemetry.errors import InputError
from entente.telemetry.machine import apply_threads, plan_threads
from entente.training.settings import usual_rate
from storage.runs import RunPaths
from tasks.rollout_queue import groups_per_task


def test_what_is_deployed_of_a_preset_is_its_own_values_and_what_is_given_over_them():
    given = deployed_preset("laptop", {"cache": {"from_run": "newest"}})["settings"]
    assert given["cache"] == {**deployed_preset("laptop")["settings"]["cache"], "from_run": "newest"}
    assert RunSettings.model_validate(given) == layered_settings("laptop", (), {"cache": {"from_run": "newest"}})
    with pytest.raises(InputError, match="no preset 'lap'"):
        deployed_preset("lap")


def test_another_model_than_the_preset_s_gets_the_rate_of_its_width_and_one_ten_times_off_is_said():
    model = {"model": "models/whole-192"}
    assert layered_settings("laptop", (), {"inference": model}).training.learning_rate == usual_rate(192) == 2e-3
    given = layered_settings("laptop", (), {"inference": model, "training": {"learning_rate": 1e-4}})
    assert given.training.learning_rate == 1e-4
    assert layered_settings("laptop").training.learning_rate == usual_rate(128) == 3e-3
    assert rate_warning(3e-3, 576) == "training.learning_rate 0.003 is far from 0.0003, which suits a model 576 wide"
    assert not rate_warning(1e-3, 576)


def hub_copy(cache: Path, name: str, folder: Path) -> None:
    """The model in `folder` as huggingface_hub keeps it after a download."""
    revision = "0" * 40
    snapshot = cache / f"models--{name.replace('/', '--')}" / "snapshots" / revision
    shutil.copytree(folder, snapshot)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text(revision)


def test_a_model_has_one_rate_and_one_form_of_prompts_however_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import huggingface_hub.constants

    folder = Path("models/whole-192").resolve()
    asked: list[str] = []

    def from_hub(name: str) -> dict[str, Any]:
        asked.append(name)
        return json.loads((folder / "config.json").read_text())

    monkeypatch.setattr(layers, "hub_config", from_hub)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    hub_copy(tmp_path / "hub", "some/whole-192", folder)
    (tmp_path / "link").symlink_to(folder)
    names = ["models/whole-192", str(folder), str(tmp_path / "link"), "some/whole-192"]
    found = [layered_settings("laptop", (), {"inference": {"model": name}}) for name in names]
    assert {each.training.learning_rate for each in found} == {usual_rate(192)} and len({each.prompts for each in found}) == 1
    assert found[0].prompts != layered_settings("laptop").prompts and not asked
    recipe = layered_settings("laptop", (), {"tiny_model": {"hidden": 192}})
    assert recipe.training.learning_rate == usual_rate(192), "of a model that is made from its recipe"
    known = layered_settings("laptop", (), {"inference": {"model": "Qwen/Qwen2.5-7B-Instruct"}})
    assert known.training.learning_rate == layered_settings("gpu-80").training.learning_rate and not asked
    new = layered_settings("laptop", (), {"inference": {"model": "some/not-here"}})
    assert new.training.learning_rate == usual_rate(192) and asked == ["some/not-here"]


@pytest.mark.parametrize("preset", ["lm", "gpu-24"])
def test_naming_the_model_of_a_preset_leaves_its_rate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, preset: str):
    own = layered_settings(preset)
    assert layered_settings(preset, (), {"inference": {"model": own.inference.model}}) == own
    if preset == "lm":
        monkeypatch.chdir(tmp_path)
        (tmp_path / own.inference.model).mkdir(parents=True)
        (tmp_path / own.inference.model / "config.json").write_text('{"hidden_size": 576}')
        absolute = layered_settings(preset, (), {"inference": {"model": str(tmp_path / own.inference.model)}})
        assert absolute.training.learning_rate == own.training.learning_rate != usual_rate(576)


def test_the_model_of_a_preset_keeps_its_rate_in_a_folder_of_runs_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    model = tmp_path / "other" / "_models" / "smollm2"
    model.mkdir(parents=True)
    (model / "config.json").write_text('{"hidden_size": 576}')
    monkeypatch.chdir(tmp_path)  # which has no runs/_models
    own = layered_settings("lm").training.learning_rate
    assert layered_settings("lm", (), {"inference": {"model": str(model)}}).training.learning_rate == own != usual_rate(576)


def test_a_model_that_the_hub_does_not_confirm_has_no_rate_and_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NO_PROXY", "*")
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # taken, and nobody listens
        nobody = f"http://127.0.0.1:{closed.getsockname()[1]}/{{repo_id}}/{{revision}}/{{filename}}"
        monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", nobody)
        with pytest.raises(InputError, match=r"'some/not-here' is no folder here.*the hub did not confirm it"):
            layered_settings("laptop", (), {"inference": {"model": "some/not-here"}})
    given = {"inference": {"model": "some/not-here"}, "training": {"learning_rate": 1e-4}}
    assert layered_settings("laptop", (), given).training.learning_rate == 1e-4


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_is_sound(name: str):
    assert layered_settings(name).steps > 0


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        ({"pipeline": {"buffer_depth": 3}}, "buffer_depth 3 exceeds storage.max_policy_lag 2"),
        ({"prompts": {"thinking_tokens": 512}}, "thinking_tokens 512 leaves no room .* inference.max_model_length 512: lower"),
        ({"rollouts": {"horizon_schedule": "40:2,20:3"}}, "'40:2,20:3' is no list of step:years with rising steps"),
        (
            {"inference": {"engine": "vllm", "adapter_slots": 3}},
            "inference.adapter_slots 3 cannot hold the versions that storage.max_policy_lag 2 keeps in play: .* at least 4",
        ),
        (
            {"inference": {"engine": "vllm"}, "training": {"lora_rank": 32}},
            "training.lora_rank 32 exceeds inference.adapter_rank 16: set adapter_rank to 32",
        ),
        ({"rollouts": {"opponents": "nobody"}}, "nobody"),
        (
            {"storage": {"reward_weights": {"final_centers": 1.0}}},
            "storage.reward_weights weighs final_centers: There is no reward component 'centers'. Known: centres",
        ),
        ({"evaluation": {"positions": 9999}}, "evaluation.positions 9999 exceeds cache.held_out_snapshots"),
        ({"evaluation": {"opponents": []}}, "evaluation.opponents is empty, .*: name one"),
        ({"run": "../elsewhere"}, "cannot name a folder"),
        ({"stepz": 1}, "there is no setting 'stepz'"),
        ({"inference": {"threads": 4096}}, "4096"),
        ({"training": {"learning_rate": float("inf")}}, "training.learning_rate: .*finite"),
        ({"steps": True}, "steps takes numbers, got true"),
        ({"prompts": {"thinking_tokens": True}}, "thinking_tokens takes numbers, got true"),
        ({"inference": {"cards": [0, True]}}, "cards takes numbers, got true"),
        ({"storage": {"reward_weights": {"survival": False}}}, "reward_weights takes numbers, got false"),
        ({"training": {"seed": 5}}, "training.seed 5 differs from seed 0"),
        ({"training": {"rate_schedule": "linear"}}, "decay_steps 0 must lie after training.warm_up_steps"),
        ({"training": {"decay_steps": 20}}, "decay_steps 20 needs a decay: set training.rate_schedule"),
        ({"cache": {"from_run": "newest", "on_policy_share": 0.5}}, "on_policy_share 0.5 cannot change the newest refresh"),
        ({"cache": {"first_year": 1906, "last_year": 1904}}, "first_year 1906 lies after last_year 1904"),
        ({"cache": {"players": ("random", "nobody")}}, "no scripted player 'nobody'"),
        (
            {"storage": {"reward_weights": "clever"}},
            "there are no weights named 'clever'; known ones are centres, sum_of_squares",
        ),
        ({"storage": {"reward_weights": {"survival": 0.0}}}, "every component has weight 0"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_settings_that_cannot_work_are_refused_in_a_sentence(overrides: dict, sentence: str):
    with pytest.raises(InputError, match=sentence) as refused:
        layered_settings("laptop", (), overrides)
    assert "\n" not in str(refused.value)


def test_unknown_presets_and_unreadable_files_are_named(tmp_path: Path):
    with pytest.raises(InputError, match="no preset 'desktop'; known: cluster, gpu-141, gpu-24, gpu-40, gpu-80, laptop, lm"):
        layered_settings("desktop")
    for text in ("steps = ", "\udcff"):
        file = tmp_path / "broken.toml"
        file.write_bytes(text.encode(errors="surrogateescape"))
        with pytest.raises(InputError, match="broken"):
            layered_settings("laptop", [file])
    with pytest.raises(InputError, match="missing"):
        layered_settings("laptop", [tmp_path / "missing.toml"])


@pytest.mark.parametrize(
    ("tree", "meant"),
    [
        pytest.param({"learning_rat": 1}, "training.learning_rate", id="a letter and the section are missing"),
        pytest.param({"rollouts": {"learning_rate": 1}}, "training.learning_rate", id="another section"),
        pytest.param({"inference": {"discount": 1}}, "storage.discount", id="the key of another section"),
    ],
)
def test_an_unknown_setting_is_answered_with_the_one_that_was_meant(tree: dict[str, Any], meant: str):
    with pytest.raises(ValidationError) as caught:
        RunSettings.model_validate(tree)
    assert one_sentence(caught.value).endswith(f"; did you mean {meant}?")


def test_the_settings_that_a_run_left_are_read_back_and_a_run_that_is_not_there_is_named(tmp_path: Path):
    paths = RunPaths(tmp_path / "mine").create()
    settings = layered_settings(
        "laptop", overrides={"run": "mine", "runs_root": tmp_path, "storage": {"reward_weights": {"survival": 2.0}}}
    )
    paths.settings.write_text(settings.model_dump_json())
    assert settings_of(paths) == settings
    with pytest.raises(InputError, match=r"there is no run in '.*nothing': it has no settings.json"):
        settings_of(RunPaths(tmp_path / "nothing"))


def test_weights_of_a_later_layer_replace_those_of_an_earlier_one(tmp_path: Path):
    (file := tmp_path / "weights.toml").write_text("[storage.reward_weights]\ncentres_gained = 1.0\nfinal_balance = 0.5\n")
    layered = layered_settings("laptop", [file], {"storage": {"reward_weights": {"sos_share": 1.0}}})
    assert layered.storage.reward_weights == {"sos_share": 1.0}


def test_a_run_that_was_copied_knows_its_name_its_root_and_the_model_beside_it(tmp_path: Path):
    paths, made = RunPaths(tmp_path / "here" / "copy").create(), tmp_path / "here" / "_models" / "small"
    before = {"run": "mine", "runs_root": "/there", "inference": {"model": "/there/_models/small"}}
    paths.settings.write_text(layered_settings("laptop", overrides=before).model_dump_json())
    assert settings_of(paths).inference.model == "/there/_models/small", "a model that was not copied stays where it was"
    made.mkdir(parents=True)
    settings = settings_of(paths)
    assert (settings.run, settings.runs_root, settings.inference.model) == ("copy", tmp_path / "here", str(made))


@pytest.mark.parametrize("cores", [1, 2, 4])
@pytest.mark.parametrize("overlap", [True, False], ids=["at once", "in turn"])
def test_threads_fit_the_cores_or_are_refused_with_both_values(cores: int, overlap: bool):
    for engine, trainer in product(range(cores + 2), repeat=2):
        try:
            planned = plan_threads(cores=cores, engine=engine, trainer=trainer, overlap=overlap)
        except InputError as refused:
            told = re.search(r"inference.threads (\d+) and training.threads (\d+) .* the (\d+) cores", str(refused))
            assert told and int(told[3]) == cores
            assert (engine or int(told[1]), trainer or int(told[2])) == (int(told[1]), int(told[2])), "the values that were given"
            assert engine or trainer, "what nobody asked for is not refused"
            assert engine + trainer > max(cores - 1, 1) if overlap else max(engine, trainer) > cores
        else:
            assert min(planned) >= 1 and (engine or planned[0], trainer or planned[1]) == planned, "a wish that fits is kept"
            # On one core each still gets a thread.
            assert sum(planned) <= max(cores, 2) if overlap else max(planned) <= cores


@pytest.mark.parametrize(
    ("pipeline", "urls", "threads"),
    [
        pytest.param({"buffer_depth": 0}, (), (4, 4), id="in turn"),
        pytest.param({"buffer_depth": 1}, (), (2, 2), id="at once"),
        pytest.param({"buffer_depth": 1}, ("http://127.0.0.1:1",), (4, 4), id="engine elsewhere"),
    ],
)
def test_a_run_shares_the_cores_only_where_both_compute_here_at_once(
    monkeypatch: pytest.MonkeyPatch, pipeline: dict, urls: tuple[str, ...], threads: tuple[int, int]
):
    monkeypatch.setattr("entente.settings.run_settings.usable_cores", lambda: 4)
    assert RunSettings(pipeline=PipelineSettings(**pipeline), inference=InferenceSettings(urls=urls)).threads == threads


def test_threads_are_set_before_torch_is_there_and_never_against_the_user(monkeypatch: pytest.MonkeyPatch):
    environment: dict[str, str] = {}
    monkeypatch.setattr(os, "environ", environment)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "torch", object())
        apply_threads(3)
    assert environment == {}, "torch has read its own already"
    with monkeypatch.context() as patch:
        patch.delitem(sys.modules, "torch", raising=False)
        apply_threads(3)
        apply_threads(1)
    assert environment["OMP_NUM_THREADS"] == "3"


@pytest.mark.parametrize(
    ("pipeline", "groups"), [({"buffer_depth": 1}, 10), ({"buffer_depth": 2}, 3), ({"task_runner": "dask"}, 5)]
)
def test_a_rollout_task_takes_a_whole_step_where_it_must_repeat_and_less_where_others_play_too(pipeline: dict, groups: int):
    assert groups_per_task(layered_settings("laptop", (), {"pipeline": pipeline, "rollouts": {"start_groups": 10}})) == groups


@pytest.fixture
def begun(tmp_path: Path) -> dict[str, Any]:
    """Names a run that has begun, as the command line would to resume it."""
    settings = layered_settings("laptop", [], {"run": "begun", "runs_root": str(tmp_path)})
    settings.paths.create().settings.write_text(settings.model_dump_json())
    return {"run": "begun", "runs_root": str(tmp_path)}


@pytest.mark.parametrize(
    "name",
    [
        "seed",
        "training.loss",
        "storage.discount",
        "inference.model",
    ],
)
def test_what_would_make_a_resumed_run_another_one_is_refused_with_both_values(begun: dict[str, Any], name: str):
    stored, room, leaf = resumed_settings((), begun), *("", *name.split("."))[-2:]
    before = getattr(getattr(stored, room), leaf) if room else getattr(stored, leaf)
    after = (
        "dppo"
        if name == "training.loss"
        else "elsewhere"
        if isinstance(before, str)
        else before / 2
        if isinstance(before, float)
        else 7
    )
    with pytest.raises(InputError, match=f"started with {re.escape(name)} {before!r} and cannot continue with {after!r}"):
        resumed_settings((), {**begun, room: {leaf: after}} if room else {**begun, leaf: after})


@pytest.mark.parametrize("left", ["shards/local/000000.arrow", "ledger/step-000001.arrow"])
def test_a_run_whose_settings_are_lost_is_not_begun_anew_on_its_rows(begun: dict[str, Any], left: str):
    settings = layered_settings("laptop", [], begun)
    settings.paths.settings.unlink()
    check_what_is_there(settings, resume=False)
    (file := settings.paths.root / left).parent.mkdir(exist_ok=True)
    file.touch()
    with pytest.raises(InputError, match=r"has rows of a run, whose settings\.json is missing: restore"):
        check_what_is_there(settings, resume=False)


def test_a_resumed_run_keeps_the_text_of_its_query_and_another_text_is_refused(tmp_path: Path):
    file, named = tmp_path / "mine.sql", {"run": "queried", "runs_root": str(tmp_path)}
    file.write_text("FROM candidates SELECT shard, start_group ORDER BY return_range DESC")
    settings = layered_settings("laptop", [], {**named, "storage": {"selection": str(file)}})
    settings.paths.create().settings.write_text(settings.model_dump_json())
    file.write_text("FROM candidates SELECT shard, start_group ORDER BY lag")
    assert "return_range DESC" in resumed_settings((), named).storage.selection
    changed = {**named, "storage": {"selection": str(file)}}
    with pytest.raises(
        InputError, match=r"started with storage\.selection .*return_range DESC.* cannot continue with .*lag.*--init-from"
    ):
        resumed_settings((), changed)
    with pytest.raises(InputError, match=r"^storage\.selection .*candidates"):
        layered_settings("laptop", [], {"storage": {"selection": "DROP TABLE candidates"}})


def test_a_resumed_run_may_have_more_steps_and_another_engine_s_limits(begun: dict[str, Any]):
    wanted = resumed_settings((), {**begun, "steps": 999, "inference": {"max_sequences": 5}, "pipeline": {"buffer_depth": 1}})
    assert (wanted.steps, wanted.inference.max_sequences, wanted.pipeline.buffer_depth) == (999, 5, 1)
    # Each ledger records the staleness budget of its step.
    assert resumed_settings((), {**begun, "storage": {"max_policy_lag": 1}}).storage.max_policy_lag == 1


def test_the_own_line_is_in_place_where_every_power_is_the_policy_s_unless_a_setting_says_otherwise(tmp_path: Path):
    every: dict[str, Any] = {"rollouts": {"policy_powers": "all"}}
    last: dict[str, Any] = {"prompts": {"own_line": "last"}}
    assert layered_settings("laptop").prompts.own_line == "last"
    assert layered_settings("laptop", (), {**every, "prompts": {"chat": "none"}}).prompts == PromptSettings(
        own_line="in_place", chat="none"
    )
    assert layered_settings("laptop", (), every | last).prompts.own_line == "last"
    typed = {**every, "prompts": {"chat": "none"}}
    assert RunSettings.model_validate(typed).model_dump(exclude_unset=True) == typed, "a flag would override a file"


def test_a_base_that_was_made_here_brings_its_prompts_and_other_prompts_are_refused(tmp_path: Path):
    (tmp_path / "recipe.json").write_text(json.dumps({"prompts": {"legal_orders": "lines", "own_line": "in_place"}}))
    base = {"inference": {"model": str(tmp_path)}}
    settings = layered_settings("laptop", [], base)
    assert (settings.prompts.legal_orders, settings.prompts.own_line) == ("lines", "in_place")
    check_prompts(settings)
    for prompts in ({"legal_orders": "none"}, {"own_line": "last"}):
        wrong = layered_settings("laptop", [], {**base, "prompts": prompts})
        with pytest.raises(InputError, match=rf"made for prompts\.{next(iter(prompts))} .*: leave the setting out"):
            check_prompts(wrong)
    plain = layered_settings("laptop", [], {**base, "prompts": {"chat": "none"}})
    check_prompts(plain)
    (tmp_path / "chat_template.jinja").write_text("of a chat model, from a step of which --init-from made this base")
    with pytest.raises(InputError, match=r"made for prompts\.chat 'auto', not for 'none'"):
        check_prompts(plain)
    (tmp_path / "recipe.json").unlink()
    check_prompts(layered_settings("laptop", [], {**base, "prompts": {"legal_orders": "none"}}))
