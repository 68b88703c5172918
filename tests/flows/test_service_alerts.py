"""What concerns no single run: pools that lost their workers, schedules that come to nothing. Pure rules."""

from pathlib import Path

import pytest

from flows.recovery.service_alerts import Scheduled, _new_alerts, check_pools, check_schedules

DONE, CANCELLED = Scheduled(state="Completed", late=False), Scheduled(state="Cancelled", late=False)
WAITS = Scheduled(state="AwaitingConcurrencySlot", late=True)


def test_a_pool_of_which_no_worker_answers_is_told_with_what_waits_there():
    found = check_pools({"local": [False, False], "gpu": [True, False], "new": []}, {"local": 3})
    ((rule, sentence),) = found.values()
    assert (
        rule == "pool_without_worker" and "none of the 2 workers of work pool 'local'" in sentence and "3 runs wait" in sentence
    )


@pytest.mark.parametrize(
    ("newest_first", "rules"),
    [
        ([CANCELLED, CANCELLED, CANCELLED, DONE], ["schedules_cancelled"]),
        ([CANCELLED, CANCELLED, DONE, CANCELLED], []),
        ([DONE, CANCELLED, CANCELLED, CANCELLED], []),
        ([WAITS, WAITS, DONE], ["schedule_overlaps"]),
        ([WAITS, DONE, DONE], []),
        ([WAITS, CANCELLED, CANCELLED, CANCELLED], ["schedules_cancelled"]),
        ([], []),
    ],
    ids=["three cancelled", "two cancelled", "it came right", "two wait", "one waits", "what waits does not count", "nothing"],
)
def test_a_schedule_that_comes_to_nothing_or_overtakes_itself_is_told(newest_first: list[Scheduled], rules: list[str]):
    assert [rule for rule, _ in check_schedules({"nightly": newest_first}).values()] == rules


def test_what_goes_on_is_told_once_and_again_after_it_was_over(tmp_path: Path):
    file, holds = tmp_path / "there" / "looked.json", {"pool local": ("pool_without_worker", "none answers")}
    assert [alert.name for alert in _new_alerts(file, holds)] == ["pool_without_worker"]
    assert _new_alerts(file, holds) == []
    assert _new_alerts(file, {}) == []
    assert len(_new_alerts(file, holds)) == 1
