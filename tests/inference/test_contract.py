"""One contract for every engine: what rollouts may rely on, whichever of them draws.

The torch engine, vLLM in this process, and vLLM servers by URL answer the same questions here.
"""

import asyncio
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from entente.decoding.table_builder import TableBuilder
from entente.decoding.thinking import thinking_of
from entente.inference.host import EngineHost
from entente.records.policy_version import ADAPTER_WEIGHTS, BASE, PolicyVersion, version_in
from entente.records.rows import Generation, GenerationRequest
from entente.telemetry.errors import DataError, EngineError, EngineLostError, VersionGoneError
from tests.inference.conftest import Contender
from tests.inference.masked_oracle import gap, same

SLOW_S = 60


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("contract_torch", id="torch"),
        pytest.param("contract_http", id="http"),
        pytest.param("contract_served", id="vllm", marks=[pytest.mark.vllm, pytest.mark.system]),
    ],
)
def contender(request: pytest.FixtureRequest, host: EngineHost, write_adapter: Any, tmp_path_factory: Any) -> Iterator[Contender]:
    """Each engine in turn; afterwards it plays like the base again, under version 0."""

    found: Contender = request.getfixturevalue(request.param)
    yield found
    idle = write_adapter(tmp_path_factory.mktemp("idle") / "adapter", seed=0, scale=0.0)
    host.submit(found.engine.publish(version_in(idle, 0))).result(timeout=60)


@pytest.fixture
def run(host) -> Callable[[Any], Any]:
    """Await something on the engines' loop."""
    return lambda work: host.submit(work).result(timeout=SLOW_S)


@pytest.fixture
def sample(run, contender) -> Callable[[Sequence[GenerationRequest]], list[Generation]]:
    """Ask for all at once and wait for all."""

    async def all_at_once(requests: Sequence[GenerationRequest]) -> list[Generation]:
        return await asyncio.gather(*(contender.engine.generate(request) for request in requests))

    return lambda requests: run(all_at_once(requests))


@pytest.fixture
def publish(run, contender) -> Callable[..., int]:
    """Publish an adapter as a new version; its number."""

    def as_new(adapter: Path, version: int | None = None) -> int:
        version = next(contender.versions) if version is None else version
        run(contender.engine.publish(version_in(adapter, version)))
        return version

    return as_new


def test_logprobs_are_those_of_the_masked_policy_without_and_with_an_adapter(
    contender, ask, sample, publish, adapters, adapted, reference, make_adapter
):
    temperature = 0.7
    idle = publish(make_adapter(seed=3, scale=0.0))
    requests = ask("base", positions_=3, temperature=temperature, version=idle)
    generations = sample(requests)
    assert sum((generation.logprobs < 0).sum() for generation in generations) > 100
    for generation in generations:
        assert generation.token_ids.dtype == np.int32 and generation.logprobs.dtype == np.float32 and generation.worker
    assert gap(reference, requests, generations) < 1e-4

    version = publish(adapters[0])
    requests = ask("adapted", positions_=3, temperature=temperature)
    generations = sample(requests)
    assert {each.policy for each in generations} == {version_in(adapters[0], version)}
    assert gap(adapted[0], requests, generations) < 1e-4
    assert gap(reference, requests, generations) > 0.05, "the adapter moves nothing: nobody would see it ignored"


def test_a_thought_is_drawn_from_all_ids_but_the_end_of_sequence_and_orders_follow(
    run, contender, ask, sample, publish, tokens, reference, make_adapter
):
    """Requests that think, of two rules, beside others that do not: each is drawn as if it were alone."""
    codec, idle = tokens.codec, publish(make_adapter(seed=3, scale=0.0))
    thinking = thinking_of(codec, 6)
    assert thinking is not None
    shorter = replace(thinking, rule=replace(thinking.rule, end=codec.vocabulary_size - 100))
    requests = [
        request
        for label, way in (("thinks", thinking), ("plain", None), ("shorter", shorter))
        for request in ask(label, positions_=3, version=idle, tables=TableBuilder(codec, thinking=way))
    ]
    before = run(contender.engine.stats())
    generations = sample(requests)
    after = run(contender.engine.stats())
    assert gap(reference, requests, generations) < 1e-4
    sampled, forced = [], 0
    for request, generation in zip(requests, generations, strict=True):
        ids, offsets = request.table.legal_sets(generation.token_ids.tolist())  # raises unless whole and legal
        forced += int((np.diff(offsets) == 1).sum())
        assert not generation.logprobs[np.diff(offsets) == 1].any()
        if request.table.thought is not None:
            sampled.append(int((ids < 0).sum()))
            thought, _ = thinking.split(generation.token_ids.tolist())
            assert codec.eos_id not in thought and all(token < request.table.thought.end for token in thought)
    assert max(sampled) == 6 > min(sampled), "all thoughts were ended by their marker, or all by their budget"
    assert after.forced_tokens - before.forced_tokens == forced
    alone = [sample([replace(request, request_id=f"{request.request_id}/alone")])[0] for request in requests[::15]]
    assert same(generations[::15], alone)


