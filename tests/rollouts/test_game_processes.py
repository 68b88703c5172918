"""Games in processes of their own give the rows of games in this one, however often a process dies."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from game.board import POWERS
from inference.host import EngineHost
from records.generation import Generation, GenerationRequest
from rollouts.deciders import PolicyDecider
from rollouts.game_messages import TABLE_SLOTS, SentTables, error_fields, error_of
from rollouts.game_pool import DEATHS_IN_A_ROW, PROCESS_BYTES, STEPS_AT_ONCE, GamePool
from rollouts.roll_out import RolledOut, StartGroup, plan_start_groups, roll_out
from rollouts.settings import RolloutSettings
from telemetry.errors import EngineError, EngineLostError, VersionGoneError
from tests.conftest import UniformEngine

SETTINGS = RolloutSettings(start_groups=6, forks_per_group=3, horizon_years=1, policy_powers="all", branch_at=(1,))
MIXED = RolloutSettings(start_groups=3, forks_per_group=2, horizon_years=1, opponents="v12,v4*2,hold", opponents_by="seat")
TIMES = {"engine_ms"}
"""Columns that hold measured time."""


def planned(positions: list[Any], settings: RolloutSettings = SETTINGS) -> list[StartGroup]:
    pairs = [(positions[number // settings.family], POWERS[number % 7]) for number in range(settings.start_groups)]
    return plan_start_groups(pairs, 2 * settings.start_groups, settings)


def content(played: RolledOut) -> list[tuple[Any, ...]]:
    """All rows and plies in order, without measured times."""

    def plain(value: Any) -> Any:
        return (value.dtype.str, value.tolist()) if isinstance(value, np.ndarray) else value

    return [
        tuple(plain(getattr(row, field.name)) for field in fields(row) if field.name not in TIMES)
        for row in (*played.decisions, *played.plies)
    ]


@pytest.fixture(scope="module")
def engine_host() -> Iterator[EngineHost]:
    host = EngineHost()
    yield host
    host.close()


@contextmanager
def opened(host: EngineHost, count: int, model: Path, prompts: Any, log: Path) -> Iterator[GamePool]:
    async def make() -> GamePool:
        games = GamePool(count, model, prompts, log)
        await games.start()
        return games

    games = host.submit(make()).result()
    try:
        yield games
    finally:
        host.submit(games.close()).result()


@pytest.fixture(scope="module")
def pool(engine_host: EngineHost, model: Path, tokens, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GamePool]:
    """Two game processes that the tests of this file share."""
    with opened(engine_host, 2, model, tokens.prompts, tmp_path_factory.mktemp("games") / "games.log") as games:
        yield games


@pytest.fixture
def apart(engine_host: EngineHost, pool: GamePool) -> Callable[..., RolledOut]:
    """Play start groups in the game processes."""

    def play(groups, engine, settings: RolloutSettings = SETTINGS, **given: Any) -> RolledOut:
        return engine_host.submit(pool.roll_out(groups, engine, settings, producer="local", seed=3, **given)).result()

    return play


def play_here(groups, engine, tokens, settings: RolloutSettings, **given: Any) -> RolledOut:
    return asyncio.run(roll_out(groups, engine, tokens, settings, producer="local", seed=3, **given))


@pytest.fixture(scope="module")
def here(tokens, positions) -> RolledOut:
    """The rows of games in this process."""
    return play_here(planned(positions), UniformEngine(), tokens, SETTINGS)


def test_rows_are_those_of_games_in_this_process(apart, here, positions):
    ended: list[int] = []
    groups = planned(positions)
    played = apart(groups, UniformEngine(), on_group=ended.append)
    assert content(played) == content(here)
    assert (played.forks, played.failed_forks) == (here.forks, 0)
    assert sorted(ended) == [group.number for group in groups]
    alone = apart(groups[:2], UniformEngine())
    assert content(alone) == [row for row in content(here) if row in content(alone)], "one family is played by one process"


def test_past_versions_decide_on_their_own_engine(apart, tokens, positions):
    groups = [StartGroup(number=number, snapshot=positions[number], power=POWERS[number]) for number in range(3)]
    policies, others = [UniformEngine(), UniformEngine()], [UniformEngine(), UniformEngine()]
    past = [{f"policy:{version}": PolicyDecider(other, tokens, version) for version in (4, 12)} for other in others]
    played = apart(groups, policies[0], MIXED, deciders=past[0])
    assert content(played) == content(play_here(groups, policies[1], tokens, MIXED, deciders=past[1]))
    asked = [sorted(request.request_id for request in engine.requests) for engine in (*policies, *others)]
    assert asked[0] == asked[1] and asked[2] == asked[3] and len(asked[2]) > len(asked[0]) > 0
    assert {request.version for request in others[0].requests} == {4, 12}


def test_a_killed_process_is_replaced_and_nothing_is_lost_or_drawn_twice(apart, pool, here, positions):
    """Killed in the middle of the games with requests in flight, and again while nothing plays."""
    engine, killed, ended = UniformEngine(), list[int](), list[int]()
    draw = engine.generate

    async def kill_once(request: GenerationRequest) -> Generation:
        if len(engine.requests) >= 60 and not killed:
            killed.append(pool.pids[0])
            os.kill(killed[0], signal.SIGKILL)
        await asyncio.sleep(0.002)  # so that others are in flight
        return await draw(request)

    engine.generate = kill_once
    assert content(apart(planned(positions), engine, on_group=ended.append)) == content(here)
    drawn = Counter(request.request_id for request in engine.requests)
    assert set(drawn.values()) == {1} and len(drawn) == len(here.decisions)
    assert len(ended) == len(set(ended)) == SETTINGS.start_groups, "a start group counts once"
    killed.append(pool.pids[1])
    os.kill(killed[1], signal.SIGKILL)
    assert content(apart(planned(positions), UniformEngine())) == content(here)
    assert len(pool.pids) == 2 and not {*killed} & {*pool.pids}


def roll_out_in(engine_host: EngineHost, model: Path, prompts: Any, log: Path, groups: list[StartGroup]) -> None:
    with opened(engine_host, 1, model, prompts, log) as games:
        engine_host.submit(games.roll_out(groups, UniformEngine(), SETTINGS, producer="p", seed=3)).result()


def test_a_process_that_dies_again_and_again_fails_its_job_with_a_sentence(engine_host, tokens, positions, tmp_path: Path):
    """There is no tokenizer in the folder, so no process can load it."""
    log, times = tmp_path / "games.log", DEATHS_IN_A_ROW
    with pytest.raises(
        EngineLostError, match=rf"died {times} times in a row over start groups from 12 \(exit code 1\).*games.log"
    ):
        roll_out_in(engine_host, tmp_path, tokens.prompts, log, planned(positions))
    assert "No such file" in log.read_text()


def test_a_process_that_cannot_be_started_fails_its_job_with_a_sentence(engine_host, model, tokens, positions, tmp_path: Path):
    """There is no folder for its log."""
    with pytest.raises(EngineLostError, match=r"died 3 times in a row .* No such file or directory"):
        roll_out_in(engine_host, model, tokens.prompts, tmp_path / "missing" / "games.log", planned(positions))


def test_the_share_of_failed_forks_is_that_of_all_processes(apart, tokens, positions):
    """All forks of one start group fail: more than the share of one process's forks, and less than that of all."""
    settings = SETTINGS.model_copy(update={"branch_at": (), "start_groups": 3, "max_failed_share": 0.4})
    groups = planned(positions, settings)

    def fails(request: GenerationRequest) -> bool:
        return request.request_id.startswith(f"local/3/{groups[1].number}/")

    played = apart(groups, UniformEngine(fails=fails), settings)
    assert content(played) == content(play_here(groups, UniformEngine(fails=fails), tokens, settings))
    assert (played.forks, played.failed_forks) == (9, 3)
    with pytest.raises(EngineError, match=r"^3 of 9 forks failed; the first: request local/3/7/.* was made to fail"):
        apart(groups, UniformEngine(fails=fails), settings.model_copy(update={"max_failed_share": 0.3}))


