"""The command of vLLM's server: what the settings say, our processor, and nothing secret."""

from pathlib import Path

import pytest

from entente.inference import server_arguments as module
from entente.inference.page_gate import PageGate
from entente.inference.server_arguments import command_text, server_arguments, server_environment, slot_rank, start_limit_s
from entente.inference.settings import InferenceSettings
from tests.inference.fake_vllm import fake_vllm
from tests.telemetry.fake_nvml import card

SETTINGS = InferenceSettings(model="somewhere", max_sequences=7, adapter_slots=5, adapter_rank=12, kv_cache_gib=3, threads=2)


def options(settings: InferenceSettings) -> dict[str, str]:
    """Each argument with the word after it."""
    words = server_arguments(Path("folder of a model"), settings, host="127.0.0.1", port=4321)
    return dict(zip(words, [*words[1:], ""], strict=True))


def test_the_server_has_our_processor_its_slots_and_its_limits(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "computes_on_card", lambda settings: False)
    found = options(SETTINGS)
    assert found["--model"] == "folder of a model" and found["--port"] == "4321" and found["--host"] == "127.0.0.1"
    assert found["--middleware"] == f"{PageGate.__module__}.{PageGate.__qualname__}", "no page in a browser is a client"
    assert found["--logits-processors"] == "entente.inference.legal_processor:LegalOrderProcessor"
    assert found["--logprobs-mode"] == "processed_logits" and found["--max-num-seqs"] == "7"
    assert found["--max-loras"] == found["--max-cpu-loras"] == "5"
    assert found["--max-lora-rank"] == "16"
    assert {"--enable-lora", "--enable-scale-out", "--enable-prefix-caching", "--enforce-eager"} <= found.keys()
    assert not any("key" in each for each in found)


@pytest.mark.parametrize(
    ("dtype", "head"), [("float32", None), ("bfloat16", '{"head_dtype":"float32"}'), ("auto", '{"head_dtype":"float32"}')]
)
def test_the_head_computes_in_32_bits_as_the_trainers_does(monkeypatch: pytest.MonkeyPatch, dtype: str, head: str | None):
    monkeypatch.setattr(module, "computes_on_card", lambda settings: False)
    assert options(SETTINGS.model_copy(update={"dtype": dtype})).get("--hf-overrides") == head


@pytest.mark.parametrize(("version", "flag"), [("0.26.0", False), ("0.30.0", True), ("", True)])
def test_only_a_vllm_that_knows_the_flag_of_the_route_gets_it(monkeypatch: pytest.MonkeyPatch, version: str, flag: bool):
    monkeypatch.setattr(module, "find_vllm", lambda: fake_vllm("cpu", version) if version else None)
    assert ("--enable-scale-out" in options(SETTINGS)) is flag


@pytest.mark.parametrize("on_card", [False, True])
def test_a_card_compiles_and_a_processor_does_not(monkeypatch: pytest.MonkeyPatch, on_card: bool):
    monkeypatch.setattr(module, "computes_on_card", lambda settings: on_card)
    settings = InferenceSettings.model_validate({"engine": "vllm", "adapter_slots": 5})
    assert ("--enforce-eager" in options(settings)) is not on_card
    assert start_limit_s(settings) == (1800 if on_card else 300)


def test_a_server_elsewhere_may_compile():
    assert start_limit_s(InferenceSettings.model_validate({"urls": ["http://elsewhere:1"]})) == 1800


def test_a_server_on_cards_sees_them_alone_and_one_on_the_processor_has_its_cache(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "engine_cards", lambda settings: (card(0), card(1)))
    found = server_environment(SETTINGS)
    assert found["CUDA_VISIBLE_DEVICES"] == "GPU-0,GPU-1" and found["OMP_NUM_THREADS"] == "1"
    assert "VLLM_CPU_KVCACHE_SPACE" not in found
    monkeypatch.setattr(module, "engine_cards", lambda settings: ())
    found = server_environment(SETTINGS)
    assert found["VLLM_CPU_KVCACHE_SPACE"] == "3" and found["OMP_NUM_THREADS"] == "2" and "CUDA_VISIBLE_DEVICES" not in found
    assert found["VLLM_USE_V2_MODEL_RUNNER"] == "0" and found["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"


@pytest.mark.parametrize(("dtype", "precision"), [("float32", "ieee"), ("bfloat16", None), ("auto", None)])
def test_a_card_multiplies_float32_in_float32(monkeypatch: pytest.MonkeyPatch, dtype: str, precision: str | None):
    monkeypatch.setattr(module, "engine_cards", lambda settings: (card(0),))
    found = server_environment(SETTINGS.model_copy(update={"dtype": dtype}))
    assert found.get("TRITON_F32_DEFAULT") == precision


def test_the_command_can_be_typed_and_names_the_keys_variable_only():
    text = command_text(fake_vllm("cpu"), ["--model", "a folder"], {"A": "b c"})
    assert text == (
        'VLLM_API_KEY="$ENTENTE_KEY" A=\'b c\' PATH=/vllm/bin:"$PATH" '
        "/vllm/bin/python -P -m vllm.entrypoints.openai.api_server --model 'a folder'"
    )


@pytest.mark.parametrize(("rank", "slot"), [(1, 1), (2, 8), (16, 16), (17, 32), (512, 512)])
def test_a_slot_is_the_smallest_that_holds_the_rank(rank: int, slot: int):
    assert slot_rank(rank) == slot
