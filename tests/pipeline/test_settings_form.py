"""Prefect's form of a training run shows the settings that matter first; what it sends is the run that was asked for."""

from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from pipeline.run_settings import RunSettings, layered_settings
from pipeline.setting_names import FIRST_SETTINGS, setting_names
from pipeline.settings_form import MORE, SettingsParameter, merge_more, split_more

PARAMETER = TypeAdapter(SettingsParameter)


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    """What Prefect stores of the parameters of train-policy."""
    from prefect.utilities.callables import parameter_schema

    from flows.train_policy import train_policy

    return parameter_schema(train_policy.fn).model_dump_for_openapi()


def shown(schema: dict[str, Any], part: dict[str, Any], prefix: str = "") -> list[str]:
    """Dotted names of the settings of a part, as the form sorts them."""
    if "$ref" in part:
        part = schema["definitions"][part["$ref"].rpartition("/")[2]]
    names = []
    for name, inner in sorted(part["properties"].items(), key=lambda item: item[1].get("position", 1000)):
        deeper = "$ref" in inner and "properties" in schema["definitions"][inner["$ref"].rpartition("/")[2]]
        names += shown(schema, inner, f"{prefix}{name}.") if "properties" in inner or deeper else [prefix + name]
    return names


def test_the_form_shows_the_twenty_first_and_every_other_setting_once_below_more(schema: dict[str, Any]):
    names = shown(schema, schema["properties"]["settings"])
    assert names[:20] == list(FIRST_SETTINGS)
    rest = [name.removeprefix(f"{MORE}.") for name in names[20:]]
    assert all(name.startswith(f"{MORE}.") for name in names[20:])
    assert sorted([*FIRST_SETTINGS, *rest]) == sorted(setting_names(RunSettings))


@pytest.mark.parametrize("preset", ["laptop", "gpu-24", "gpu-80", "cluster"])
def test_a_whole_tree_and_a_form_give_the_same_run(preset: str, schema: dict[str, Any]):
    from prefect.utilities.schema_tools.validation import validate

    settings = layered_settings(preset)
    tree = settings.model_dump(mode="json")
    for given in (tree, split_more(tree), settings):
        assert PARAMETER.validate_python(given) == settings
        if given is not settings:
            assert validate({"settings": given}, schema, raise_on_error=True) == []
    assert merge_more(split_more(tree)) == tree


def test_a_setting_with_two_values_is_refused():
    with pytest.raises(ValidationError, match=r"training.lora_alpha is 8, and 9 under 'more': give it once"):
        PARAMETER.validate_python({"training": {"lora_alpha": 8}, MORE: {"training": {"lora_alpha": 9}}})
