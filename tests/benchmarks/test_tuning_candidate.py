"""Passes of the tuner at a vLLM server, whose prefix cache cannot be emptied, find nothing in it of an earlier one."""

import asyncio
from pathlib import Path

import pytest

from benchmarks.tuning_candidate import figures_of, one_pass
from entente.inference.settings import InferenceSettings
from entente.inference.vllm_client import VllmClient
from entente.records.policy_version import version_in
from entente.rollouts.groups import plan_start_groups
from entente.settings.layers import layered_settings
from state_cache.sampling import sample_start_positions
from tests.inference.vllm_double import VllmDouble

PROBE = 16
"""The client's own requests have fewer tokens."""


@pytest.mark.parametrize("adapted", [True, False], ids=["an adapter", "the base"])
def test_passes_of_the_tuner_share_no_prefix(adapted: bool, model: Path, tokens, positions, make_adapter):
    small = {"rollouts": {"start_groups": 1, "forks_per_group": 2, "opponents": "mover"}}
    run = layered_settings("laptop", (), small)
    groups = plan_start_groups(sample_start_positions(positions, 1, 0, 1), 0, run.rollouts)
    adapter = version_in(make_adapter(seed=1, scale=0.3), 7) if adapted else None

    async def two_passes() -> None:
        double, sent = VllmDouble(model), []
        await double.start()
        client = VllmClient((double.url,), InferenceSettings(max_model_length=512), model, None)
        await client.start()
        passes = []
        for number in (1, 2):
            passes.append(await one_pass(client, tokens, run, groups, number, adapter))
            sent.append({each for each in double.prompts if len(each[1]) > PROBE})
            double.prompts.clear()
        await client.close()
        await double.close()
        assert sent[0] and sent[1] and not sent[0] & sent[1]
        assert {row.policy_version for row in passes[1][0]} == {2 if adapted else 0}
        assert figures_of(passes)["first_token_ms"] is None

    asyncio.run(two_passes())
