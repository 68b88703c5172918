"""What past groups taught is read off their returns, up to a start group and no further."""

import pytest

from storage.learnable import PastReturns
from storage.shards import open_shard, publish_shard

BLEND = {"centres_gained": 1.0, "survival": 2.0}


def group(rows, rng, number: int, snapshot: str, gains: list[float], **given) -> tuple[list, list]:
    """A start group of one decision per fork, with these returns, and a power beside it that no fork moved."""
    decisions = [
        rows.make_decision(
            rng, start_group=number, fork=fork, snapshot_id=snapshot, power=power, phase="S1901M",
            centres_gained=gain if power == "FRANCE" else 0.0, survival=0.0, **given,
        )
        for fork, gain in enumerate(gains)
        for power in ("FRANCE", "TURKEY")
    ]  # fmt: skip
    return decisions, [rows.make_ply(start_group=number, fork=fork, ply=0) for fork in range(len(gains))]


@pytest.fixture
def put(paths, rows, rng):
    def put(number: int, snapshot: str, gains: list[float], producer: str = "local", **given) -> None:
        publish_shard(
            paths, producer, number, *group(rows, rng, number, snapshot, gains, **given), {}, next_start_group=number + 1
        )

    return put


@pytest.fixture
def past(paths) -> PastReturns:
    return PastReturns(paths, blend=BLEND, discount=1.0)


def test_a_snapshot_s_spread_is_the_mean_over_its_groups(put, past) -> None:
    assert past.spreads_before("local", 10) == {}
    put(0, "a", [0.0, 2.0, 1.0])
    put(1, "b", [1.0, 1.0])
    assert past.spreads_before("local", 10) == {"a": (2.0 + 0.0) / 2, "b": 0.0}
    put(2, "a", [0.0, 4.0])
    assert past.spreads_before("local", 10) == {"a": (1.0 + 2.0) / 2, "b": 0.0}


def test_what_comes_later_or_from_elsewhere_changes_nothing(put, past) -> None:
    put(0, "a", [0.0, 2.0])
    put(3, "a", [0.0, 8.0])
    before = past.spreads_before("local", 3)
    assert before == {"a": 1.0}
    put(4, "b", [0.0, 8.0])
    put(0, "a", [0.0, 6.0], producer="probe")
    assert past.spreads_before("local", 3) == before
    assert past.spreads_before("probe", 3) == {"a": 3.0}


def test_groups_that_cannot_be_trained_on_say_nothing(put, past) -> None:
    put(0, "a", [0.0, 2.0], status="failed", reason="engine")
    put(1, "a", [0.0, 4.0], orders_rejected=1)
    put(2, "b", [3.0])
    assert past.spreads_before("local", 10) == {}


def test_each_shard_is_read_once(put, paths, past, monkeypatch) -> None:
    for number in range(6):
        put(number, "ab"[number % 2], [0.0, 2.0 * number])
    late = PastReturns(paths, blend=BLEND, discount=1.0)
    assert past.spreads_before("local", 6) == late.spreads_before("local", 6) == {"a": (0 + 2 + 4) / 3, "b": (1 + 3 + 5) / 3}
    read: list[str] = []
    monkeypatch.setattr("storage.learnable.open_shard", lambda path: read.append(path.name) or open_shard(path))
    put(7, "b", [0.0, 9.0])
    for each in (past, late):
        assert each.spreads_before("local", 99)["b"] == (1 + 3 + 5 + 4.5) / 4
    assert read == ["000007.arrow"] * 2