def test_a_request_under_a_retired_version_is_drawn_under_the_newest(apart, here, positions):
    engine, refused = UniformEngine(), set[str]()
    draw = engine.generate

    async def refuse_once(request: GenerationRequest) -> Generation:
        if request.request_id not in refused:
            refused.add(request.request_id)
            raise VersionGoneError("retired")
        return await draw(request)

    engine.generate = refuse_once
    assert content(apart(planned(positions), engine)) == content(here)
    assert len(refused) == len(here.decisions)


def test_a_cancelled_call_stops_its_games_and_its_requests(apart, engine_host, pool, here, positions):
    engine, in_flight = UniformEngine(), set[str]()

    async def never(request: GenerationRequest) -> Generation:
        in_flight.add(request.request_id)
        try:
            await asyncio.Event().wait()
            raise AssertionError("unreachable")
        finally:
            in_flight.remove(request.request_id)

    async def give_up() -> None:
        call = asyncio.create_task(pool.roll_out(planned(positions), engine, SETTINGS, producer="local", seed=3))
        while len(in_flight) < 20:
            await asyncio.sleep(0.01)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        await asyncio.sleep(0)
        assert call.cancelled() and not in_flight

    engine.generate = never
    engine_host.submit(give_up()).result()
    assert content(apart(planned(positions), UniformEngine())) == content(here)


