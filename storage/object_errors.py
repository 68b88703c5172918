"""What an error of an object store means: away for a while, a refusal in one sentence, or an answer that the caller expects."""

import os
import re

from telemetry.errors import DataError, InputError

_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>(\w+)</Code>")
_AGAIN = {408, 409, 425, 429}  # 409: another conditional request for this key is in flight
_NEVER = 501
_SKEWED = {"RequestTimeTooSkewed", "RequestExpired"}
_WRONG_KEY = {"InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken", "ExpiredToken"}
_NO_KEY = "169.254.169.254"  # without keys in the environment, the credentials of a cloud machine are asked for there


class CutBodyError(Exception):
    """A body ended before its length."""


def is_away(error: Exception) -> bool:
    """Whether the same request may succeed later: no answer, a broken one, or a server's error."""
    from obstore.exceptions import (
        AlreadyExistsError,
        BaseError,
        NotModifiedError,
        PermissionDeniedError,
        PreconditionError,
        UnauthenticatedError,
    )

    if isinstance(error, CutBodyError):
        return True
    expected = (
        FileNotFoundError,
        AlreadyExistsError,
        NotModifiedError,
        PreconditionError,
        PermissionDeniedError,
        UnauthenticatedError,
    )
    if isinstance(error, expected) or not isinstance(error, BaseError | OSError):
        return _status(error) in _AGAIN
    status = _status(error)
    return _NO_KEY not in str(error) and status != _NEVER and (status is None or status >= 500 or status in _AGAIN)


def _status(error: Exception) -> int | None:
    match = _STATUS.search(str(error))
    return int(match[1]) if match else None


def _code(error: Exception) -> str:
    match = _CODE.search(str(error))
    return match[1] if match else ""


def in_few_words(error: Exception) -> str:
    """The cause in a few words."""
    status, code = _status(error), _code(error)
    if status is not None:
        return f"status {status}{f', {code}' if code else ''}"
    if isinstance(error, CutBodyError):
        return str(error)
    return " ".join(str(error).partition("\n")[0].rpartition(" - ")[2].split())[:120]


def refusal(bucket_name: str, error: Exception) -> Exception | None:
    """The error with a sentence for what the store refused; None for an answer that the caller expects."""
    text, code = str(error), _code(error)
    bucket = f"bucket '{bucket_name}'"
    if code == "NoSuchBucket":
        return InputError(f"there is no {bucket} at {endpoint()}: create it, or correct the name")
    if code in _SKEWED:
        return InputError(f"the clock of this machine differs too much from that of {endpoint()}: set it, with NTP")
    if code in _WRONG_KEY:
        return InputError(
            f"{endpoint()} does not accept the key for {bucket} ({code}): correct AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        )
    if _NO_KEY in text:
        return InputError(f"no key for {bucket} is given: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY")
    status = _status(error)
    if status in (401, 403):
        return InputError(f"the key that is set may not do this in {bucket} at {endpoint()}: name another bucket, or grant it")
    if status == _NEVER:
        return InputError(
            f"{endpoint()} does not know a kind of request that a run needs, such as a conditional put: use another object store"
        )
    if isinstance(error, FileNotFoundError) or status is None or status in (304, 412):
        return None
    return DataError(f"{endpoint()} refused a request for {bucket}: {in_few_words(error)}")


def endpoint() -> str:
    return os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or "the object store"
