"""Settings of endpoints that play."""

from typing import Annotated

from pydantic import Field

from telemetry.setting_marks import Settings


class OutsideSettings(Settings):
    """How OpenAI-compatible endpoints are asked, those of players such as 'openai:model@http://host:port/v1'."""

    timeout_s: Annotated[float, Field(gt=0, le=3600)] = 120.0
    """Seconds for one request, from its sending to the last byte of its answer."""
    retries: Annotated[int, Field(ge=0, le=20)] = 5
    """Further tries of a request that failed, after 1, 2, 4, ... seconds, or when the endpoint says."""
    at_once: Annotated[int, Field(ge=1, le=1024)] = 8
    """Requests in flight, to all endpoints together."""
    answer_tokens: Annotated[int, Field(ge=16)] = 2048
    """Tokens of one answer at most; a model that thinks before it answers needs more."""
    token_budget: Annotated[int, Field(ge=0)] = 5_000_000
    """Tokens of all prompts and answers of a match or run; the answers in flight may exceed it. Then it stops, and continues
    with a larger budget. 0: no limit."""
