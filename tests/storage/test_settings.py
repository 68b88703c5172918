"""Settings refuse what would make every return 0 or leave a component unknown."""

from typing import Any

import pytest
from pydantic import ValidationError

from entente.telemetry.errors import InputError
from storage.arrow_files import COMPONENTS, FINAL
from storage.rewards import check_blend
from storage.settings import BLENDS, StorageSettings


@pytest.mark.parametrize("name", BLENDS)
def test_a_name_stands_for_a_blend_of_known_weights(name: str) -> None:
    settings = StorageSettings.model_validate({"blend": name})
    assert settings.blend == BLENDS[name] and {weight.removeprefix(FINAL) for weight in settings.blend} <= set(COMPONENTS)
    assert StorageSettings.model_validate(settings.model_dump()) == settings


@pytest.mark.parametrize(
    ("broken", "sentence"),
    [
        ({"blend": "clever"}, "there is no blend 'clever'; named ones are centres, sum_of_squares"),
        ({"blend": {"survival": 0.0}}, "every component weighs 0"),
    ],
    ids=["name", "zero"],
)
def test_unusable_settings_are_refused_with_a_reason(broken: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValidationError, match=sentence):
        StorageSettings(**broken)


def test_a_blend_that_weighs_what_is_no_component_is_refused() -> None:
    with pytest.raises(
        InputError, match=r"storage.blend weighs final_centers: There is no reward component 'centers'. Known: centres"
    ):
        check_blend({"final_centers": 1.0})