def test_a_thought_of_foreign_ids_or_beyond_the_longest_request_is_refused_alone(contender, run, ask, sample, tokens):
    thinking = thinking_of(tokens.codec, 6)
    assert thinking is not None
    good = ask("good", positions_=1, tables=TableBuilder(tokens.codec, thinking=thinking))
    for number, changed in enumerate(({"end": 10**6}, {"budget": 10**6})):
        rule = replace(thinking.rule, **changed)
        longest = good[0].table.longest - thinking.rule.budget + rule.budget
        table = replace(good[0].table, thought=rule, longest=longest, _bytes=None)
        with pytest.raises(EngineError) as refusal:
            run(contender.engine.generate(replace(good[0], request_id=f"{good[0].request_id}/bad {number}", table=table)))
        assert not isinstance(refusal.value, EngineLostError | VersionGoneError)
    assert len(sample(good)) == len(good) and run(contender.engine.stats()).running == 0


def test_a_completion_depends_on_its_seed_and_on_nothing_else_in_the_batch(ask, sample):
    together = sample(ask("together", positions_=3))
    backwards = sample(ask("backwards", positions_=3)[::-1])[::-1]
    alone = [sample([request])[0] for request in ask("alone", positions_=1)]
    assert same(together, backwards) and same(together[: len(alone)], alone)
    other_seeds = sample([replace(request, seed=request.seed + 999) for request in ask("other", positions_=3)])
    assert not same(together, other_seeds)


def test_forks_of_one_position_share_their_prompt_and_still_draw_for_themselves(contender, run, ask, sample):
    one = ask("forks", positions_=1)[0]
    forks = [replace(one, request_id=f"{one.request_id}/{seed}", seed=seed) for seed in range(16)]
    first = sample(forks)
    assert len({tuple(generation.token_ids.tolist()) for generation in first}) > 4
    before = run(contender.engine.stats())
    assert same(first, sample([replace(fork, request_id=fork.request_id + "/again") for fork in forks]))
    after = run(contender.engine.stats())
    assert after.cached_tokens - before.cached_tokens > 0.5 * (after.prompt_tokens - before.prompt_tokens)


def test_an_id_that_is_in_flight_already_harms_neither_request(contender, run, ask):
    requests = ask("twice")

    async def twice() -> list[Any]:
        return await asyncio.gather(*(contender.engine.generate(r) for r in [*requests, requests[0]]), return_exceptions=True)

    *first, second = run(twice())
    assert all(isinstance(generation, Generation) for generation in first)
    if isinstance(second, Generation):
        assert same([first[0]], [second])
    else:
        assert isinstance(second, EngineError) and not isinstance(second, EngineLostError)
        assert requests[0].request_id in str(second)


def test_a_version_that_is_not_served_is_said_to_be_gone(contender, run, ask):
    with pytest.raises(VersionGoneError, match="99999"):
        run(contender.engine.generate(ask("gone", version=99_999)[0]))


def test_publishing_what_is_served_already_changes_nothing(contender, run, ask, sample, publish, adapters):
    version = publish(adapters[0])
    before = sample(ask("before"))

    async def again_meanwhile() -> list[Generation]:
        drawing = [asyncio.ensure_future(contender.engine.generate(request)) for request in ask("meanwhile")]
        await asyncio.sleep(0)
        await contender.engine.publish(version_in(adapters[0], version))
        return await asyncio.gather(*drawing)

    assert same(before, run(again_meanwhile()))
    assert run(contender.engine.stats()).policy_version == version
    requests = ask("later")
    warm = sum(generation.cached_tokens for generation in sample(requests))
    assert warm > 0.5 * sum(len(request.prompt_ids) for request in requests), "it forgot the prompts that it knew"


