"""Asks one endpoint for one answer over HTTP: time limit, retries, bounds.

Responses are untrusted. The client reads at most `MAX_BODY` bytes and follows no redirects, so the key reaches its own host
only. Text that it prints of an answer contains neither the key nor terminal control characters.
"""

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import aiohttp

from entente.players.endpoint import Endpoint, EndpointSettings
from entente.players.read_answer import without_thoughts
from entente.telemetry.errors import EngineError, EngineLostError, InputError
from entente.telemetry.progress import reporter, shown

MAX_BODY = 1 << 20
MAX_TEXT = 20_000
"""Most characters of an answer to keep: the last ones outside thoughts, because the orders come last."""
TIMEOUT_S = 120.0
"""Timeout of one request: a reasoning model may take a minute."""
RETRIES = 5
"""Retries of a failed request; with their pauses they outlast an outage of half a minute."""
FIRST_PAUSE_S = 1.0
"""Pause before the first retry; each further one is twice as long."""
LONGEST_PAUSE_S = 60.0
LOST_AFTER = 5
"""Consecutive requests that failed with all their retries, after which the endpoint counts as lost."""
_THOUGHT_END = "</think>"
_BROKEN_OFF = ("abort", "error", "network_error", "insufficient_system_resource")
"""Reasons for which servers end an answer halfway, with status 200: vLLM and SGLang, OpenRouter, Z.ai, DeepSeek."""
_BYTES_PER_TOKEN = 3
"""For an estimate where an endpoint does not report its tokens; it rather overestimates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    text: str
    """What the model wrote, at most MAX_TEXT characters; empty if there is no answer."""
    cut_off: bool = False
    failed: str = ""
    tokens: int
    """Tokens of prompt and answer, reported by the endpoint or estimated, with the prompts of tries that failed."""


class _Fault(Exception):
    """One try failed; a retry may succeed."""

    def __init__(self, reason: str, *, gone: bool = False, pause_s: float = 0.0) -> None:
        super().__init__(reason)
        self.gone = gone
        """The endpoint is unreachable or takes no more requests."""
        self.pause_s = pause_s
        """Seconds that the endpoint asks to wait."""


class _Refused(Exception):
    """The endpoint does not understand the request (400 or 422)."""


class EndpointClient:
    def __init__(self, endpoint: Endpoint, settings: EndpointSettings) -> None:
        self.endpoint = endpoint
        self._settings, self._key = settings, endpoint.key
        self._session: aiohttp.ClientSession | None = None
        self._limit = "max_tokens"
        self._has_answered = self._closed = self._was_cut_off = False
        self._failures = 0

    async def ask(self, messages: Sequence[Mapping[str, str]]) -> Reply:
        """After all its retries a failed request returns a reply without text. Raises InputError if the endpoint refuses key,
        model or address, EngineError if it refuses the request; EngineLostError if it is unreachable, never answered, or failed
        `LOST_AFTER` times in a row."""
        tries, wasted = RETRIES + 1, 0
        fault = _Fault("no request was sent")
        for number in range(tries):
            if number:
                await asyncio.sleep(min(LONGEST_PAUSE_S, max(fault.pause_s, FIRST_PAUSE_S * 2 ** (number - 1))))
            try:
                reply = await self._try(messages)
            except _Fault as failure:
                if self._closed:
                    raise EngineLostError(f"{self.endpoint.name} is closed") from failure
                fault, wasted = failure, wasted + _tokens_of(messages)
            else:
                self._has_answered, self._failures = True, 0
                if reply.cut_off and not self._was_cut_off:
                    self._was_cut_off = True
                    reporter().say(
                        f"{self.endpoint.name} reached endpoint.answer_tokens {self._settings.answer_tokens} before an answer "
                        "ended; an unfinished thought counts as no answer: raise the limit"
                    )
                return replace(reply, tokens=reply.tokens + wasted)
        self._failures += 1
        text = f"{self.endpoint.name} gave no answer in {'one try' if tries == 1 else f'{tries} tries'}: {fault}"
        if fault.gone or not self._has_answered or self._failures >= LOST_AFTER:
            cure = "check that it runs, then run the same command again"
            raise EngineLostError(f"{text}; {cure}") from fault
        reporter().say(f"{text}; its units keep their default orders in this phase")
        return Reply(text="", failed=str(fault), tokens=wasted)

    async def close(self) -> None:
        self._closed = True
        if self._session is not None:
            await self._session.close()

    async def _try(self, messages: Sequence[Mapping[str, str]]) -> Reply:
        """One try. If the endpoint rejects the name of the token limit, this and later requests use the other name."""
        while True:
            limit = self._limit
            body = {"model": self.endpoint.model, "messages": messages, "stream": False, limit: self._settings.answer_tokens}
            sent = json.dumps(body).encode()
            try:
                return _read(await self._post(sent), messages, most_tokens=len(sent) + self._settings.answer_tokens)
            except _Refused as refusal:
                if limit != "max_tokens" or "max_completion_tokens" not in str(refusal):
                    raise EngineError(f"{self.endpoint.name} refuses the request: {refusal}") from refusal
                self._limit = "max_completion_tokens"

    async def _post(self, body: bytes) -> bytes:
        """The body of a 200, with the key masked. Raises _Fault if a retry may succeed, _Refused if the endpoint does not
        understand the request, InputError if it refuses key, model or address, which ends a run, EngineError for the rest."""
        if self._closed:
            raise _Fault("it was closed")
        if self._session is None:
            self._session = aiohttp.ClientSession(auto_decompress=False)  # a small compressed body may be a huge one
        headers = {"content-type": "application/json", "accept": "application/json", "accept-encoding": "identity"}
        if self._key:
            headers["authorization"] = f"Bearer {self._key}"
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
        address = f"{self.endpoint.url}/chat/completions"
        try:
            async with self._session.post(
                address, data=body, headers=headers, allow_redirects=False, timeout=timeout
            ) as response:
                status, wait = response.status, response.headers.get("retry-after", "")
                answer = await _bounded(response)
        except TimeoutError as error:
            raise _Fault(f"no answer within {TIMEOUT_S:g} s") from error
        except aiohttp.ClientConnectorError as error:
            raise _Fault(f"nothing answers at that address ({self._clean(str(error))})", gone=True) from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise _Fault(f"the connection failed ({self._clean(str(error)) or type(error).__name__})") from error
        if self._key:
            answer = answer.replace(self._key.encode(), b"(key)")
        if status == 200:
            return answer
        reason = f"{status}: {_message(answer)}"
        if status in (400, 422):
            raise _Refused(reason)
        if status == 429 or status >= 500 or status in (408, 409, 425):
            raise _Fault(reason, gone=status == 429, pause_s=_seconds(wait))
        if status in (401, 403):
            raise InputError(f"{self.endpoint.name} refuses the key ({reason}): set it in {self.endpoint.key_variable}")
        leads = 300 <= status < 400
        cure = "name the address that it leads to" if leads else "check model and address"
        kind = InputError if leads or status == 404 else EngineError
        raise kind(f"{self.endpoint.name} rejects the request ({reason}): {cure}")

    def _clean(self, text: str) -> str:
        return _short(text.replace(self._key, "(key)") if self._key else text)


async def _bounded(response: aiohttp.ClientResponse) -> bytes:
    body = bytearray()
    async for part in response.content.iter_any():
        body += part
        if len(body) > MAX_BODY:
            raise _Fault(f"its answer has more than {MAX_BODY} bytes")
    return bytes(body)


def _read(body: bytes, messages: Sequence[Mapping[str, str]], most_tokens: int) -> Reply:
    """The reply in the body of a 200. A reported count above `most_tokens` is impossible, so it is ignored."""
    try:
        completion = json.loads(body)
        choice = completion["choices"][0]
        content = choice["message"]["content"]
        if isinstance(content, list):  # text in parts
            content = "".join(part["text"] for part in content if part.get("type") == "text")
        if not isinstance(content, str | None):
            raise TypeError(type(content).__name__)
        reason = choice.get("finish_reason")
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError) as error:
        raise _Fault(f"its response is not a chat completion: {_short(body[:200].decode(errors='replace'))}") from error
    if reason in _BROKEN_OFF:
        raise _Fault(f"it broke off its answer ({reason})")
    usage = completion.get("usage")
    tokens = usage.get("total_tokens") if isinstance(usage, dict) else None
    if not (type(tokens) is int and 0 < tokens <= most_tokens):
        tokens = _tokens_of(messages) + len((content or "").encode(errors="replace")) // _BYTES_PER_TOKEN
    text = (content or "").encode(errors="replace").decode()  # half a character cannot be stored
    kept = text if len(text) <= MAX_TEXT else _end_of(text)
    return Reply(text=kept, cut_off=reason == "length", tokens=tokens)


def _end_of(text: str) -> str:
    """Its last characters outside thoughts, after the mark of a thought that ended: a cut-off answer may count because of it."""
    outside = without_thoughts(text)
    mark = _THOUGHT_END if 0 < len(outside) < len(text) else ""
    return mark + outside[-MAX_TEXT + len(mark) :]


def _message(body: bytes) -> str:
    try:
        error = json.loads(body)["error"]
        return _short(str(error["message"] if isinstance(error, dict) else error))
    except (ValueError, KeyError, IndexError, TypeError, RecursionError):
        return _short(body[:200].decode(errors="replace"))


def _short(text: str) -> str:
    return shown(" ".join(text[:1000].split()))[:200]


def _seconds(header: str) -> float:
    return min(LONGEST_PAUSE_S, float(header)) if header.isascii() and header.isdigit() and len(header) < 6 else 0.0


def _tokens_of(messages: Sequence[Mapping[str, str]]) -> int:
    return sum(len(message["content"]) for message in messages) // _BYTES_PER_TOKEN
