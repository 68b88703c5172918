"""A run's base that was replaced is refused by the name of the file, also where its size and times are the old ones."""

import json
import os
from pathlib import Path

import pytest

from entente.cli.dry_run import plan_train
from entente.decoding.base_identity import base_hashes, form_hashes
from entente.settings.find_model import model_of
from entente.settings.layers import settings_of
from entente.telemetry.errors import InputError
from storage.run_base import check_base, resumed_base
from storage.runs import RunPaths


def test_replaced_weights_are_named_before_a_resumed_run_starts_and_before_a_version_plays(stored_run: RunPaths):
    root, settings = stored_run.root.parent, settings_of(stored_run)
    model = model_of(settings, root, "before")
    assert resumed_base(stored_run, model) == form_hashes(model), "nothing is written down yet"
    stored_run.base.write_text(json.dumps(base_hashes(model)))
    assert plan_train(settings, resume=True) and model_of(settings, root, "before") == model
    weights = model / "model.safetensors"
    content, times = weights.read_bytes(), weights.stat()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns))
    for use in (
        lambda: plan_train(settings, resume=True),
        lambda: resumed_base(stored_run, model),
        lambda: model_of(settings, root, "before"),
    ):
        with pytest.raises(InputError, match=r"base model of run 'before' was replaced .*\(model.safetensors\).*restore it"):
            use()
    weights.write_bytes(content)
    assert model_of(settings, root, "before") == model


def test_a_base_without_a_file_that_it_had_names_it(stored_run: RunPaths):
    model = model_of(settings_of(stored_run), stored_run.root.parent, "before")
    stored_run.base.write_text(json.dumps(base_hashes(model) | {"chat template": "00"}))
    with pytest.raises(InputError, match=r"\(chat template\)"):
        check_base(stored_run, model)


def test_a_base_that_ends_its_orders_with_another_token_is_refused_if_the_run_wrote_that_down(stored_run: RunPaths):
    model = model_of(settings_of(stored_run), stored_run.root.parent, "before")
    by_this_release, by_an_earlier_one = form_hashes(model), base_hashes(model)
    (model / "generation_config.json").write_text('{"eos_token_id": 5}')
    stored_run.base.write_text(json.dumps(by_this_release))
    with pytest.raises(InputError, match=r"\(end tokens\), and the run's adapters were trained with the former one"):
        resumed_base(stored_run, model)
    stored_run.base.write_text(json.dumps(by_an_earlier_one))
    check_base(stored_run, model)


def test_a_hash_is_not_trusted_when_a_run_is_resumed(stored_run: RunPaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from entente.decoding import base_identity

    model = model_of(settings_of(stored_run), stored_run.root.parent, "before")
    stored_run.base.write_text(json.dumps(base_hashes(model)))
    monkeypatch.setattr(base_identity, "_SETTLED_S", -60.0)
    monkeypatch.setattr(base_identity, "_mark", lambda file: file.name)  # a file system that keeps no times
    check_base(stored_run, model)
    (model / "tokenizer.json").write_text((model / "tokenizer.json").read_text() + " ")
    check_base(stored_run, model)
    with pytest.raises(InputError, match="tokenizer"):
        resumed_base(stored_run, model)
