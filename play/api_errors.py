"""Refusals in the form of the OpenAI API: `{"error": {"message", "type", "param", "code"}}` under the right HTTP status.

400 invalid_request_error     the request cannot be answered as it is; `param` names the part
401 authentication_error      key
403 permission_error          another page, or another host's name
404 invalid_request_error     no such model, or no such route
408, 413, 431                 invalid_request_error: too slow, too long
429 rate_limit_error          too many in flight; Retry-After says when to try again
500, 503 server_error         a decision failed; the engine is lost
"""

from typing import Any

from fastapi.responses import JSONResponse

from telemetry.errors import EngineError, EngineLostError, EntenteError, VersionGoneError
from workers.http_bounds import BoundedConnection

RETRY_AFTER_S = 1
"""Seconds after which a client should ask again: a decision takes about as long."""
_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error", 500: "server_error", 503: "server_error"}
_CODES = {"key": "invalid_api_key", "busy": "rate_limit_exceeded", "slow": "request_timeout", "too_long": "request_too_large"}
"""Kind of a refusal of `workers.http_bounds` and its neighbours -> code."""


class ApiError(EntenteError):
    """A request that is refused: HTTP status, code, and the parameter that is at fault, if one is."""

    def __init__(self, status: int, message: str, *, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param

    @property
    def body(self) -> dict[str, Any]:
        """The object that the API sends."""
        kind = _TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    def response(self, *, close: bool = False) -> JSONResponse:
        """The refusal; `close` also closes the connection."""
        headers = {"connection": "close"} if close else {}
        if self.status == 429:
            headers["retry-after"] = str(RETRY_AFTER_S)
        return JSONResponse(self.body, status_code=self.status, headers=headers)


def as_api_error(error: EntenteError) -> ApiError:
    """What a client is told of a decision that failed."""
    match error:
        case ApiError():
            return error
        case EngineLostError() | VersionGoneError():
            return ApiError(503, str(error), code="engine_lost")
        case EngineError():  # the engine refused this request, for example as too long
            return ApiError(400, str(error), code="engine_refused")
        case _:
            return ApiError(500, str(error), code="server_error")


def refusal(status: int, kind: str, text: str, *, close: bool = False) -> JSONResponse:
    """A refusal of the server's guards."""
    return ApiError(status, text, code=_CODES.get(kind, kind)).response(close=close)


class ApiConnection(BoundedConnection):
    """A connection whose refusals have the API's form."""

    say = staticmethod(refusal)
