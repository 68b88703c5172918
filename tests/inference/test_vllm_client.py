"""vLLM servers fail in every way that could be thought of; no decision is lost, doubled or recorded under the wrong version.

The servers are doubles with a torch engine (`vllm_double.py`). The contract itself is in test_contract.py, a run against real
servers in test_vllm_servers.py.
"""

import asyncio
import json
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from entente.decoding.legal_table import END, LegalTable
from entente.game.board import Board
from entente.inference import vllm_client
from entente.inference.engine import EngineStats
from entente.inference.settings import InferenceSettings
from entente.inference.vllm_client import VllmClient
from entente.inference.vllm_server import ClientTimes
from entente.inference.vllm_wire import ROUNDED, forced_prefix, probe_request, read_answer, read_counter, same_weights
from entente.records.policy_version import BASE, version_in
from entente.records.rows import Generation, GenerationRequest
from entente.telemetry.errors import DataError, EngineError, EngineLostError, InputError, VersionGoneError
from tests.inference.vllm_double import LIES, VllmDouble, answer_of, ids_in_text, illegal_path, probability_one
from tests.waiting import wait_until

FAULTS = ("status 500", "silent", "half a body", "closes")


@pytest.fixture
def servers(host, model: Path) -> Iterator[Callable[..., VllmDouble]]:
    """Start servers: `servers(delay_s=0.1)`; they stop with the test."""
    started: list[VllmDouble] = []

    def start(*, folder: Path = model, keepalive_s: float = 5.0, **fields: Any) -> VllmDouble:
        server = VllmDouble(folder, **{name: fields.pop(name) for name in ("key", "root") if name in fields})
        for name, value in fields.items():
            setattr(server, name, value)
        host.submit(server.start(keepalive_s=keepalive_s)).result(timeout=60)
        started.append(server)
        return server

    yield start
    for server in started:
        host.submit(server.close()).result(timeout=20)


@pytest.fixture
def clients(host, model: Path) -> Iterator[Callable[..., VllmClient]]:
    """Start clients: `clients(server, server, no_server=1.0)`; they close with the test."""
    opened: list[VllmClient] = []

    def start(*ends: VllmDouble | str, key: str | None = None, **given: Any) -> VllmClient:
        urls = tuple(end if isinstance(end, str) else end.url for end in ends)
        times = {"request": 10.0, "look": 0.2, "heartbeat": 2.0, "no_server": 5.0}
        times |= {name: given.pop(name) for name in list(given) if name in times}
        settings = InferenceSettings(**{"max_model_length": 512, **given})
        opened.append(VllmClient(urls, settings, model, key, times=ClientTimes(**times)))
        host.submit(opened[-1].start()).result(timeout=60)
        return opened[-1]

    yield start
    for client in opened:
        host.submit(client.close()).result(timeout=20)


@pytest.fixture(scope="module")
def request_for(tokens) -> Callable[..., GenerationRequest]:
    """A request of its own number: `request_for(3, snapshot_id='a')`."""
    legal = sorted(Board.start().legal_orders().items())

    def make(number: int, **fields: Any) -> GenerationRequest:
        table = tokens.tables.table(legal[number % len(legal)][1])
        plain = GenerationRequest(
            request_id=f"r/{number}", prompt_ids=[1, 2, 3], table=table, seed=1000 + number, snapshot_id=f"s{number}"
        )
        return replace(plain, **fields)

    return make


@pytest.fixture(scope="module")
def adapters(write_adapter, tmp_path_factory) -> list[Path]:
    root = tmp_path_factory.mktemp("adapters")
    return [write_adapter(root / f"a{seed}", seed=seed, scale=0.3) for seed in (1, 2, 3)]


@pytest.fixture
def expected(host, contract_torch) -> Callable[[Sequence[GenerationRequest]], list[list[int]]]:
    """What the base model draws, by a torch engine that is asked directly."""

    async def all_at_once(requests):
        asked = [replace(each, request_id=f"{each.request_id}/{time.monotonic()}", version=0) for each in requests]
        return [(await contract_torch.engine.generate(each)).token_ids.tolist() for each in asked]

    return lambda requests: host.submit(all_at_once(requests)).result(timeout=60)


def sample(host, client: VllmClient, requests: Sequence[GenerationRequest]) -> Future[list[Generation]]:
    async def all_at_once() -> list[Generation]:
        return await asyncio.gather(*(client.generate(request) for request in requests))

    return host.submit(all_at_once())


