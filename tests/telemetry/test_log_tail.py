"""The newest lines of a log, asked for by number."""

import logging
from collections.abc import Iterator

import pytest

from telemetry.log_tail import KEPT, LONGEST, follow_loggers


@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    found = logging.getLogger("entente.test-of-tails")
    found.propagate = False
    found.setLevel(logging.DEBUG)
    yield found
    found.handlers.clear()


def test_lines_are_given_once_in_order_to_whoever_says_what_he_has(logger: logging.Logger):
    tail = follow_loggers(logger.name)
    logger.debug("too small")
    logger.info("one of %d", 2)
    logger.error("two")
    lines = tail.since(0)
    assert [(line["number"], line["level"]) for line in lines] == [(1, "INFO"), (2, "ERROR")]
    assert [line["text"] for line in lines] == [f"{logger.name}: one of 2", f"{logger.name}: two"]
    assert tail.since(1) == lines[1:] and tail.since(2) == []


def test_a_tail_is_bounded_in_lines_and_in_their_length_and_keeps_an_errors_trace(logger: logging.Logger):
    tail = follow_loggers(logger.name)
    for number in range(KEPT + 10):
        logger.info("%d", number)
    try:
        raise ValueError("x" * 2 * LONGEST + " is why")
    except ValueError:
        logger.exception("it failed")
    lines = tail.since(0)
    assert len(lines) == KEPT and lines[0]["number"] == 12
    assert len(str(lines[-1]["text"])) == LONGEST and str(lines[-1]["text"]).endswith(" is why")