def test_what_is_in_flight_when_a_version_comes_ends_under_the_one_it_began_with(contender, run, ask, publish, adapters, adapted):
    old, new = publish(adapters[0]), next(contender.versions)

    async def publish_meanwhile() -> tuple[list[Generation], list[Generation]]:
        early = [asyncio.ensure_future(contender.engine.generate(request)) for request in ask("early", positions_=3)]
        while (await contender.engine.stats()).running < len(early):
            await asyncio.sleep(0)
        await contender.engine.publish(version_in(adapters[1], new))
        late = await asyncio.gather(*(contender.engine.generate(request) for request in ask("late")))
        return await asyncio.gather(*early), late

    early, late = run(publish_meanwhile())
    for generation in early:
        assert generation.policy in (version_in(adapters[0], old), version_in(adapters[1], new))
    assert early[0].policy.version == old
    assert {generation.policy.version for generation in late} == {new}
    for version, model in ((old, adapted[0]), (new, adapted[1])):
        mine = [pair for pair in zip(ask("early", positions_=3), early, strict=True) if pair[1].policy.version == version]
        if mine:
            assert gap(model, *zip(*mine, strict=True)) < 1e-4
    assert gap(adapted[1], ask("late"), late) < 1e-4


def test_two_versions_are_drawn_side_by_side_each_by_its_own_adapter(contender, ask, sample, publish, adapters, adapted):
    versions = [publish(adapter) for adapter in adapters]
    requests = [request for pair in zip(*(ask(f"v{v}", version=v) for v in versions), strict=True) for request in pair]
    generations = sample(requests)
    for number, version in enumerate(versions):
        mine = generations[number::2]
        assert {each.policy for each in mine} == {version_in(adapters[number], version)}
        assert gap(adapted[number], requests[number::2], mine) < 1e-4


def spoil_cut(folder: Path) -> str:
    file = folder / ADAPTER_WEIGHTS
    file.write_bytes(file.read_bytes()[:-64])
    return version_in(folder, 1).adapter_hash


def spoil_hash(folder: Path) -> str:
    return "0" * 32


@pytest.mark.parametrize("spoil", [spoil_cut, spoil_hash])
def test_an_adapter_that_cannot_be_served_changes_nothing(
    contender, run, ask, sample, publish, adapters, tmp_path, spoil: Callable[[Path], str]
):
    version = publish(adapters[0])
    before = sample(ask("before"))
    bad = Path(shutil.copytree(adapters[1], tmp_path / "bad"))
    told = spoil(bad)
    with pytest.raises(DataError, match=r"adapter"):
        run(contender.engine.publish(PolicyVersion(version=next(contender.versions), adapter=bad, adapter_hash=told)))
    after = sample(ask("after"))
    assert same(before, after) and {generation.policy.version for generation in after} == {version}
    assert run(contender.engine.stats()).policy_version == version


def test_retired_versions_are_gone_and_the_kept_and_the_newest_are_not(contender, run, ask, sample, publish, adapters):
    oldest, kept, newest = (publish(adapters[number]) for number in (0, 1, 0))
    run(contender.engine.retire(newest + 1, keep=(kept,)))
    with pytest.raises(VersionGoneError, match=str(oldest)):
        sample(ask("oldest", version=oldest))
    assert {generation.policy.version for generation in sample(ask("newest"))} == {newest}
    assert {generation.policy.version for generation in sample(ask("kept", version=kept))} == {kept}


def test_the_base_can_be_served_again_after_other_versions(contender, run, ask, sample, publish, adapters, reference):
    for adapter in adapters:
        publish(adapter)
    run(contender.engine.retire(sys.maxsize))
    run(contender.engine.publish(BASE))
    run(contender.engine.retire(sys.maxsize))
    requests = ask("base again")
    generations = sample(requests)
    assert {generation.policy for generation in generations} == {BASE}
    assert gap(reference, requests, generations) < 1e-4


