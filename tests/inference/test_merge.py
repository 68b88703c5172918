"""Merged weights are what peft itself would merge, and outlive no process."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from inference.merge import load_base, merge_adapter
from inference.scratch import Scratch
from telemetry.errors import DataError
from tests.families import save_family


def test_merged_weights_equal_those_that_peft_merges(model: Path, make_adapter, tmp_path: Path):
    adapter = make_adapter(seed=3, scale=0.2)
    merge_adapter(load_base(model), adapter, tmp_path / "merged")
    ours = load_file(tmp_path / "merged" / "model.safetensors")
    oracle = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), str(adapter)
    ).merge_and_unload()
    changed = 0
    base = load_base(model)
    for name, weight in oracle.state_dict().items():
        if name in ours:
            assert torch.allclose(ours[name], weight, atol=1e-6), name
            changed += int(not torch.equal(ours[name], base[name]))
    assert changed == 7 * json.loads((model / "config.json").read_text())["num_hidden_layers"]


@pytest.mark.parametrize(("family", "parts"), [("qwen2", ["self_attn", "mlp"]), ("qwen3_moe", ["self_attn"])])
def test_only_parts_that_an_adapter_may_change_are_loaded_again_but_whole(tmp_path: Path, family: str, parts: list[str]):
    """An engine that got the queries alone would lose keys, values and biases of their fused layer."""
    stored = load_file(save_family(family, tmp_path) / "model.safetensors")
    loaded = load_base(tmp_path)
    assert set(loaded) == {name for name in stored if name.split(".")[3:4] and name.split(".")[3] in parts}
    assert all(torch.equal(loaded[name], stored[name]) for name in loaded)


def test_an_adapter_of_another_base_is_refused_by_name(model: Path, make_adapter, tmp_path: Path):
    adapter = make_adapter(seed=4, scale=0.2)
    base = {name: weight[:-1] if name.endswith("0.mlp.up_proj.weight") else weight for name, weight in load_base(model).items()}
    with pytest.raises(DataError, match=r"does not fit this base model at model.layers.0.mlp.up_proj"):
        merge_adapter(base, adapter, tmp_path / "merged")


HOLDS_ONE = "from inference.scratch import Scratch; s = Scratch(); print(s.path, flush=True); input()"


@pytest.fixture
def own_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)


@pytest.mark.system
@pytest.mark.usefixtures("own_temporary_folder")
def test_what_a_killed_process_left_goes_and_what_a_living_one_holds_stays(tmp_path: Path):
    others = [
        subprocess.Popen([sys.executable, "-c", HOLDS_ONE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    try:
        folders = [Path((other.stdout or pytest.fail("no output")).readline().strip()) for other in others]
        for folder in folders:
            (folder / "model.safetensors").write_bytes(b"x")
        others[0].kill()
        others[0].wait()
        mine = Scratch()
        assert [folder.exists() for folder in folders] == [False, True] and mine.path.is_dir()
        mine.close()
        mine.close()
        assert not mine.path.exists()
    finally:
        for other in others:
            other.kill()
            other.communicate()


@pytest.mark.usefixtures("own_temporary_folder")
def test_only_our_own_folders_are_looked_at(tmp_path: Path):
    (tmp_path / "entente-mergers").mkdir()
    (tmp_path / "entente-merged-file").write_text("no folder")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "entente-merged-link").symlink_to(tmp_path / "elsewhere")
    Scratch().close()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "elsewhere",
        "entente-merged-file",
        "entente-merged-link",
        "entente-mergers",
    ]
