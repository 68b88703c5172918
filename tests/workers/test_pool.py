"""The pool hands every request to a worker that suits it, keeps versions straight, and answers each request once.

Workers are whole and talk over real HTTP; only their engine is plain, so that what it must draw is known.
"""

import asyncio
import dataclasses
import random
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from decoding.model_files import model_fingerprint
from game.board import Board
from inference.adapter_check import adapter_hash_of, version_in
from inference.host import EngineHost
from inference.settings import InferenceSettings
from records.generation import Generation, GenerationRequest
from records.policy_version import BASE, PolicyVersion
from rollouts.fork import Tokens
from telemetry.errors import DataError, EngineError, EngineLostError, InputError, VersionGoneError
from tests.waiting import wait_until
from tests.workers.plain_worker import PlainEngine, WorkerHere, expected_tokens
from workers import pool_roster
from workers.pool import RemoteEngine
from workers.pool_worker import PoolTimes


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory, write_adapter: Callable[..., Path]) -> Path:
    """Where adapters of versions 1 to 3 lie, and one of too high a rank for any slot."""
    folder = tmp_path_factory.mktemp("adapters")
    for version in (1, 2, 3):
        write_adapter(folder / f"v{version}", seed=version, scale=0.1)
    return folder


@pytest.fixture
def workers(model: Path, root: Path) -> Iterator[Callable[..., WorkerHere]]:
    """Start workers: `workers(delay_s=0.1)`; they stop with the test."""
    started: list[WorkerHere] = []

    def start(engine: PlainEngine | None = None, *, port: int = 0, **how: Any) -> WorkerHere:
        started.append(WorkerHere(engine or PlainEngine(f"plain-{len(started)}", **how), model, root, port=port).start())
        return started[-1]

    yield start
    for worker in started:
        if worker._server is not None and worker._server.is_alive():
            worker.stop()


@pytest.fixture
def pools(host: EngineHost, model: Path) -> Iterator[Callable[..., RemoteEngine]]:
    """Start pools: `pools(worker, worker, max_in_flight=4)`; they close with the test."""
    opened: list[RemoteEngine] = []

    def start(*workers: WorkerHere | str, **given: Any) -> RemoteEngine:
        urls = tuple(worker if isinstance(worker, str) else worker.url for worker in workers)
        times = {"heartbeat": 2.0, "no_worker": 2.0, "request": 10.0}
        times |= {name: given.pop(name) for name in list(given) if name in times}
        pool = RemoteEngine(InferenceSettings(urls=urls, **given), None, model_fingerprint(model), times=PoolTimes(**times))
        opened.append(pool)
        host.submit(pool.start()).result(timeout=60)
        return pool

    yield start
    for pool in opened:
        host.submit(pool.close()).result(timeout=20)


@pytest.fixture(scope="module")
def request_for(tokens: Tokens) -> Callable[..., GenerationRequest]:
    """A request of its own number: `request_for(3, snapshot_id='a')`."""
    legal = sorted(Board.start().legal_orders().items())

    def make(number: int, **fields: Any) -> GenerationRequest:
        table = tokens.tables.table(legal[number % len(legal)][1])
        plain = GenerationRequest(
            request_id=f"r/{number}", prompt_ids=[1, 2, 3], table=table, seed=number, snapshot_id=f"s{number}"
        )
        return dataclasses.replace(plain, **fields)

    return make


def draw(host: EngineHost, pool: RemoteEngine, requests: Sequence[GenerationRequest]) -> Future[list[Generation]]:
    async def all_at_once() -> list[Generation]:
        return await asyncio.gather(*(pool.generate(request) for request in requests))

    return host.submit(all_at_once())


def check(requests: Sequence[GenerationRequest], answers: Sequence[Generation], version: int = 0) -> None:
    for request, answer in zip(requests, answers, strict=True):
        assert answer.policy.version == version
        assert answer.token_ids.tolist() == expected_tokens(request, version), "drawn under another version than it says"


def publish(host: EngineHost, pool: RemoteEngine, root: Path, version: int) -> str:
    policy = version_in(root / f"v{version}", version)
    host.submit(pool.publish(policy)).result(timeout=30)
    return policy.adapter_hash


