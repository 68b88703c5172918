"""Batch invariance is asked of vLLM only where vLLM promises it."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from pydantic import ValidationError

from inference.settings import InferenceSettings
from inference.vllm_arguments import engine_arguments, prepare_environment
from telemetry.errors import InputError

ASKED = InferenceSettings(batch_invariant=True, adapters="merge_reload")


@pytest.mark.parametrize(
    ("beside", "sentence"),
    [
        (
            {"adapters": "slots"},
            "LoRA slots, and inference.adapters is 'slots': set adapters to 'merge_reload'",
        ),
        ({"adapters": "auto"}, "inference.adapters is 'auto': set adapters to 'merge_reload'"),
        ({"adapters": "merge_reload", "engine": "torch"}, "inference.engine is 'torch': set batch_invariant to false"),
    ],
)
def test_it_is_refused_beside_what_breaks_it(beside: dict, sentence: str):
    with pytest.raises(ValidationError, match=sentence):
        InferenceSettings(batch_invariant=True, **beside)


@pytest.mark.parametrize("settings", [ASKED, InferenceSettings()], ids=["on", "off"])
def test_vllm_hears_of_it_by_its_environment_before_it_is_imported(settings: InferenceSettings, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "environ", {"VLLM_BATCH_INVARIANT": "another"})
    prepare_environment(settings, own_process=True)
    assert os.environ["VLLM_BATCH_INVARIANT"] == str(int(settings.batch_invariant))


@pytest.mark.vllm
@pytest.mark.parametrize(("is_cuda", "new_enough", "taken"), [(False, True, False), (True, False, False), (True, True, True)])
def test_the_cpu_and_an_old_card_are_refused(is_cuda: bool, new_enough: bool, taken: bool, monkeypatch: pytest.MonkeyPatch):
    platforms = pytest.importorskip("vllm.platforms", reason="vLLM is not installed")
    pytest.importorskip("inference.legal_processor")  # vLLM itself is imported on the platform that there is
    card = SimpleNamespace(
        is_cpu=lambda: not is_cuda, is_cuda=lambda: is_cuda, has_device_capability=lambda least: least == 80 and new_enough
    )
    monkeypatch.setattr(platforms, "current_platform", card)
    if taken:
        assert engine_arguments(Path("model"), ASKED, slots=False)["model"] == "model"
        return
    with pytest.raises(InputError, match=r"needs an NVIDIA GPU of compute capability 8\.0 or higher"):
        engine_arguments(Path("model"), ASKED, slots=False)


@pytest.mark.vllm
def test_vllm_s_lora_kernel_still_depends_on_the_batch():
    """Why slots are refused: if this fails, vLLM may cover LoRA now, and the refusal can go."""
    import inspect

    pytest.importorskip("vllm", reason="vLLM is not installed")
    from vllm import lora

    source = (Path(inspect.getfile(lora)).parent / "ops" / "triton_ops" / "utils.py").read_text()
    assert '"block_k": 256 if batch < 128 else 32' in source
