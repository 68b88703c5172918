"""Settings refuse what would make every return 0 or leave a component unknown."""

from typing import Any

import pytest
from pydantic import ValidationError

from entente.telemetry.errors import InputError
from storage.arrow_files import COMPONENTS, FINAL
from storage.rewards import check_reward_weights
from storage.settings import NAMED_WEIGHTS, StorageSettings


@pytest.mark.parametrize("name", NAMED_WEIGHTS)
def test_a_name_stands_for_a_blend_of_known_weights(name: str) -> None:
    settings = StorageSettings.model_validate({"reward_weights": name})
    assert settings.reward_weights == NAMED_WEIGHTS[name] and {
        weight.removeprefix(FINAL) for weight in settings.reward_weights
    } <= set(COMPONENTS)
    assert StorageSettings.model_validate(settings.model_dump()) == settings


@pytest.mark.parametrize(
    ("broken", "sentence"),
    [
        ({"reward_weights": "clever"}, "there are no weights named 'clever'; known ones are centres, sum_of_squares"),
        ({"reward_weights": {"survival": 0.0}}, "every component has weight 0"),
    ],
    ids=["name", "zero"],
)
def test_unusable_settings_are_refused_with_a_reason(broken: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValidationError, match=sentence):
        StorageSettings(**broken)


def test_a_blend_that_weighs_what_is_no_component_is_refused() -> None:
    with pytest.raises(
        InputError, match=r"storage.reward_weights weighs final_centers: There is no reward component 'centers'. Known: centres"
    ):
        check_reward_weights({"final_centers": 1.0})
