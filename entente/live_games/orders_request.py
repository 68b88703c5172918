"""Reads a chat completions request: a position and a power in its last message, and the supported parameters.

Unsupported parameters are rejected by name, unless they have their neutral value. Pure metadata is ignored. An answer is always a
complete legal order set, so `stop` and `max_tokens` cannot truncate it. Error responses have the API's form,
`{"error": {"message", "type", "param", "code"}}`, with the matching HTTP status.
"""

import json
from collections.abc import Mapping
from typing import Annotated, Any

from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from entente.game.board import POWERS, Board
from entente.game.legal import LegalOrders
from entente.game.positions import board_of_state
from entente.game.read_prompt import read_prompt
from entente.game.recorded import board_of_game
from entente.telemetry.errors import EntenteError, InputError

LEAST_TEMPERATURE = 0.01
"""Replaces a temperature of 0: the most likely orders are nearly certain."""
MOST_CHOICES = 128
RETRY_AFTER_S = 1
"""Retry-After of a 429 response, seconds: about the time of one decision."""
_LONGEST_SENTENCE = 400
_IGNORED = {
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "parallel_tool_calls",
    "reasoning_effort",
    "verbosity",
}
_IGNORED |= {"prompt_cache_key", "prompt_cache_retention"}
_ASKS_NOTHING = (None, 0, "", [], {}, {"type": "text"}, ["text"])
_CHOOSES_NOTHING = (None, "none", "auto")
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "top_p": (None, 1),
    "repetition_penalty": (None, 1),
    "tool_choice": _CHOOSES_NOTHING,
    "function_call": _CHOOSES_NOTHING,
}
"""Neutral values of parameters for which those above ask for something, or others do not."""
_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error", 500: "server_error", 503: "server_error"}


class ApiError(EntenteError):
    """A rejected request: HTTP status, code, and the wrong parameter, if any."""

    def __init__(self, status: int, message: str, *, code: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param

    def response(self) -> JSONResponse:
        headers = {"retry-after": str(RETRY_AFTER_S)} if self.status == 429 else {}
        kind = _TYPES.get(self.status, "invalid_request_error")
        error = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return JSONResponse({"error": error}, status_code=self.status, headers=headers)


class _Message(BaseModel):
    role: str
    content: str | list[dict[str, Any]] | None = None


class ChatRequest(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)

    model: str
    messages: Annotated[list[_Message], Field(min_length=1)]
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    seed: int | None = None
    logprobs: bool | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None

    @property
    def sampling_temperature(self) -> float:
        return 1.0 if self.temperature is None else max(self.temperature, LEAST_TEMPERATURE)


def read_request(body: bytes) -> ChatRequest:
    """Raises ApiError if the body is malformed, or has an unsupported parameter."""
    try:
        request = ChatRequest.model_validate_json(body)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        text = f"'{where}' cannot be read: {first['msg']}" if where else f"the body is no JSON object: {first['msg']}"
        raise ApiError(400, text, code="invalid_value", param=where or None) from None
    for name, value in (request.model_extra or {}).items():
        if name in _IGNORED or value in _NEUTRAL.get(name, _ASKS_NOTHING):
            continue
        text = (
            f"{name[:60]!r} cannot be honoured: the answer is a complete legal order set, sampled from the policy; leave it out"
        )
        raise ApiError(400, text, code="unsupported_parameter", param=name[:60])
    return request


def read_question(request: ChatRequest) -> tuple[Board, LegalOrders]:
    """The position in the last message, and the legal orders of the power that it names. Ignores earlier messages."""
    try:
        power, board = _position(_text(request.messages[-1]))
    except InputError as error:
        raise ApiError(400, str(error)[:_LONGEST_SENTENCE], code="invalid_position", param="messages") from error
    legal = board.legal_orders().get(power)
    board.release()  # nobody plays on it
    if legal is None:
        has = "nothing to order" if board.is_alive(power) else "neither units nor centres"
        raise ApiError(400, f"{power} has {has} in {board.phase}: ask for another power", code="no_orders", param="messages")
    return board, legal


def _text(message: _Message) -> str:
    if message.role != "user":
        raise InputError(f"the last message has the role {message.role[:60]!r}: it must be a user message with a position")
    if isinstance(message.content, str):
        return message.content
    texts = [part.get("text") if part.get("type") == "text" else None for part in message.content or ()]
    if not texts or not all(isinstance(text, str) for text in texts):
        raise InputError("the last message must contain text, and nothing else")
    return "\n".join(map(str, texts))


def _position(text: str) -> tuple[str, Board]:
    """The power and the board of a message: a prompt, or a JSON object with `power`, and `state` or `game`."""
    if not text.lstrip().startswith("{"):
        return read_prompt(text)
    try:
        asked = {key: value for key, value in json.loads(text).items() if value is not None}
    except (ValueError, RecursionError) as error:
        raise InputError(f"the message starts like a JSON object, but is not one: {str(error)[:100]}") from error
    if unknown := sorted(set(asked) - {"power", "state", "game"}):
        raise InputError(f"the message has the key {unknown[0][:60]!r}: it must have 'power', and either 'state' or 'game'")
    if ("state" in asked) == ("game" in asked):
        raise InputError("the message must have either 'state' (Game.get_state) or 'game' (to_saved_game_format)")
    power = asked.get("power")
    if not isinstance(power, str) or power.upper() not in POWERS:
        named = f"{power!r}"[:60]
        raise InputError(f"there is no power {named}: the message's 'power' is one of {', '.join(POWERS)}")
    return power.upper(), board_of_state(asked["state"]) if "state" in asked else board_of_game(asked["game"])
