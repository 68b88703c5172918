"""The orders API with the official client: what is answered, what is refused and how, limits, and clients that leave."""

import asyncio
import http.client
import json
import math
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import openai
import pytest

from entente.decoding.codec import Codec
from entente.game.board import Board
from entente.game.prompts import PromptSettings, board_text, power_text
from entente.game.recorded import as_recorded
from entente.players.policy import Tokens
from entente.records.rows import GenerationRequest
from entente.telemetry.errors import EngineError, EngineLostError
from tests.instant_engine import UniformEngine
from tests.live_games.api_here import MODEL, PUBLISHED, ApiHere
from tests.waiting import wait_until

START = json.loads(as_recorded("start", [], Board.start()))
STATE = START["phases"][0]["state"]


class Engine(UniformEngine):
    """One that can be held up, made to fail, and that counts what is in it."""

    def __init__(self) -> None:
        super().__init__()
        self.delay_s = 0.0
        self.fails_with: Exception | None = None
        self.running = self.cancelled = 0

    async def generate(self, request: GenerationRequest) -> Any:
        self.running += 1
        try:
            await asyncio.sleep(self.delay_s)
            if self.fails_with is not None:
                raise self.fails_with
            return await super().generate(request)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1


@pytest.fixture(scope="module")
def tokens() -> Tokens:
    """Those of the published model, whose weights nobody asks for here."""
    return Tokens(Codec(PUBLISHED))


@pytest.fixture(scope="module")
def api(tokens: Tokens) -> Iterator[ApiHere]:
    served = ApiHere(Engine(), tokens)
    yield served
    served.stop()


@pytest.fixture
def engine(api: ApiHere) -> Iterator[Engine]:
    """The engine behind the server, as new afterwards."""
    engine = api.policy.engine
    assert isinstance(engine, Engine)
    yield engine
    engine.delay_s, engine.fails_with, engine.cancelled = 0.0, None, 0
    wait_until(lambda: not api.samples.in_flight and not engine.running)


@pytest.fixture
def client(api: ApiHere) -> Iterator[Any]:
    with api.client() as client:
        yield client


def france(**more: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": json.dumps({"power": "France", "state": STATE} | more)}]


def test_models_are_listed_and_one_is_found_by_its_name(client):
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).owned_by == "entente"
    with pytest.raises(openai.NotFoundError) as refused:
        client.models.retrieve("gpt-4")
    assert refused.value.code == "model_not_found" and refused.value.param == "model"


def test_an_answer_is_a_legal_order_set_one_order_a_line(client):
    answer = client.chat.completions.create(model=MODEL, messages=france(), temperature=0.5, user="me", max_tokens=500)
    (choice,) = answer.choices
    assert choice.finish_reason == "stop" and choice.logprobs is None and answer.object == "chat.completion"
    assert Board.start().legal_orders()["FRANCE"].admits(choice.message.content.split("\n"))
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens > 100


@pytest.mark.parametrize("own_line", ["last", "in_place"])
def test_state_game_and_prompt_ask_the_same(client, engine, own_line):
    board, form = Board.start(), PromptSettings(own_line=own_line)
    legal = board.legal_orders()["FRANCE"]
    prompt = board_text(board, "FRANCE", form) + power_text(legal, board, form)
    contents = [json.dumps({"power": "FRANCE", "state": STATE}), json.dumps({"power": "FRANCE", "game": START}), prompt]
    parts = [*contents, [{"type": "text", "text": prompt}]]
    before = [{"role": "system", "content": "You are a player."}, {"role": "assistant", "content": "A PAR H"}]
    answers = [
        client.chat.completions.create(model=MODEL, messages=[*before, {"role": "user", "content": content}], seed=7)
        for content in parts
    ]
    assert len({answer.choices[0].message.content for answer in answers}) == 1
    assert len({tuple(request.prompt_ids) for request in engine.requests[-4:]}) == 1


def test_a_seed_repeats_an_answer_and_its_alternatives_differ(client):
    def contents(**how: Any) -> list[str]:
        answer = client.chat.completions.create(model=MODEL, messages=france(), n=8, **how)
        assert [choice.index for choice in answer.choices] == list(range(8)) and answer.system_fingerprint == "0123"
        return [choice.message.content for choice in answer.choices]

    assert contents(seed=1) == contents(seed=1) != contents(seed=2) and len(set(contents(seed=1))) > 4
    assert contents() != contents()


