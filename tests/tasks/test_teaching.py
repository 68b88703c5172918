"""A label is tried again where a second attempt may succeed, and only there."""

from typing import Any

import pytest
from prefect.states import Failed

from entente.telemetry.errors import DataError, EngineError, InputError
from tasks.teaching import label_visits


@pytest.mark.parametrize(
    ("error", "again"),
    [(InputError("it is no legal set"), False), (DataError("not legal there"), False), (EngineError("a process ended"), True)],
    ids=["illegal proposal", "illegal lesson", "lost process"],
)
def test_a_teacher_that_answers_illegally_is_asked_once(error: Exception, again: bool):
    ask: Any = label_visits.retry_condition_fn
    assert label_visits.retries > 0 and ask(label_visits, None, Failed(data=error)) is again