def publish(host, client: VllmClient, adapter: Path, version: int) -> None:
    host.submit(client.publish(version_in(adapter, version))).result(timeout=30)


def ids(answers: Sequence[Generation]) -> list[list[int]]:
    return [answer.token_ids.tolist() for answer in answers]


@pytest.mark.parametrize("lie", ["", *LIES])
def test_only_an_answer_that_can_be_true_becomes_a_row(request_for, uniform_engine, lie: str):
    request = request_for(0)
    sampled = asyncio.run(uniform_engine().generate(request))
    answer = answer_of(sampled, len(forced_prefix(request.table)[0]), "the-base")
    LIES.get(lie, ids_in_text)(answer)
    with pytest.raises(DataError) if lie else nullcontext():
        found = read_answer(json.dumps(answer).encode(), request, BASE, model="the-base", worker="", took_ms=0.0)
        assert found.token_ids.tolist() == sampled.token_ids.tolist() and np.allclose(found.logprobs, sampled.logprobs)


@pytest.mark.in_turn
@pytest.mark.parametrize("fault", ["illegal path", *FAULTS])
def test_a_lie_or_a_fault_becomes_no_row_and_its_server_gets_no_work_until_it_is_well(
    host, servers, clients, request_for, expected, fault
):
    bad, good = servers(), servers()
    client = clients(bad, good, request=6.0 if fault == "silent" else 30.0)  # a busy machine, too, answers within it
    bad.fault, bad.spoil = "" if fault in LIES else fault, LIES.get(fault)
    requests = [request_for(number) for number in range(40)]  # enough that the bad server is asked three times in any case
    answers = sample(host, client, requests).result(timeout=60)
    assert ids(answers) == expected(requests) and {answer.worker for answer in answers} == {good.name}
    events = client.events()
    assert bad.faults and events["ejections"] >= 1 and events["retries"] >= 1
    assert bool(events["rejected_answers"]) == (fault in LIES)
    bad.fault, bad.spoil = "", None
    wait_until(lambda: client.events()["readmissions"] >= 1)
    later = count(100)

    def samples_again() -> bool:  # on a busy machine it may be too slow for a while
        sample(host, client, [request_for(next(later)) for _ in range(16)]).result(timeout=60)
        return any(seed >= 1100 for _, seed in bad.sampled)

    wait_until(samples_again, 60)


@pytest.mark.parametrize("lie", [illegal_path, probability_one])
def test_a_server_that_does_not_draw_under_our_mask_is_refused_at_the_start(servers, clients, lie):
    with pytest.raises(InputError, match=r"(rejected: |every log-probability is 0).*processed_logits"):
        clients(servers(spoil=lie))


def test_base_weights_under_an_adapters_name_are_noticed_before_any_request(host, servers, clients, request_for, adapters, said):
    liar, good = servers(serves_base_only=True), servers()
    alone, both = clients(liar), clients(liar, good, look=60.0)
    with pytest.raises(DataError, match="draws by the same weights under the adapter's name 'v1-"):
        publish(host, alone, adapters[0], 1)
    assert sample(host, alone, [request_for(0)]).result(timeout=20)[0].policy.version == 0
    publish(host, both, adapters[0], 1)
    answers = sample(host, both, [request_for(number) for number in range(8)]).result(timeout=60)
    assert {(answer.policy.version, answer.worker) for answer in answers} == {(1, good.name)}
    assert both.events()["publish_refusals"] == both.events()["ejections"] == 1
    assert any("gets no more work: it refused an adapter that others accepted" in line for line in said)


def test_a_server_that_draws_the_base_by_an_adapter_is_refused(host, servers, clients, request_for, adapters):
    """As vLLM 0.32 for CPUs does once all of its slots are in use."""
    good = servers()
    alone, both = clients(servers(mixes_slots=True)), clients(servers(mixes_slots=True), good, look=60.0)
    with pytest.raises(DataError, match=r"draws by the same weights .* with our processor"):
        publish(host, alone, adapters[0], 1)
    publish(host, both, adapters[0], 1)
    answers = sample(host, both, [request_for(number, version=number % 2) for number in range(8)]).result(timeout=60)
    assert {answer.worker for answer in answers} == {good.name}


def test_an_adapter_of_zeros_draws_as_the_base_does_and_is_served(host, servers, clients, request_for, make_adapter):
    client = clients(servers())
    publish(host, client, make_adapter(seed=1, scale=0.0), 1)
    assert sample(host, client, [request_for(0)]).result(timeout=20)[0].policy.version == 1


