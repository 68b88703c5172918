"""When a run looks again whether trainer and engine compute the same policy, and on what."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from entente.settings.run_settings import RunSettings
from tasks import train_policy


class Run:
    """Trainer, engine and rollouts of a run that was opened after step 2; what the flow asked of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, fresh: bool) -> None:
        self.fresh, self.asked = fresh, []
        self.engine, self.resume_point = object(), SimpleNamespace(step_done=2)
        monkeypatch.setattr(train_policy, "COMPARE_EVERY", 4)
        monkeypatch.setattr(train_policy, "has_fresh_rows", self._has_fresh_rows)
        monkeypatch.setattr(train_policy, "roll_out_probe", self._probe)
        monkeypatch.setattr(train_policy, "check_mismatch", self._check)

    async def all_played(self) -> None:
        self.asked.append("all played")

    async def served(self) -> None:
        self.asked.append("served")

    async def _has_fresh_rows(self, resources: Any) -> bool:
        return self.fresh

    async def _probe(self, resources: Any, version: int) -> None:
        self.asked.append(f"probe of version {version}")

    async def _check(self, resources: Any, begins: bool) -> dict[str, float]:
        self.asked.append("check" if begins else "check, and only warn")
        return {"mismatch/mean": 0.0}

    def step(self, step: int, pipeline: dict[str, Any]) -> list[str]:
        self.in_step = pipeline["buffer_depth"] <= 1
        settings = RunSettings.model_validate({"pipeline": pipeline})
        resources: Any = self
        asyncio.run(train_policy.check_agreement(resources, resources, settings, step))
        asked, self.asked = self.asked, []
        return asked


IN_TURN, ONE_BEHIND, IN_FLOW = {"buffer_depth": 0}, {"buffer_depth": 1}, {"buffer_depth": 2}


@pytest.mark.parametrize("pipeline", [IN_TURN, ONE_BEHIND, IN_FLOW])
def test_a_run_that_begins_or_goes_on_has_rows_drawn_for_it_if_there_are_none(
    monkeypatch: pytest.MonkeyPatch, pipeline: dict[str, Any]
):
    assert Run(monkeypatch, fresh=False).step(3, pipeline) == ["all played", "served", "probe of version 2", "check"]
    assert Run(monkeypatch, fresh=True).step(3, pipeline) == ["check"]


@pytest.mark.parametrize(
    ("pipeline", "fresh", "asked"),
    [
        pytest.param(IN_TURN, True, [], id="every step shows it on its own rows"),
        pytest.param(
            ONE_BEHIND, False, ["all played", "served", "probe of version 7", "check, and only warn"], id="no step has any"
        ),
        pytest.param(IN_FLOW, True, ["check, and only warn"], id="there happen to be some"),
        pytest.param(
            IN_FLOW, False, ["served", "probe of version 7", "check, and only warn"], id="nobody stops for it what is in flight"
        ),
    ],
)
def test_later_on_it_is_looked_at_where_the_steps_do_not_show_it(
    monkeypatch: pytest.MonkeyPatch, pipeline: dict[str, Any], fresh: bool, asked: list[str]
):
    run = Run(monkeypatch, fresh=fresh)
    assert [run.step(step, pipeline) for step in (4 + 1, 4 + 2, 4 + 3, 4 + 4)] == [[], [], [], asked]
