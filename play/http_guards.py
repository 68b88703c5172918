"""Checks of a request's header that the servers of this project share; what a refusal says is theirs.

Keys are compared in constant time. A body is not read before its length is known.
"""

import hmac
from collections.abc import Collection, Mapping
from typing import Literal

from starlette.types import Scope

Headers = Mapping[bytes, bytes]


def headers_of(scope: Scope) -> Headers:
    """The headers by name, in small letters; of two with one name the last."""
    return dict(scope["headers"])


def has_key(headers: Headers, key: str) -> bool:
    """Whether the request bears the key: `Authorization: Bearer KEY`."""
    return hmac.compare_digest(headers.get(b"authorization", b""), b"Bearer " + key.encode())


def foreign_header(headers: Headers, own: Collection[str]) -> Literal["host", "origin"] | None:
    """The header by which a request shows that it was meant for another host, or comes from another page; None: it does not.

    Args:
        own: host and port under which the server may be named; the first is its own page's.
    """
    names = [name.encode() for name in own]
    if headers.get(b"host", b"") not in names:
        return "host"
    if headers.get(b"origin", b"http://" + names[0]) not in [b"http://" + name for name in names]:
        return "origin"
    return None


def is_too_long(scope: Scope, headers: Headers, most: int) -> bool:
    """Whether the body may have more than `most` bytes, or does not state its length."""
    length = headers.get(b"content-length", b"" if scope["method"] == "POST" else b"0")
    return not length.isdigit() or int(length) > most or b"transfer-encoding" in headers