def test_a_position_stays_on_its_worker_and_load_spreads_over_positions(host, pools, workers, request_for):
    ends = [workers(delay_s=0.01) for _ in range(3)]
    pool = pools(*ends)
    requests = [request_for(number, snapshot_id=f"s{number % 24}") for number in range(240)]
    for start in range(0, 240, 24):
        batch = random.Random(start).sample(requests[start : start + 24], 24)
        check(batch, draw(host, pool, batch).result(timeout=30))
    homes: dict[str, set[str]] = {}
    for end in ends:
        for request in end.engine.requests:
            homes.setdefault(request.snapshot_id, set()).add(end.engine.name)
    assert all(len(home) == 1 for home in homes.values())
    assert all(len(end.engine.requests) >= 20 for end in ends)


def test_a_worker_never_has_more_in_flight_than_the_bound(host, pools, workers, request_for):
    ends = [workers(delay_s=0.02) for _ in range(2)]
    pool = pools(*ends, max_in_flight=6)
    requests = [request_for(number) for number in range(60)]
    check(requests, draw(host, pool, requests).result(timeout=30))
    assert all(3 <= end.engine.most_at_once <= 6 for end in ends)


def test_older_versions_go_first_and_then_the_order_of_arrival(host, pools, workers, root, request_for):
    end = workers(delay_s=0.02)
    pool = pools(end, max_in_flight=1)
    for version in (1, 2):
        publish(host, pool, root, version)
    asked = [None, 2, 1, 1, 2, 1]
    requests = [request_for(number, version=version) for number, version in enumerate(asked)]
    draw(host, pool, requests).result(timeout=30)
    # The first was sent before the others had come.
    assert [request.seed for request in end.engine.requests] == [0, 2, 3, 5, 1, 4]


def test_long_prompts_have_the_last_worker_to_themselves(host, pools, workers, request_for):
    short, last = workers(), workers()
    pool = pools(short, last, long_prompt_tokens=10)
    requests = [request_for(number, prompt_ids=[1] * (20 if number % 3 == 0 else 5)) for number in range(30)]
    check(requests, draw(host, pool, requests).result(timeout=30))
    assert {len(request.prompt_ids) for request in short.engine.requests} == {5}
    assert {len(request.prompt_ids) for request in last.engine.requests} == {20}
    last.stop()
    more = [request_for(number, prompt_ids=[1] * 20) for number in range(100, 105)]
    check(more, draw(host, pool, more).result(timeout=30))


@pytest.mark.parametrize("merged", [False, True], ids=["slots", "merged"])
def test_across_a_swap_every_answer_is_wholly_of_the_version_it_names(host, pools, workers, root, request_for, merged):
    ends = [workers(delay_s=0.02, merged=merged) for _ in range(2)]
    pool = pools(*ends, max_in_flight=8)
    publish(host, pool, root, 1)
    requests = [request_for(number) for number in range(120)]
    drawing = draw(host, pool, requests)
    time.sleep(0.1)
    two = publish(host, pool, root, 2)
    answers = drawing.result(timeout=30)
    versions = Counter(answer.policy.version for answer in answers)
    assert set(versions) == {1, 2} and pool.events()["ejections"] == 0
    for request, answer in zip(requests, answers, strict=True):
        assert answer.token_ids.tolist() == expected_tokens(request, answer.policy.version)
        assert (answer.policy.version == 2) == (answer.policy.adapter_hash == two)
    after = draw(host, pool, [request_for(500)]).result(timeout=10)
    check([request_for(500)], after, version=2)


def test_a_version_that_was_retired_or_never_came_is_gone(host, pools, workers, root, request_for):
    end = workers(delay_s=0.2)
    pool = pools(end)
    for version in (1, 2):
        publish(host, pool, root, version)
    flying = draw(host, pool, [request_for(0, version=1)])
    time.sleep(0.1)
    host.submit(pool.retire(2)).result(timeout=10)
    for version in (1, 7):
        with pytest.raises(VersionGoneError):
            draw(host, pool, [request_for(1, version=version)]).result(timeout=10)
    with pytest.raises(VersionGoneError):
        flying.result(timeout=10)
    check([request_for(2, version=2)], draw(host, pool, [request_for(2, version=2)]).result(timeout=10), version=2)
    assert pool.events()["ejections"] == 0


def test_a_worker_restarted_on_other_weights_gets_the_version_again_before_any_work(host, pools, workers, root, request_for):
    first, other = workers(), workers()
    pool = pools(first, other)
    publish(host, pool, root, 2)
    first.stop()
    again = workers(PlainEngine("reborn"), port=first.port)
    requests = [request_for(number) for number in range(60)]
    check(requests, draw(host, pool, requests).result(timeout=30), version=2)
    wait_until(lambda: pool.events()["readmissions"] == 1)
    more = [request_for(number) for number in range(100, 160)]
    check(more, draw(host, pool, more).result(timeout=30), version=2)
    assert again.engine.requests and again.engine.served[2] == version_in(root / "v2", 2)


