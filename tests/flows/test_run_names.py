"""A flow run's name says what it works on, whether its parameters come as settings or as a page's plain mappings."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

import flows.run_names
from flows.run_names import cache_name, evaluation_name, sweep_name, training_name, tuning_name
from pipeline.run_settings import RunSettings
from state_cache.settings import CacheSettings


@pytest.mark.parametrize(
    ("name", "parameters", "told"),
    [
        pytest.param(training_name, {"settings": RunSettings(run="mine")}, "train-mine", id="named"),
        pytest.param(training_name, {"settings": RunSettings(seed=3)}, "train-tiny-seed3", id="unnamed"),
        pytest.param(cache_name, {"settings": CacheSettings(seed=2, train_snapshots=8)}, "cache-seed2-8", id="cache"),
        pytest.param(sweep_name, {"sweep": {"name": "rates"}}, "sweep-rates", id="sweep"),
        pytest.param(tuning_name, {"run": "mine"}, "tune-mine", id="tuning"),
        pytest.param(evaluation_name, {"run": "mine", "version": 0}, "evaluate-mine-v0", id="base"),
        pytest.param(evaluation_name, {"run": "mine", "version": -1}, "evaluate-mine-newest", id="newest"),
    ],
)
def test_a_name_says_what_the_flow_run_works_on(
    monkeypatch: pytest.MonkeyPatch, name: Callable[[], str], parameters: dict[str, Any], told: str
):
    monkeypatch.setattr(flows.run_names, "flow_run", SimpleNamespace(parameters=parameters))
    assert name() == told
