"""vLLM with LoRA slots, and the choice between slots and merged weights; the contract itself is in test_contract.py."""

import gc
import warnings
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from inference import calibrate
from inference.adapter_check import version_in
from inference.async_engine import AsyncEngine
from inference.embedded import EmbeddedEngine
from inference.merge import load_base, merge_adapter
from inference.settings import InferenceSettings
from records.generation import Generation
from telemetry.errors import DataError, EngineError, EngineLostError
from tests.inference.test_embedded import draw, requests_for

SMALL = {"max_model_length": 512, "max_sequences": 32}


def test_rounding_swallows_small_updates_in_bfloat16_and_none_in_float32(model: Path, make_adapter, tmp_path: Path):
    adapter, base = make_adapter(seed=4, scale=2e-3), load_base(model)
    assert merge_adapter(base, adapter, tmp_path / "a") < 1e-3
    assert merge_adapter({name: weight.to(torch.bfloat16) for name, weight in base.items()}, adapter, tmp_path / "b") > 0.5
    assert merge_adapter(base, make_adapter(seed=5, scale=0.0), tmp_path / "c") == 0.0


@pytest.mark.vllm
@pytest.mark.system
def test_slots_that_are_dear_here_give_way_to_merged_weights_and_it_says_why(
    host, model, positions, tokens, make_adapter, monkeypatch, said
):
    """On a CPU each token gathers its adapter's weights; the figure is measured, whatever it is here."""
    monkeypatch.setattr(calibrate, "_slots_cheap", {})  # another test of this process may have measured
    engine = EmbeddedEngine(model, InferenceSettings(**SMALL, adapters="auto"), name="auto")
    try:
        host.submit(engine.start()).result(timeout=300)
        (sentence,) = [line for line in said if line.startswith("adapters: ")]
        assert f"adapters: {engine.adapters}, because slots take " in sentence and " times the base model's time" in sentence
        ratio = float(sentence.split("slots take ")[1].split()[0])
        assert engine.adapters == ("merge_reload" if ratio >= 1.5 else "slots")
        adapter = make_adapter(seed=1, scale=0.3)
        host.submit(engine.publish(version_in(adapter, 1))).result(timeout=60)
        (answer,) = draw(host, engine, requests_for(positions[:1], tokens, label="auto")[:1])
        assert isinstance(answer, Generation) and answer.policy.version == 1
        stats = host.submit(engine.stats()).result(timeout=10)
        assert stats.requests == 1, "neither warm-up nor calibration is counted"
        host.submit(engine.start()).result(timeout=300)
        assert len([line for line in said if line.startswith("adapters: ")]) == 1, "measured once in a process"
    finally:
        host.submit(engine.close()).result(timeout=60)


@pytest.mark.vllm
@pytest.mark.system
def test_slots_bound_what_is_held_and_a_rank_too_high_is_refused_before_vllm_hears_of_it(
    host, vllm_engine, model, positions, tokens, make_adapter
):
    """And the closed engine leaves another of this process working: vLLM's ranks and groups belong to the process."""
    settings = InferenceSettings(**SMALL, adapters="slots", adapter_slots=1, adapter_rank=8)
    engine = EmbeddedEngine(model, settings, name="narrow")
    try:
        host.submit(engine.start()).result(timeout=300)
        first, second, high = (make_adapter(seed=seed, scale=0.1, rank=rank) for seed, rank in ((1, 8), (2, 8), (3, 16)))
        host.submit(engine.publish(version_in(first, 1))).result(timeout=60)
        with pytest.raises(DataError, match="has rank 16 but the engine's slots take rank 8"):
            host.submit(engine.publish(version_in(high, 2))).result(timeout=60)
        with pytest.raises(EngineError, match="all 1 adapter slots of engine 'narrow' are taken by versions 1"):
            host.submit(engine.publish(version_in(second, 2))).result(timeout=60)
        host.submit(engine.retire(2)).result(timeout=10)
        assert host.submit(engine.stats()).result(timeout=10).policy_version == 1, "the newest always stays"
    finally:
        host.submit(engine.close()).result(timeout=60)
    assert len(draw(host, vllm_engine, requests_for(positions[:1], tokens, label="left"))) == 7


@pytest.mark.vllm
@pytest.mark.system
def test_an_engine_core_in_its_own_process_jumps_draws_the_same_and_a_killed_one_is_lost(
    host, vllm_engine, model, positions, tokens
):
    """`AsyncLLM` with the worker extension, as on a GPU with inference.jump_forced 'on'; only asynchronous scheduling is off."""
    engine = AsyncEngine(model, InferenceSettings(**SMALL, adapters="merge_reload", jump_forced="on"), name="async")
    requests = requests_for(positions[:2], tokens, label="own process")
    expected = [generation.token_ids.tolist() for generation in draw(host, vllm_engine, requests)]
    choices = sum(int((np.diff(r.table.legal_sets(ids)[1]) > 1).sum()) for r, ids in zip(requests, expected, strict=True))
    heads = sum(len(request.table.forced(0)[0]) for request in requests)
    try:
        host.submit(engine.start()).result(timeout=400)
        assert [generation.token_ids.tolist() for generation in draw(host, engine, requests)] == expected
        assert host.submit(engine.stats()).result(timeout=10).drawn_tokens == choices
        host.submit(engine.jump_forced(False)).result(timeout=60)
        assert [generation.token_ids.tolist() for generation in draw(host, engine, requests)] == expected
        assert host.submit(engine.stats()).result(timeout=10).drawn_tokens == choices + sum(map(len, expected)) - heads
        in_flight = [host.submit(engine.generate(request)) for request in requests_for(positions, tokens, label="lost")]
        for child in psutil.Process().children(recursive=True):
            if "EngineCore" in child.name() or "EngineCore" in " ".join(child.cmdline()):
                child.kill()
        with pytest.raises(EngineLostError, match="engine 'async'"):
            for answer in in_flight:
                answer.result(timeout=60)
    finally:
        host.submit(engine.close()).result(timeout=60)
        del engine
        with warnings.catch_warnings():  # vLLM leaves its sockets' contexts to the collector
            warnings.simplefilter("ignore", ResourceWarning)
            gc.collect()