def test_the_tokens_logprobs_add_up_and_spell_the_content(client, tokens: Tokens):
    answer = client.chat.completions.create(model=MODEL, messages=france(), logprobs=True, n=3)
    for choice in answer.choices:
        orders, entries = choice.message.content.split("\n"), choice.logprobs.content
        assert b"".join(bytes(entry.bytes) for entry in entries).decode() == choice.message.content
        legal = Board.start().legal_orders()["FRANCE"]
        _, offsets = tokens.tables.table(legal).legal_sets(tokens.tables.spell(orders, legal))
        uniform = -sum(math.log(size) for size in np.diff(offsets))
        assert sum(entry.logprob for entry in entries) == pytest.approx(uniform, abs=1e-4)
        assert all(entry.top_logprobs == [] for entry in entries)


PROMPT = [{"role": "user", "content": board_text(Board.start(), "", PromptSettings(own_line="in_place")) + "FRANCE"}]


@pytest.mark.parametrize(
    ("change", "status", "param", "said"),
    [
        ({"model": "gpt-4"}, 404, "model", "there is no model 'gpt-4' here: this server has 'mine:v3'"),
        ({"messages": [{"role": "user", "content": "hello"}]}, 400, "messages", "has no position"),
        ({"messages": [{"role": "user", "content": '{"power": ' + "[" * 100_000}]}, 400, "messages", "but is not one"),
        ({"messages": france(power="NARNIA")}, 400, "messages", "there is no power 'NARNIA'"),
        ({"messages": france(orders={"GERMANY": ["A MUN H"]})}, 400, "messages", "the message has the key 'orders'"),
        (
            {"messages": france(state={**STATE, "units": {**STATE["units"], "FRANCE": []}})},
            400,
            "messages",
            "FRANCE has nothing to order in S1901M",
        ),
        ({"n": 1000}, 400, "n", "'n' cannot be read"),
        ({"max_completion_tokens": 5}, 400, "max_completion_tokens", "tokens of FRANCE's longest order set"),
        ({"stop": ["\n"]}, 400, "stop", "'stop' cannot be honoured"),
        ({"stop": "none"}, 400, "stop", "'stop' cannot be honoured"),
        ({"top_p": 0}, 400, "top_p", "'top_p' cannot be honoured"),
        ({"tool_choice": "required"}, 400, "tool_choice", "'tool_choice' cannot be honoured"),
        ({"stream": True}, 400, "stream", "'stream' cannot be honoured"),
        ({"tools": [{"type": "function"}]}, 400, "tools", "'tools' cannot be honoured"),
        ({"extra_body": {"best": 1}}, 400, "best", "'best' cannot be honoured"),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, dict) else None,
)
def test_what_cannot_be_answered_is_refused_by_name(client, engine, change: dict[str, Any], status: int, param: str, said: str):
    with pytest.raises(openai.APIStatusError) as refused:
        client.chat.completions.create(**{"model": MODEL, "messages": france(), **change})
    error = refused.value
    assert (error.status_code, error.param, error.type) == (status, param, "invalid_request_error")
    text = error.body["message"]
    assert said in text and "\n" not in text and len(text) < 500 and error.code
    assert not engine.running


