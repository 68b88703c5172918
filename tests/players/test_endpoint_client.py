"""One request to an endpoint: retries, bounds, time limits, refusals, and the key, which goes nowhere else."""

import asyncio
import json
import socket

import pytest

from entente.game.board import Board
from entente.players import endpoint_client as client_module
from entente.players.endpoint import EndpointSettings, read_endpoint
from entente.players.endpoint_client import LOST_AFTER, EndpointClient, Reply
from entente.players.read_answer import read_answer
from entente.telemetry.errors import EngineLostError, InputError
from tests.players.endpoint_server import (
    Behaviour,
    EndpointServer,
    a_page,
    chats,
    completion,
    deep,
    endless,
    half_json,
    hangs_up,
    slow,
)

MESSAGES = [{"role": "user", "content": "hello"}]
QUICK = EndpointSettings()


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch):
    for name, value in {"FIRST_PAUSE_S": 0.001, "TIMEOUT_S": 0.3, "RETRIES": 2}.items():
        monkeypatch.setattr(client_module, name, value)


def asked(player: str, times: int = 1, settings: EndpointSettings = QUICK) -> list[Reply]:
    """Replies to this many requests, one after the other, of one client."""

    async def ask() -> list[Reply]:
        client = EndpointClient(read_endpoint(player), settings)
        try:
            return [await client.ask(MESSAGES) for _ in range(times)]
        finally:
            await client.close()

    return asyncio.run(ask())


def in_turn(*behaviours: Behaviour) -> Behaviour:
    """Each request meets the next behaviour; the last stays."""
    left = list(behaviours)
    return lambda handler, body: (left.pop(0) if len(left) > 1 else left[0])(handler, body)


def refuses(status: int, message: str, **headers: str) -> Behaviour:
    return lambda handler, body: handler.answer({"error": {"message": message}}, status, **headers)


def breaks_off(reason: str) -> Behaviour:
    return lambda handler, body: handler.answer(completion("A PAR - BUR\nA MAR", reason))


def test_a_request_has_the_form_of_the_api_and_its_tokens_are_counted():
    with EndpointServer(lambda handler, body: handler.answer(completion("A PAR H", total_tokens=12))) as server:
        assert asked(server.player) == [Reply(text="A PAR H", tokens=12)]
    (request,) = server.requests
    assert request["path"] == "/v1/chat/completions" and "authorization" not in {name.lower() for name in request["headers"]}
    assert request["body"]["model"] == "some/model:free" and request["body"]["messages"] == MESSAGES


def test_an_answer_that_the_limit_ended_says_so_and_the_limit_is_named_once(caplog):
    caplog.set_level("INFO", "entente")
    with EndpointServer(lambda handler, body: handler.answer(completion("Let me think", "length"))) as server:
        assert [reply.cut_off for reply in asked(server.player, 2)] == [True, True]
    assert caplog.text.count("endpoint.answer_tokens 2048") == 1


def test_a_thought_that_is_too_long_to_keep_leaves_nothing_of_itself():
    thought = "<think>" + "A PAR H\n" * client_module.MAX_TEXT
    texts = iter([thought, thought + "</think>A PAR - BUR"])
    with EndpointServer(lambda handler, body: handler.answer(completion(next(texts)))) as server:
        assert [reply.text for reply in asked(server.player, 2)] == ["", "</think>A PAR - BUR"]


def test_a_long_thought_that_ended_leaves_its_mark_for_a_cut_off_answer():
    text = "<think>" + "A PAR H\n" * client_module.MAX_TEXT + "</think>Here are my orders:\nA PAR - BUR\nI have"
    with EndpointServer(lambda handler, body: handler.answer(completion(text, finish_reason="length"))) as server:
        (reply,) = asked(server.player)
    assert "A PAR - BUR" in read_answer(reply.text, Board.start().legal_orders()["FRANCE"], cut_off=reply.cut_off)[0]


@pytest.mark.parametrize("tokens", [None, -5, "many", 1e9], ids=repr)
def test_tokens_that_nobody_can_believe_are_estimated(tokens):
    with EndpointServer(lambda handler, body: handler.answer(completion("x" * 30, total_tokens=tokens))) as server:
        assert asked(server.player)[0].tokens == 1 + 10


@pytest.mark.parametrize(
    "fault",
    [half_json, endless, hangs_up, slow, deep, refuses(429, "slower"), *map(breaks_off, ("abort", "error"))],
    ids=["half JSON", "endless", "hangs up", "slow", "deep", "429", "abort", "error"],
)
def test_a_fault_is_tried_again(fault: Behaviour):
    with EndpointServer(in_turn(fault, chats)) as server:
        (reply,) = asked(server.player)
        (whole,) = asked(server.player)
    assert reply.text.startswith("I would") and len(server.requests) == 3
    assert reply.tokens > whole.tokens, "the budget counts the prompt of the first try too"