def test_a_server_with_other_base_weights_is_refused(host, servers, clients, tmp_path: Path, model: Path):
    """Its folder is elsewhere, so only its probe shows it."""
    from safetensors.torch import load_file, save_file

    other = tmp_path / "other"
    other.mkdir()
    for file in model.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    weights = {name: -tensor for name, tensor in load_file(other / "model.safetensors").items()}
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match="has other weights under version 0"):
        clients(servers(), servers(folder=other, root="/elsewhere"))
    (other / "config.json").write_text((other / "config.json").read_text() + " ")
    with pytest.raises(InputError, match="is another model than"):
        clients(servers(folder=other))


@pytest.mark.parametrize(("probability", "same"), [(0.115, True), (0.6, False)], ids=["rounding", "other weights"])
def test_servers_in_16_bits_may_draw_another_first_token_only_near_its_boundary(probability: float, same: bool):
    """The random number is 0.883, and the answers take the second and the last of three ids: nothing before them is compared."""
    probe = probe_request(7, 0)
    one, other = (
        Generation(
            token_ids=np.array([token, *[0] * 10, 7], np.int32),
            logprobs=np.array([np.log(share), *[0.0] * 11], np.float32),
            policy=BASE,
            worker="",
        )
        for token, share in ((1, 0.4), (2, probability))
    )
    assert same_weights(one, other, ROUNDED, probe) is same


def test_a_wrong_key_a_shorter_limit_and_nobody_there_are_named(servers, clients, monkeypatch):
    monkeypatch.setattr(vllm_client, "GONE_AFTER_S", 0.2)
    with pytest.raises(InputError, match="ENTENTE_KEY"):
        clients(servers(key="right"), key="wrong")
    with pytest.raises(InputError, match=r"takes 512 tokens but .* is 1024: .*`entente serve` with --max-model-length 1024"):
        clients(servers(), max_model_length=1024)
    with pytest.raises(InputError, match=r"vLLM server http://127.0.0.1:9 is not ready: nobody listens there"):
        clients("http://127.0.0.1:9")


def test_a_kept_connection_that_the_server_closed_costs_no_failure(host, servers, clients, request_for):
    server = servers(keepalive_s=0.01)
    client = clients(server, look=60.0)
    for number in range(5):
        sample(host, client, [request_for(number)]).result(timeout=20)
        time.sleep(0.05)
    assert not any(client.events().values())


def test_a_server_that_was_started_again_gets_the_versions_again_before_any_work(host, servers, clients, request_for, adapters):
    first, other = servers(), servers()
    client = clients(first, other)
    for version in (1, 2):
        publish(host, client, adapters[version], version)
    host.submit(first.stop()).result(timeout=20)
    requests = [request_for(number, version=1 + number % 2) for number in range(16)]
    answers = sample(host, client, requests).result(timeout=60)
    assert [answer.policy.version for answer in answers] == [request.version for request in requests]
    host.submit(first.start()).result(timeout=20)
    wait_until(lambda: client.events()["readmissions"] == 1)
    assert {name[:3] for name in first.adapters} == {"v1-", "v2-"}
    again = sample(host, client, requests).result(timeout=60)
    assert ids(again) == ids(answers) and first.name in {answer.worker for answer in again}


def test_an_adapter_that_somebody_unloaded_is_loaded_again(host, servers, clients, request_for, adapters):
    server = servers()
    client = clients(server)
    publish(host, client, adapters[0], 1)
    server.adapters.clear()
    assert sample(host, client, [request_for(0)]).result(timeout=20)[0].policy.version == 1
    assert client.events()["ejections"] == 1 and len(server.adapters) == 1


def test_a_retired_version_is_unloaded_once_nothing_is_in_flight_and_names_never_pile_up(
    host, servers, clients, request_for, adapters
):
    server = servers()
    client = clients(server)
    for version in range(1, 7):
        publish(host, client, adapters[version % 3], version)
        host.submit(client.retire(version - 1)).result(timeout=20)
        assert len(server.adapters) <= 2
    assert [name.partition("-")[0] for name in server.unloaded] == ["v1", "v2", "v3", "v4"]
    server.delay_s = 0.5
    flying = sample(host, client, [request_for(0, version=5)])
    wait_until(lambda: server.in_flight)
    host.submit(client.retire(6)).result(timeout=20)
    with pytest.raises(VersionGoneError):
        flying.result(timeout=20)
    assert server.in_flight_at_unload == 0 and next(iter(server.adapters)).startswith("v6-")


