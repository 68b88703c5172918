"""Named weights are of known components."""

import pytest

from storage.arrow_files import COMPONENTS, FINAL
from storage.settings import NAMED_WEIGHTS, StorageSettings


@pytest.mark.parametrize("name", NAMED_WEIGHTS)
def test_a_name_stands_for_a_blend_of_known_weights(name: str) -> None:
    settings = StorageSettings.model_validate({"reward_weights": name})
    assert settings.reward_weights == NAMED_WEIGHTS[name] and {
        weight.removeprefix(FINAL) for weight in settings.reward_weights
    } <= set(COMPONENTS)
    assert StorageSettings.model_validate(settings.model_dump()) == settings