def test_an_adapter_that_no_worker_takes_is_refused_and_nothing_changes(host, pools, workers, root, request_for, tmp_path: Path):
    ends = [workers(), workers()]
    pool = pools(*ends)
    one = publish(host, pool, root, 1)
    cut = root / "cut"
    shutil.copytree(root / "v2", cut)
    (cut / "adapter_model.safetensors").write_bytes((cut / "adapter_model.safetensors").read_bytes()[:-100])
    for folder, adapter_hash in (
        (root / "nowhere", "x"),
        (cut, adapter_hash_of(root / "v2")),
        (cut, adapter_hash_of(cut)),
        (root / "v2", one),
        (tmp_path, "x"),
    ):
        with pytest.raises(DataError):
            host.submit(pool.publish(PolicyVersion(version=2, adapter=folder, adapter_hash=adapter_hash))).result(timeout=30)
    check([request_for(1)], draw(host, pool, [request_for(1)]).result(timeout=10), version=1)
    assert pool.events()["ejections"] == 0 and pool.events()["publish_refusals"] == 10
    shutil.rmtree(cut)


def test_a_worker_whose_engine_dies_again_and_again_ends_and_the_pool_says_so(host, pools, workers, request_for):
    end = workers()
    pool = pools(end, no_worker=1.0)
    supervisor: Any = end.worker.engine

    def stillborn() -> PlainEngine:
        engine = PlainEngine("stillborn")
        engine.dies = EngineLostError("no such device")
        return engine

    supervisor._make = stillborn
    end.engine.dies = EngineLostError("no such device")
    began = time.monotonic()
    with pytest.raises(EngineLostError, match=r"no worker came back within 1 s .*entente serve"):
        draw(host, pool, [request_for(1)]).result(timeout=30)
    assert time.monotonic() - began < 15
    wait_until(lambda: end.ended is not None)
    assert "3 times in a row" in str(end.ended)


def test_with_no_worker_left_requests_end_with_one_sentence_after_the_bound_and_then_at_once(host, pools, workers, request_for):
    end = workers()
    pool = pools(end, no_worker=1.0)
    end.stop()
    began = time.monotonic()
    drawing = draw(host, pool, [request_for(number) for number in range(5)])
    with pytest.raises(EngineLostError, match="no worker came back within 1 s"):
        drawing.result(timeout=30)
    assert time.monotonic() - began > 0.9
    began = time.monotonic()
    with pytest.raises(EngineLostError, match="no worker came back"):
        draw(host, pool, [request_for(9)]).result(timeout=30)
    with pytest.raises(EngineLostError, match="no worker came back"):
        host.submit(pool.publish(PolicyVersion(version=1, adapter=Path("nowhere"), adapter_hash="x"))).result(timeout=30)
    assert time.monotonic() - began < 1.9, "each of the two would wait a second more"
    again = workers(port=end.port)
    wait_until(lambda: pool.events()["readmissions"] == 1)
    check([request_for(3)], draw(host, pool, [request_for(3)]).result(timeout=10))
    assert again.engine.requests


def test_a_refused_request_is_not_sent_elsewhere(host, pools, workers, request_for):
    ends = [workers(), workers()]
    pool = pools(*ends)
    with pytest.raises(EngineError, match="outside the vocabulary"):
        draw(host, pool, [request_for(0, prompt_ids=[10**6])]).result(timeout=10)
    assert pool.events()["retries"] == pool.events()["ejections"] == 0
    assert not any(end.engine.requests for end in ends)


def test_a_worker_that_is_not_there_is_named(pools, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pool_roster, "GONE_AFTER_S", 0.2)
    with pytest.raises((InputError, EngineError), match=r"worker http://127.0.0.1:9 is not ready: nobody listens there"):
        pools("http://127.0.0.1:9")


def test_the_base_is_drawn_by_its_number_though_the_workers_serve_a_newer_version(host, pools, workers, root, request_for):
    pool = pools(workers())
    publish(host, pool, root, 1)
    answer = draw(host, pool, [request_for(1, version=0)]).result(timeout=10)[0]
    assert answer.policy == BASE