@pytest.mark.parametrize(
    "harmless",
    [
        {"top_p": 1, "stop": None, "frequency_penalty": 0.0, "response_format": {"type": "text"}, "tools": []},
        {"user": "me", "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "tool_choice": "auto"},
    ],
    ids=str,
)
def test_what_every_client_sends_or_asks_nothing_is_accepted(client, harmless: dict[str, Any]):
    assert client.chat.completions.create(model=MODEL, messages=PROMPT, **harmless).choices[0].message.content


def knock(port: int, path: str = "/v1/models", method: str = "GET", body: bytes | None = None, **headers: str) -> Any:
    """Status, headers and the error of a plain request."""
    line = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    line.request(method, path, body, headers)
    answer = line.getresponse()
    content = answer.read()
    line.close()
    return answer.status, answer.headers, json.loads(content).get("error", {})


@pytest.mark.parametrize(
    ("headers", "status", "code"),
    [
        ({"Host": "evil.example"}, 403, "foreign_host"),
        ({"Origin": "http://evil.example"}, 403, "foreign_origin"),
        ({}, 401, "invalid_api_key"),
    ],
    ids=str,
)
def test_other_hosts_pages_and_keys_are_refused_at_every_address(tokens, headers: dict[str, str], status: int, code: str):
    served = ApiHere(Engine(), tokens, key="the-key")
    try:
        for path, method, body in (
            ("/v1/models", "GET", None),
            ("/health", "GET", None),
            ("/v1/chat/completions", "POST", b"{}"),
        ):
            found, _, error = knock(served.port, path, method, body, **headers)
            assert (found, error["code"]) == (status, code) and "the-key" not in error["message"]
        with served.client(api_key="the-key") as client:
            assert client.models.list().data
    finally:
        served.stop()


def test_elsewhere_than_on_loopback_no_page_is_a_client_and_the_host_is_the_networks_affair(tokens):
    served = ApiHere(Engine(), tokens, key="the-key", own=False)
    try:
        right: dict[str, Any] = {"Host": "gpu.internal:8100", "Authorization": "Bearer the-key"}
        assert knock(served.port, **right)[0] == 200
        assert knock(served.port, Origin="http://gpu.internal:8100", **right)[2]["code"] == "foreign_origin"
    finally:
        served.stop()


@pytest.mark.parametrize(
    ("path", "method", "body", "headers", "status", "code"),
    [
        ("/v1/chat/completions", "POST", None, {"Content-Length": "99999999"}, 413, "request_too_large"),
        ("/v1/chat/completions", "POST", None, {"Transfer-Encoding": "chunked"}, 413, "request_too_large"),
        ("/v1/chat/completions", "POST", b'{"a": ' + b"[" * 100_000, {}, 400, "invalid_value"),
        ("/v1/completions", "POST", b"{}", {}, 404, "unknown_url"),
    ],
)
def test_what_is_no_request_is_refused_in_the_same_form(api, path, method, body, headers, status, code):
    found, _, error = knock(api.port, path, method, body, **headers)
    assert (found, error["code"], error["type"]) == (status, code, "invalid_request_error") and error["message"]


def test_more_draws_than_the_limit_are_told_when_to_try_again(tokens):
    engine = Engine()
    engine.delay_s = 30.0
    served = ApiHere(engine, tokens, most=4)
    try:
        body = json.dumps({"model": MODEL, "messages": france(), "n": 3}).encode()
        line = http.client.HTTPConnection("127.0.0.1", served.port, timeout=30)
        line.request("POST", "/v1/chat/completions", body)
        wait_until(lambda: engine.running == 3)
        status, headers, error = knock(served.port, "/v1/chat/completions", "POST", body)
        assert (status, error["type"], error["code"]) == (429, "rate_limit_error", "rate_limit_exceeded")
        assert int(headers["Retry-After"]) >= 1 and served.samples.in_flight == 3
        line.close()
        wait_until(lambda: engine.cancelled == 3 and not served.samples.in_flight)
        engine.delay_s = 0.0
        assert knock(served.port, "/v1/chat/completions", "POST", body)[0] == 200
    finally:
        served.stop()


def test_a_client_that_leaves_cancels_its_draws(api, engine):
    engine.delay_s = 30.0
    body = json.dumps({"model": MODEL, "messages": france(), "n": 5}).encode()
    line = http.client.HTTPConnection("127.0.0.1", api.port, timeout=30)
    line.request("POST", "/v1/chat/completions", body)
    wait_until(lambda: engine.running == 5)
    line.close()
    wait_until(lambda: engine.cancelled == 5 and not api.samples.in_flight)


def test_a_client_that_leaves_within_its_request_is_no_defect(api, caplog):
    line = http.client.HTTPConnection("127.0.0.1", api.port, timeout=30)
    line.request("POST", "/v1/chat/completions", b"half", {"Content-Length": "1000"})
    line.close()
    assert knock(api.port)[0] == 200 and caplog.text == ""


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (EngineLostError("the engine is lost"), 503, "server_error"),
        (EngineError("it needs 2000 tokens"), 400, "invalid_request_error"),
        (RuntimeError("a defect at /somewhere"), 500, "server_error"),
    ],
    ids=["lost", "refused", "defect"],
)
def test_a_draw_that_fails_is_told_under_its_status(client, engine, error: Exception, status: int, kind: str):
    engine.fails_with = error
    with pytest.raises(openai.APIStatusError) as refused:
        client.chat.completions.create(model=MODEL, messages=france(), n=2)
    assert (refused.value.status_code, refused.value.type) == (status, kind) and "somewhere" not in str(refused.value)
    engine.fails_with = None
    assert client.chat.completions.create(model=MODEL, messages=france()).choices


def test_the_program_of_the_page_gets_orders_for_its_game(client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch):
    page = (PUBLISHED.parents[1] / "docs" / "play.md").read_text()
    (program,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    monkeypatch.setattr(openai, "OpenAI", lambda **how: client)
    names: dict[str, Any] = {}
    exec(program.replace("models/whole-192", MODEL), names)
    assert len(names["game"].get_orders("FRANCE")) == 3 and len(names["answer"].choices) == 3