def test_a_process_plays_two_steps_at_once_and_further_calls_wait_their_turn(apart, engine_host, pool, here, positions):
    """Nine calls of a family each, where a step is one family."""
    engine, in_flight, most = UniformEngine(), Counter[int](), list[int]()
    draw, groups = engine.generate, planned(positions)
    settings = SETTINGS.model_copy(update={"start_groups": 2})

    async def count(request: GenerationRequest) -> Generation:
        group = int(request.request_id.split("/")[2])
        in_flight[group] += 1
        most.append(len(+in_flight))
        await asyncio.sleep(0.002)
        in_flight[group] -= 1
        return await draw(request)

    async def play() -> list[RolledOut]:
        engine.generate = count
        families = [[replace(group, number=group.number + 12 * again) for group in groups] for again in range(3)]
        calls = [family[first : first + 2] for family in families for first in (0, 2, 4)]
        rolled = (pool.roll_out(call, engine, settings, producer="local", seed=3) for call in calls)
        return list(await asyncio.gather(*rolled))

    played = engine_host.submit(play()).result()
    assert sorted(row.decision_id for part in played[:3] for row in part.decisions) == sorted(
        row.decision_id for row in here.decisions
    )
    assert max(most) <= len(pool.pids) * STEPS_AT_ONCE * 2


def test_a_game_process_holds_no_engine_and_takes_the_memory_of_the_plan(apart, pool, positions):
    apart(planned(positions), UniformEngine())
    for process in map(psutil.Process, pool.pids):
        mapped = {Path(part.path).name for part in process.memory_maps()}
        assert not [name for name in mapped if name.startswith(("libtorch", "libduckdb"))]
        assert 0.7 <= process.memory_info().rss / PROCESS_BYTES <= 1.2


PARENT = """
import asyncio, sys
from pathlib import Path
from game.prompt_settings import DEFAULT_PROMPTS
from rollouts.game_pool import GamePool

async def main():
    games = GamePool(1, Path(sys.argv[1]), DEFAULT_PROMPTS, Path(sys.argv[2]))
    await games.start()
    while not games.pids:
        await asyncio.sleep(0.01)
    print(games.pids[0], flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


def test_a_game_process_ends_with_its_killed_parent(model: Path, tmp_path: Path):
    command = [sys.executable, "-c", PARENT, str(model), str(tmp_path / "games.log")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
    until = time.monotonic() + 120
    while child.is_running() and child.status() != psutil.STATUS_ZOMBIE and time.monotonic() < until:
        time.sleep(0.05)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


def test_a_table_is_sent_once_while_its_slot_holds_it(tokens, positions):
    sent, tables = SentTables(), [object() for _ in range(TABLE_SLOTS + 1)]
    places = [sent.place(table) for table in tables]  # type: ignore[arg-type]
    assert [slot for slot, _ in places] == [*range(TABLE_SLOTS), 0]
    assert sent.place(tables[1]) == (1, None)  # type: ignore[arg-type]
    assert sent.place(tables[0]) == (1, tables[0]), "its slot holds another table now"  # type: ignore[arg-type]
    assert sent.place(tables[1]) == (2, tables[1])  # type: ignore[arg-type]


def test_an_error_arrives_as_what_it_was():
    gone = error_of(error_fields(VersionGoneError("ask for 3")))
    assert type(gone) is VersionGoneError and str(gone) == "ask for 3"
    assert str(error_of(error_fields(KeyError("x")))) == "a game process failed unexpectedly: KeyError: 'x'"
