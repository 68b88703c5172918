"""Answers in the form of the OpenAI API: whole, and as the events of a stream. Content is one order a line.

Log-probabilities are those of the tokens that the model drew for the orders, under the mask and at the request's temperature. The
last token ends the answer; it has no bytes, because the content does not show it.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rollouts.deciders import DrawnDecision, Tokens

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Heading:
    """What all objects of one answer begin with."""

    id: str
    created: int
    """Seconds since 1970."""
    model: str
    fingerprint: str
    """Of the weights: with equal fingerprint, seed and position the same orders are drawn."""

    def _object(self, kind: str, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        head = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        return {**head, "choices": choices, "system_fingerprint": self.fingerprint, **more}

    def whole(self, choices: Sequence[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
        """The object of an answer that is sent at once; see `choice_of`."""
        return self._object("chat.completion", list(choices), usage=usage)

    def chunk(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        """One event of a stream."""
        return event(self._object("chat.completion.chunk", choices, **more))


def event(content: dict[str, Any]) -> bytes:
    """A server-sent event."""
    return b"data: " + json.dumps(content, separators=(",", ":")).encode() + b"\n\n"


def choice_of(drawn: DrawnDecision, index: int, tokens: Tokens, *, logprobs: bool) -> dict[str, Any]:
    """One choice of a whole answer. A thought before the orders is `reasoning_content`, as other servers name it."""
    message: dict[str, Any] = {"role": "assistant", "content": "\n".join(drawn.orders), "refusal": None}
    if tokens.thinking is not None:
        message["reasoning_content"] = _thought(drawn, tokens)
    found = {"content": _token_logprobs(drawn, tokens), "refusal": None} if logprobs else None
    return {"index": index, "message": message, "logprobs": found, "finish_reason": "stop"}


def chunks_of(heading: Heading, drawn: DrawnDecision, index: int, tokens: Tokens, *, logprobs: bool, **more: Any) -> list[bytes]:
    """The events of one choice: its role, each order with its tokens, and its end."""

    def chunk(delta: dict[str, Any], entries: list[dict[str, Any]] | None = None, finish: str | None = None) -> bytes:
        found = None if entries is None else {"content": entries, "refusal": None}
        return heading.chunk([{"index": index, "delta": delta, "logprobs": found, "finish_reason": finish}], **more)

    first: dict[str, Any] = {"role": "assistant", "content": ""}
    if tokens.thinking is not None:
        first["reasoning_content"] = _thought(drawn, tokens)
    events, entries = [chunk(first)], _token_logprobs(drawn, tokens) if logprobs else None
    ends = (tokens.codec.separator_id, tokens.codec.eos_id)
    last_of_line = [place for place, token in enumerate(_order_ids(drawn, tokens)) if token in ends]
    for number, (order, last) in enumerate(zip(drawn.orders, last_of_line, strict=True)):
        begin = last_of_line[number - 1] + 1 if number else 0
        text = order + "\n" * (number + 1 < len(drawn.orders))
        events.append(chunk({"content": text}, None if entries is None else entries[begin : last + 1]))
    return [*events, chunk({}, finish="stop")]


def usage_of(drawn: Sequence[DrawnDecision]) -> dict[str, Any]:
    """Tokens of the prompt, which is counted once, and of all completions."""
    prompt, completion = len(drawn[0].prompt_ids), sum(len(each.generation.token_ids) for each in drawn)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def _order_ids(drawn: DrawnDecision, tokens: Tokens) -> list[int]:
    """The completion's tokens without its thought."""
    completion = drawn.generation.token_ids.tolist()
    return completion if tokens.thinking is None else tokens.thinking.split(completion)[1]


def _thought(drawn: DrawnDecision, tokens: Tokens) -> str:
    assert tokens.thinking is not None
    return tokens.codec.decode(tokens.thinking.split(drawn.generation.token_ids.tolist())[0]).strip()


def _token_logprobs(drawn: DrawnDecision, tokens: Tokens) -> list[dict[str, Any]]:
    ids = _order_ids(drawn, tokens)
    logprobs = drawn.generation.logprobs[len(drawn.generation.token_ids) - len(ids) :].tolist()
    entries, text = [], ""
    for place, (token, logprob) in enumerate(zip(ids, logprobs, strict=True), start=1):
        # Some tokenizers spell a token in another way without those before it.
        longer = tokens.codec.decode(ids[:place])
        shown = longer[len(text) :] if longer.startswith(text) else tokens.codec.decode([token])
        text = longer
        spelled = [] if token == tokens.codec.eos_id else list(shown.encode())
        entries.append({"token": shown, "logprob": logprob, "bytes": spelled, "top_logprobs": []})
    return entries