def test_requests_in_flight_under_a_retired_version_end_with_that_reason(contender, run, ask, sample, publish, adapters):
    old, new = publish(adapters[0]), publish(adapters[1])

    async def retire_meanwhile() -> list[Any]:
        drawing = [asyncio.ensure_future(contender.engine.generate(r)) for r in ask("old", positions_=4, version=old)]
        while (await contender.engine.stats()).running < len(drawing):
            await asyncio.sleep(0)
        await contender.engine.retire(new)
        return await asyncio.gather(*drawing, return_exceptions=True)

    answers = run(retire_meanwhile())
    assert {type(answer) for answer in answers} <= {VersionGoneError, Generation}
    assert any(isinstance(answer, VersionGoneError) for answer in answers)
    assert {generation.policy.version for generation in sample(ask("after"))} == {new}
    assert run(contender.engine.stats()).running == 0


def test_a_prompt_that_is_too_long_is_refused_with_the_limit_and_nothing_else_suffers(contender, run, ask, sample):
    request = ask("long")[0]
    long = replace(request, prompt_ids=[5] * (513 - request.table.longest))
    with pytest.raises(EngineError, match=r"513.*512") as refusal:
        run(contender.engine.generate(long))
    assert not isinstance(refusal.value, EngineLostError | VersionGoneError)
    fitting = sample([replace(request, prompt_ids=[5] * (512 - request.table.longest))])
    assert len(fitting) == 1 and run(contender.engine.stats()).running == 0


def test_more_requests_than_it_draws_at_once_are_all_answered(ask, sample):
    requests = [replace(r, request_id=f"{r.request_id}/{n}") for n in range(3) for r in ask("many", positions_=3)]
    assert len(requests) > 32
    generations = sample(requests)
    assert same(generations[: len(requests) // 3], generations[-len(requests) // 3 :])


def test_closing_fails_what_is_in_flight_and_refuses_what_comes_later(fresh_contender, run, ask):
    engine = fresh_contender.engine

    async def close_meanwhile() -> list[Any]:
        drawing = [asyncio.ensure_future(engine.generate(request)) for request in ask("closed", positions_=4)]
        while (await engine.stats()).running < len(drawing):
            await asyncio.sleep(0)
        await engine.close()
        return await asyncio.gather(*drawing, return_exceptions=True)

    answers = run(close_meanwhile())
    assert {type(answer) for answer in answers} <= {EngineLostError, EngineError, Generation}
    assert any(isinstance(answer, EngineError) for answer in answers)
    with pytest.raises(EngineError):
        run(engine.generate(ask("late")[0]))


def test_a_cancelled_request_leaves_the_engine_clean(contender, run, ask, sample):
    whole = sample(ask("whole", positions_=3))

    async def cancel_half() -> list[Any]:
        drawing = [asyncio.ensure_future(contender.engine.generate(request)) for request in ask("half", positions_=3)]
        await asyncio.sleep(0.005)
        for task in drawing[::2]:
            task.cancel()
        return await asyncio.gather(*drawing, return_exceptions=True)

    async def settled() -> bool:
        for _ in range(200):
            if (await contender.engine.stats()).running == 0:
                return True
            await asyncio.sleep(0.01)
        return False

    answers = run(cancel_half())
    assert same(whole[1::2], answers[1::2])
    assert run(settled())
    assert same(whole, sample(ask("after", positions_=3)))


def test_counts_are_taken_at_the_request(contender, run, ask, sample):
    before = run(contender.engine.stats())
    requests = ask("counted")
    generations = sample(requests)
    with pytest.raises(VersionGoneError):
        sample(ask("refused", version=99_999)[:1])
    after = run(contender.engine.stats())
    assert after.requests - before.requests == len(requests)
    assert after.prompt_tokens - before.prompt_tokens == sum(len(request.prompt_ids) for request in requests)
    assert after.completion_tokens - before.completion_tokens == sum(len(each.token_ids) for each in generations)
    forced = 0
    for request, generation in zip(requests, generations, strict=True):
        forced += int((np.diff(request.table.legal_sets(generation.token_ids.tolist())[1]) == 1).sum())
    assert after.forced_tokens - before.forced_tokens == forced > 0
    assert after.cached_tokens - before.cached_tokens == sum(each.cached_tokens for each in generations)
    assert after.engine_steps > before.engine_steps and after.running == 0
    for generation in generations:
        assert min(generation.queue_ms, generation.prefill_ms, generation.decode_ms) >= 0