def test_a_request_that_fails_with_all_retries_has_no_answer_and_a_reason_and_the_next_is_asked(caplog):
    caplog.set_level("INFO", "entente")
    with EndpointServer(in_turn(chats, half_json, half_json, half_json, chats)) as server:
        first, none, last = asked(server.player, 3)
    assert first.text and not first.failed and last.text == first.text
    assert not none.text and none.failed and none.failed.isprintable() and none.tokens > 0
    assert "gave no answer in 3 tries" in caplog.text and "default orders" in caplog.text


def test_an_endpoint_that_never_answered_is_lost_at_once():
    with EndpointServer(a_page) as server, pytest.raises(EngineLostError, match=r"in 3 tries: its response is not") as lost:
        asked(server.player)
    assert str(lost.value).isprintable(), "what it sent cannot move a cursor"


def test_one_that_fails_often_in_a_row_is_lost():
    behaviours = [chats] + [half_json] * 3 * (LOST_AFTER - 1)
    with EndpointServer(in_turn(*behaviours, chats)) as server:
        assert [bool(reply.failed) for reply in asked(server.player, LOST_AFTER + 1)] == [False] + [True] * (LOST_AFTER - 1) + [
            False
        ]
    with EndpointServer(in_turn(*behaviours, half_json)) as server, pytest.raises(EngineLostError):
        asked(server.player, LOST_AFTER + 1)


def test_one_that_is_not_there_is_lost_even_if_it_was():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(EngineLostError, match="nothing answers at that address"):
        asked(f"openai:m@http://127.0.0.1:{port}/v1")


def test_another_name_of_the_limit_is_used_from_then_on():
    def new_name(handler, body):
        if "max_tokens" in body:
            handler.answer({"error": {"message": "use max_completion_tokens"}}, 400)
        else:
            chats(handler, body)

    with EndpointServer(new_name) as server:
        assert len(asked(server.player, 2)) == 2
    assert ["max_tokens" in request["body"] for request in server.requests] == [True, False, False]


@pytest.mark.parametrize(
    ("behaviour", "sentence"),
    [
        pytest.param(refuses(404, "no such model"), r"\(404: no such model\): check model and address", id="404"),
        pytest.param(lambda handler, body: handler.answer(b"", 307, Location="http://127.0.0.1:1/"), "leads to", id="redirect"),
    ],
)
def test_a_refusal_is_one_sentence_not_tried_again_and_stops_a_run(behaviour: Behaviour, sentence: str):
    with EndpointServer(behaviour) as server, pytest.raises(InputError, match=sentence):
        asked(server.player)
    assert len(server.requests) <= 2


def test_the_key_goes_to_its_own_host_only_and_into_no_sentence(monkeypatch, caplog):
    caplog.set_level("INFO", "entente")
    echo = refuses(401, "wrong key sk-secret-1")
    with EndpointServer(echo) as server, EndpointServer(chats) as other:
        monkeypatch.setenv(f"ENTENTE_KEY_127_0_0_1_{server.server_port}", "sk-secret-1\n")
        with pytest.raises(InputError, match=rf"set it in ENTENTE_KEY_127_0_0_1_{server.server_port}") as refused:
            asked(server.player)
        server.behaviour = lambda handler, body: handler.answer(completion("A PAR H sk-secret-1"))
        (reply,) = asked(server.player)
        asked(other.player)
    assert server.requests[0]["headers"]["authorization"] == "Bearer sk-secret-1"
    assert "authorization" not in json.dumps(other.requests[0]["headers"]).lower()
    assert "sk-secret" not in str(refused.value) + caplog.text + reply.text


@pytest.mark.parametrize(
    "name",
    [
        "openai:m@http://user:secret-pass@host/v1",
        "openai:m@http://host/v1?key=secret",
        "openai:m,n@http://host/secret",
        "openai:m@http://host/v1\nsecret",
    ],
)
def test_a_name_that_is_none_is_refused_without_being_repeated(name: str):
    with pytest.raises(InputError, match="an endpoint is named 'openai:MODEL@URL'") as refused:
        read_endpoint(name)
    assert "secret" not in str(refused.value)


def test_a_name_says_model_address_and_where_its_key_is():
    found = read_endpoint("openai:@cf/meta/llama-3:free@https://api.example.com:8443/v1/")
    assert (found.model, found.url) == ("@cf/meta/llama-3:free", "https://api.example.com:8443/v1")
    assert found.name == "openai:@cf/meta/llama-3:free@https://api.example.com:8443/v1"
    assert found.key_variable == "ENTENTE_KEY_API_EXAMPLE_COM_8443"
    assert read_endpoint("openai:m@http://[::1]:80").key_variable == "ENTENTE_KEY_1_80"


def test_hosts_that_differ_in_a_hyphen_have_different_keys():
    hosts = ("api.example.com", "api-example.com", "api.example-com", "api--example.com", "api.example.com:80")
    assert len({read_endpoint(f"openai:m@https://{host}/v1").key_variable for host in hosts}) == len(hosts)
