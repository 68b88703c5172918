"""Settings refuse what cannot be built, in a sentence that names the values."""

import pytest
from pydantic import ValidationError

from state_cache.settings import CacheSettings


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"first_year": 1905, "last_year": 1903}, "first_year 1905 lies after last_year 1903"),
        ({"players": ("random", "nobody")}, "no scripted player 'nobody'"),
    ],
)
def test_what_cannot_be_built_is_refused(values: dict, sentence: str) -> None:
    with pytest.raises(ValidationError, match=sentence):
        CacheSettings(**values)
