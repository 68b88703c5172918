"""Names of endpoints, `openai:MODEL@URL`, and settings. A key is read from the environment, and sent to its own host only."""

import os
import re
from dataclasses import dataclass
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import Field

from entente.telemetry.errors import InputError
from entente.telemetry.setting_marks import Settings

_NAME = re.compile(
    r"openai:(?P<model>[A-Za-z0-9@][A-Za-z0-9._:/@-]*)@(?P<url>https?://(?:[A-Za-z0-9.-]+|\[[0-9A-Fa-f:.]+\])(?::[0-9]{1,5})?"
    r"(?:/[A-Za-z0-9._~/-]*)?)"
)
"""No user, query or fragment, which could contain a key, and no separators of the table of opponents."""


class EndpointSettings(Settings):
    """How OpenAI-compatible endpoints are called, those of players such as 'openai:model@http://host:port/v1'."""

    answer_tokens: Annotated[int, Field(ge=16)] = 2048
    """Maximum tokens per answer."""
    token_budget: Annotated[int, Field(ge=0)] = 5_000_000
    """Maximum prompt and answer tokens of a match or run, which stops there and can be resumed; 0: no limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    model: str
    url: str
    """Address before `/chat/completions`, without a slash at the end."""

    @property
    def name(self) -> str:
        return f"openai:{self.model}@{self.url}"

    @property
    def key_variable(self) -> str:
        """Environment variable of its key, such as ENTENTE_KEY_API_EXAMPLE_COM; a port in the address is part of it. A hyphen is
        two underscores, so api.example.com and api-example.com have different ones."""
        place = urlsplit(self.url).netloc.upper().replace("-", "__")
        return "ENTENTE_KEY_" + re.sub(r"[^A-Z0-9_]+", "_", place).strip("_")

    @property
    def key(self) -> str:
        return os.environ.get(self.key_variable, "").strip()


def read_endpoint(name: str) -> Endpoint:
    """Raises an InputError if `name` is not `openai:MODEL@URL`, or the address has more than host, port and path."""
    match = _NAME.fullmatch(name)
    if match is None:
        # Do not echo the name: its invalid part may be a key.
        raise InputError(
            "an endpoint is named 'openai:MODEL@URL' ('openai:qwen3@http://127.0.0.1:8000/v1'): letters, digits and ._:/@- in "
            "the model, and an http or https address with only host, port and path; its key is in the environment"
        )
    return Endpoint(model=match["model"], url=match["url"].rstrip("/"))