def test_a_position_stays_at_its_server_and_load_spreads_over_positions(host, servers, clients, request_for):
    """48 positions: the odds that two random ports leave one server fewer than three of them are 1 in 10^11."""
    ends = [servers(), servers()]
    client = clients(*ends)
    for start in range(0, 96, 16):
        batch = [request_for(number, snapshot_id=f"s{number % 48}") for number in range(start, start + 16)]
        sample(host, client, batch).result(timeout=60)
    homes = [{(seed - 1000) % 48 for _, seed in end.sampled if seed >= 1000} for end in ends]
    assert not homes[0] & homes[1] and min(map(len, homes)) >= 3


def test_with_no_server_left_requests_end_with_one_sentence_and_later_ones_at_once(host, servers, clients, request_for):
    server = servers()
    client = clients(server, no_server=1.0)
    host.submit(server.stop()).result(timeout=20)
    with pytest.raises(EngineLostError, match=r"no vLLM server came back within 1 s .*nobody listens"):
        sample(host, client, [request_for(number) for number in range(5)]).result(timeout=30)
    with pytest.raises(EngineLostError, match="no vLLM server came back"):
        sample(host, client, [request_for(9)]).result(timeout=1)
    host.submit(server.start()).result(timeout=20)
    wait_until(lambda: client.events()["readmissions"] == 1)
    assert len(sample(host, client, [request_for(3)]).result(timeout=20)) == 1


def test_a_request_that_always_fails_is_given_up_with_a_sentence(host, servers, clients, request_for):
    server = servers()
    client = clients(server, heartbeat=0.2)
    server.spoil = illegal_path
    with pytest.raises(EngineLostError, match=r"request 'r/1' failed 4 times; the last, http.*not legal at node|came back"):
        sample(host, client, [request_for(1)]).result(timeout=60)


def test_a_refused_request_is_not_sent_elsewhere(host, servers, clients, request_for):
    ends = [servers(), servers()]
    client = clients(*ends)
    table = replace(request_for(0).table, longest=3, _bytes=None)
    with pytest.raises(EngineError, match="longest completion of 3") as refusal:
        sample(host, client, [request_for(0, table=table)]).result(timeout=20)
    assert not isinstance(refusal.value, EngineLostError) and not any(client.events().values())


def test_preemptions_are_counted_from_the_first_page_on(host, servers, clients):
    server = servers(preemptions=5)
    client = clients(server)
    server.preemptions = 7
    assert host.submit(client.stats()).result(timeout=10).preemptions == 2
    page = b'# TYPE vllm:a counter\nvllm:a{engine="0"} 2.0\nvllm:a{engine="1"} 3.0\nvllm:ab{x="a b"} 0.5\nother 7\n'
    assert read_counter(page, "vllm:a") == 5.0


def test_sampled_tokens_are_counted_as_forward_passes_are_for_all_clients_of_a_server(host, servers, clients, request_for):
    """Else the requests decoded together, their ratio, would be too few for each run that shares a server."""
    server = servers()
    here, there = clients(server), clients(server)
    before = host.submit(here.stats()).result(timeout=10)
    answers = sample(host, there, [request_for(number) for number in range(4)]).result(timeout=20)
    after = host.submit(here.stats()).result(timeout=10)
    assert after.engine_steps > before.engine_steps and after.completion_tokens == 0
    passes = after.sampled_tokens - before.sampled_tokens
    assert len(answers) < passes <= sum(len(answer.token_ids) for answer in answers)


def test_a_completion_without_a_choice_needs_no_server(tmp_path: Path):
    (tmp_path / "config.json").write_text('{"vocab_size": 100}')
    client = VllmClient((), InferenceSettings(), tmp_path, None)
    offsets, ids, targets = (np.array(values, np.int32) for values in ([0, 1, 2], [7, 9], [1, END]))
    table = LegalTable(offsets=offsets, token_ids=ids, next_nodes=targets, longest=2)

    async def answer() -> tuple[Generation, EngineStats]:
        request = GenerationRequest(request_id="forced", prompt_ids=[1, 2], table=table, seed=0)
        return await asyncio.wait_for(client.generate(request), 10), await client.stats()

    generation, stats = asyncio.run(answer())
    assert (generation.token_ids.tolist(), generation.logprobs.tolist(), generation.policy) == ([7, 9], [0, 0], BASE)
    assert (stats.requests, stats.completion_tokens, stats.forced_tokens, stats.sampled_tokens, stats.running) == (1, 2, 2, 0, 0)
