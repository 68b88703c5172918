"""The engine is the one that the setting means, nothing heavy is loaded to say which, and each choice gives its reason."""

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from inference.choose_engine import choose_engine, engine_kind
from inference.settings import InferenceSettings
from telemetry.errors import InputError
from workers.make_engine import make_engine


@pytest.mark.parametrize(
    "wanted, has_vllm, has_cuda, kind, reason",
    [
        ("auto", True, False, "vllm", "it is installed"),
        ("auto", True, True, "vllm_async", "this machine's GPU"),
        ("auto", False, True, "torch", "no vLLM is installed"),
        ("torch", True, True, "torch", "inference.engine says so"),
        ("vllm", True, True, "vllm", "inference.engine says so"),
        ("vllm_async", True, False, "vllm_async", "inference.engine says so"),
    ],
)
def test_the_setting_and_what_is_there_decide(wanted, has_vllm: bool, has_cuda: bool, kind: str, reason: str):
    chosen, sentence = engine_kind(wanted, has_vllm=has_vllm, has_cuda=has_cuda)
    assert chosen == kind and reason in sentence


def test_vllm_that_is_asked_for_and_missing_is_refused_with_the_cure():
    with pytest.raises(InputError, match=r"no vLLM is installed: install .* or set inference.engine to 'auto'"):
        engine_kind("vllm", has_vllm=False, has_cuda=True)


def test_the_engine_chosen_bears_the_name_given(model: Path):
    engine = choose_engine(InferenceSettings(engine="torch"), model, name="worker-3")
    assert (engine.name, type(engine).__name__) == ("worker-3", "TorchEngine")


def test_asking_loads_neither_torch_nor_vllm():
    program = (
        "import sys; from inference.choose_engine import engine_kind; engine_kind('auto', has_vllm=True, has_cuda=False);"
        "print([name for name in ('torch', 'vllm', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.vllm
@pytest.mark.system
def test_an_engine_that_was_made_and_closed_leaves_no_folder(model: Path, host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """One is made, not one more to say which."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    engine = make_engine(InferenceSettings(engine="vllm"), model)
    assert len(list(tmp_path.glob("entente-merged-*"))) == 1
    host.submit(engine.close()).result(timeout=30)
    assert list(tmp_path.iterdir()) == []
