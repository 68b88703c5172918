"""One tree of errors; the process ends with 2 where the user's input cannot be used, with 1 for every other failure."""

import inspect

import pytest

from entente.telemetry import errors
from entente.telemetry.errors import EntenteError, first_line

KINDS = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if kind.__module__ == errors.__name__]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_error_belongs_to_the_tree_and_only_bad_input_exits_with_two(kind: type[EntenteError]):
    assert issubclass(kind, EntenteError)
    assert kind("a sentence").exit_code == {"InputError": 2}.get(kind.__name__, 1)


@pytest.mark.parametrize(("message", "expected"), [("\n a file\nits trace", "a file"), (" \n", "OSError")])
def test_of_a_foreign_error_a_sentence_takes_the_first_line_or_its_type(message: str, expected: str):
    assert first_line(OSError(message)) == expected
