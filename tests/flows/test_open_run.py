"""A run's name belongs to whoever holds its lock first: a later try is refused, and removes nothing that is not its own.

On a shared card engine and trainer start one after the other.
"""

import asyncio
import json
import os
import signal
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest

from entente.records.policy_version import ADAPTER_FILES
from entente.settings.layers import layered_settings
from entente.settings.run_settings import RunSettings
from entente.telemetry.cards import CardPlan
from entente.telemetry.errors import InputError
from flows import open_run
from flows.train_policy import train_policy
from flows.work_record import WORK_FOLDER, read_work, record_work
from state_cache.store import StateCache
from storage.adapters import publish_adapter
from storage.control import source_hash
from storage.files import file_lock
from storage.json_files import write_json
from tests.damage import flip
from tests.telemetry.fake_nvml import card


@pytest.fixture
def settings(tmp_path: Path) -> RunSettings:
    return layered_settings("laptop", (), {"runs_root": tmp_path, "run": "mine"})


@pytest.fixture(autouse=True)
def nothing_to_prepare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, model: Path) -> None:
    async def prepared_cache(settings: RunSettings, *, new: bool) -> StateCache:
        return StateCache(path=tmp_path, settings=settings.cache, train=(), held_out=())

    async def prepared_model(settings: RunSettings) -> Path:
        return model

    monkeypatch.setattr(open_run, "prepare_cache", prepared_cache)
    monkeypatch.setattr(open_run, "prepare_model", prepared_model)


async def nothing() -> None:
    pass


def opened(settings: RunSettings, *, resume: bool = False) -> None:
    async def enter() -> None:
        async with open_run.open_run(settings, resume=resume):
            raise AssertionError("it was opened")

    asyncio.run(enter())


def content(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.mark.parametrize("resume", [False, True], ids=["fresh", "resumed"])
def test_a_run_that_another_process_made_while_this_one_prepared_is_left_as_it_is(
    settings: RunSettings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, resume: bool
):
    root, before = settings.paths.root, {}

    async def prepared_late(_: RunSettings, *, new: bool) -> StateCache:
        root.mkdir(exist_ok=True)
        (root / ".lock").touch()
        (root / "settings.json").write_text(settings.model_copy(update={"seed": 77}).model_dump_json())
        (root / "summary.json").write_text("{}")
        before.update(content(root))
        return StateCache(path=tmp_path, settings=settings.cache, train=(), held_out=())

    if resume:
        root.mkdir()
        (root / "settings.json").write_text(settings.model_dump_json())
    monkeypatch.setattr(open_run, "prepare_cache", prepared_late)
    with pytest.raises(InputError, match="was started with seed 77" if resume else "run 'mine' exists already"):
        opened(settings, resume=resume)
    assert before and content(root) == before


def test_a_state_cache_that_was_lost_and_built_again_with_other_positions_is_refused(
    settings: RunSettings, monkeypatch: pytest.MonkeyPatch
):
    """As after a refresh from a run whose old shards are gone by now: equal settings, and another cache."""
    settings.paths.create().settings.write_text(settings.model_dump_json())
    write_json(settings.paths.environment, {"positions": "those of the first start"})
    monkeypatch.setattr(open_run, "new_base", lambda *_: 1 / 0)
    monkeypatch.setattr(open_run, "resumed_base", lambda *_: 1 / 0)
    with pytest.raises(InputError, match="was built again with other positions than run 'mine' began with: restore"):
        opened(settings, resume=True)
    write_json(settings.paths.environment, {"torch": "of an earlier release"})
    with pytest.raises(ZeroDivisionError):
        opened(settings, resume=True)


def test_a_run_that_is_being_trained_is_not_opened_a_second_time(settings: RunSettings):
    root = settings.paths.create().root
    settings.paths.settings.write_text(settings.model_dump_json())
    with file_lock(settings.paths.lock) as free:
        assert free
        before = content(root)
        with pytest.raises(InputError, match="run 'mine' is being trained by another process"):
            opened(settings, resume=True)
        assert content(root) == before


def test_a_try_that_is_refused_later_leaves_the_name_free_and_the_users_files_as_they_are(
    settings: RunSettings, monkeypatch: pytest.MonkeyPatch
):
    def refuse(*_: object, **__: object) -> None:
        write_json(settings.paths.scores / "base.json", {"score of": "this model"})
        raise InputError("refused by the trainer")

    monkeypatch.setattr(open_run, "TrainerProcess", refuse)
    settings.paths.root.mkdir()
    (settings.paths.root / "notes.txt").write_text("the user's")
    for _ in range(2):
        with pytest.raises(InputError, match="refused by the trainer"):
            opened(settings)
    assert content(settings.paths.root) == {".lock": b"", "notes.txt": b"the user's"}


def test_a_run_whose_endpoints_spent_their_budget_before_its_first_shard_can_be_resumed_with_their_answers(settings: RunSettings):
    paths, spent = settings.paths.create(), InputError("the endpoints have used 9 tokens of endpoint.token_budget 9")
    paths.settings.write_text("{}")
    paths.answers.write_text("{}")
    open_run._free_name(paths, InputError, spent, None)
    assert paths.settings.exists() and paths.scores.exists()
    paths.answers.unlink()
    open_run._free_name(paths, InputError, spent, None)
    assert not paths.settings.exists(), "as with a refused key"


@pytest.mark.parametrize("published", [True, False], ids=["seen in the files", "said by the trainer"])
def test_fewer_steps_than_a_run_has_done_are_refused_and_change_nothing(
    settings: RunSettings, monkeypatch: pytest.MonkeyPatch, published: bool
):
    started = []

    async def nothing() -> None:
        started.append("engine")

    trainer = SimpleNamespace(ready=lambda: SimpleNamespace(step_done=6, set_aside=()), close=lambda: None)
    monkeypatch.setattr(open_run, "TrainerProcess", lambda *_, **__: trainer)
    monkeypatch.setattr(open_run, "make_engine", lambda *_, **__: SimpleNamespace(start=nothing, close=nothing))
    stored = settings.paths.create().settings
    stored.write_text(before := settings.model_copy(update={"steps": 6}).model_dump_json())
    if published:
        settings.paths.adapter(6).mkdir(parents=True)
    with pytest.raises(InputError, match="run 'mine' has done 6 steps, more than steps 3"):
        opened(settings.model_copy(update={"steps": 3}), resume=True)
    assert stored.read_text() == before and bool(started) != published


def test_a_flow_run_that_somebody_starts_again_continues_the_run_that_it_began(
    settings: RunSettings, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PREFECT__RUNTIME__FLOW_RUN__ID", "1b2c")
    monkeypatch.setattr(open_run, "read_adapter", lambda *_: None)
    nameless = settings.model_copy(update={"run": ""})
    record_work(settings.paths.create(), "1b2c")
    record = settings.runs_root / WORK_FOLDER / "1b2c.json"
    record.write_text(json.dumps(json.loads(record.read_text()) | {"began": "another boot 1"}))
    named, resume = open_run.begun_run(nameless, resume=False)
    assert named.run not in ("", "mine") and not resume, "it was refused before it began"
    assert (work := read_work(settings.runs_root, "1b2c")) is not None and work.process() == "alive"
    settings.paths.settings.write_text(settings.model_dump_json())
    settings.paths.summary.write_text(f'{{"steps": {settings.steps}}}')
    (settings.paths.root / "report.html").touch()
    assert asyncio.run(train_policy.fn(nameless))["run"] == str(settings.paths.root)


def test_a_deployment_s_run_that_starts_late_has_the_name_of_its_replacement(
    settings: RunSettings, monkeypatch: pytest.MonkeyPatch
):
    late = UUID(int=0x1B2C)
    monkeypatch.setenv("PREFECT__RUNTIME__FLOW_RUN__ID", str(late))
    monkeypatch.setattr(open_run, "started_by_deployment", lambda: True)
    nameless = settings.model_copy(update={"run": ""})
    replacement = open_run.with_run_name(nameless, late.hex[-8:])
    assert open_run.begun_run(nameless, resume=False) == (replacement, False)
    replacement.paths.create().settings.write_text(replacement.model_dump_json())
    assert open_run.begun_run(nameless, resume=False) == (replacement, True), "and is refused while that is trained"
    assert open_run.begun_run(replacement, resume=False) == (replacement, False)


def test_a_kill_after_a_done_run_was_opened_again_leaves_no_summary_of_its_former_scores(
    settings: RunSettings, monkeypatch: pytest.MonkeyPatch
):
    trainer = SimpleNamespace(ready=lambda: SimpleNamespace(step_done=settings.steps, set_aside=()), close=lambda: None)
    monkeypatch.setattr(open_run, "TrainerProcess", lambda *_, **__: trainer)
    monkeypatch.setattr(open_run, "make_engine", lambda *_, **__: SimpleNamespace(start=nothing, close=nothing))
    monkeypatch.setattr(open_run, "write_json", lambda path, _: 1 / 0)  # the first write after the settings
    settings.paths.create().settings.write_text(settings.model_dump_json())
    settings.paths.summary.write_text(f'{{"steps": {settings.steps}, "trained_score": 0.5}}')
    monkeypatch.setattr(open_run, "read_adapter", lambda *_: None)
    assert open_run.finished_summary(settings) is not None
    longer = settings.model_copy(update={"evaluation": settings.evaluation.model_copy(update={"horizon_years": 3})})
    assert open_run.finished_summary(longer) is None
    content = settings.paths.summary.read_text()
    for damage in ("", "{bad", "[]"):
        settings.paths.summary.write_text(damage)
        assert open_run.finished_summary(settings) is None
    settings.paths.summary.write_text(content)
    with pytest.raises(ZeroDivisionError):
        opened(longer, resume=True)
    assert open_run.finished_summary(longer) is None


def test_what_a_run_was_not_begun_with_is_said_when_it_goes_on(
    settings: RunSettings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """An edited reward changes the returns of the earlier steps too."""
    package = tmp_path / "odd.py"
    package.write_text("def reward(components):\n    return components['centres_gained']\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    storage = settings.storage.model_copy(update={"reward_weights": {"final_odd:reward": 1.0}})
    settings = settings.model_copy(update={"storage": storage})
    trainer = SimpleNamespace(ready=lambda: SimpleNamespace(step_done=0, set_aside=()), close=lambda: None)
    monkeypatch.setattr(open_run, "TrainerProcess", lambda *_, **__: trainer)
    monkeypatch.setattr(open_run, "make_engine", lambda *_, **__: SimpleNamespace(start=nothing, close=nothing))
    monkeypatch.setattr(open_run, "write_json", lambda path, _: 1 / 0)
    sentences: list[str] = []
    monkeypatch.setattr(open_run, "reporter", lambda: SimpleNamespace(say=sentences.append))
    recorded = open_run.environment() | open_run.own_sources(settings)
    settings.paths.create().settings.write_text(settings.model_dump_json())

    def said(then: dict[str, str]) -> str:
        settings.paths.environment.write_text(json.dumps(then))
        with pytest.raises(ZeroDivisionError):
            opened(settings, resume=True)
        found = "".join(sentence for sentence in sentences if "last started" in sentence)
        sentences.clear()
        return found

    assert said(recorded) == ""
    assert f"torch {recorded['torch']} (was 1.0)" in said(recorded | {"torch": "1.0"})
    package.write_text(package.read_text() + "# edited")
    source_hash.cache_clear()
    assert said(recorded).endswith(f": odd {source_hash('odd')} (was {recorded['odd']})")
    plain = layered_settings("laptop")
    loss = plain.model_copy(update={"training": plain.training.model_copy(update={"loss": "odd:loss"})})
    bots = plain.model_copy(update={"rollouts": plain.rollouts.model_copy(update={"opponents": "odd:bot+search,random"})})
    assert [open_run.own_sources(each).keys() for each in (plain, loss, bots)] == [{"entente"}, *[{"entente", "odd"}] * 2]


def test_a_done_run_whose_last_version_is_damaged_is_opened_again_to_publish_it(settings: RunSettings, tmp_path: Path):
    settings.paths.create().settings.write_text(settings.model_dump_json())
    settings.paths.summary.write_text(f'{{"steps": {settings.steps}}}')
    for name in ADAPTER_FILES:
        (tmp_path / name).write_bytes(b"some weights")
    published = publish_adapter(settings.paths, settings.steps, tmp_path).folder
    assert open_run.finished_summary(settings) is not None
    flip(published / "adapter_model.safetensors")
    assert open_run.finished_summary(settings) is None


@pytest.mark.parametrize(
    ("trainer", "order", "share"),
    [
        pytest.param(0, ["trainer begins", "trainer is ready", "engine"], 1 - 0.6 - 2 / 80, id="one card"),
        pytest.param(1, ["trainer begins", "engine"], 0.0, id="a card each"),
        pytest.param(None, ["trainer begins", "engine"], 0.0, id="CPU"),
    ],
)
def test_on_a_shared_card_the_trainer_loads_before_the_engine_measures_what_is_left(
    settings: RunSettings, monkeypatch: pytest.MonkeyPatch, trainer: int | None, order: list[str], share: float
):
    plan = CardPlan() if trainer is None else CardPlan(engine=(card(0),), trainer=(card(trainer),))
    changed = settings.inference.model_copy(update={"gpu_memory_utilization": 0.6, "engine": "vllm"})
    settings, events, given = settings.model_copy(update={"inference": changed}), [], {}

    class Trainer:
        def __init__(self, *_: Any, **cards: Any) -> None:
            events.append("trainer begins")
            given.update(cards)

        def ready(self) -> None:
            events.append("trainer is ready")

        def close(self) -> None:
            pass

    class Engine:
        async def start(self) -> None:
            events.append("engine")
            raise InputError("far enough")

        async def close(self) -> None:
            pass

    monkeypatch.setattr(open_run, "check_inputs", lambda *_, **__: plan)
    monkeypatch.setattr(open_run, "TrainerProcess", Trainer)
    monkeypatch.setattr(open_run, "make_engine", lambda *_, **__: Engine())
    with pytest.raises(InputError, match="far enough"):
        opened(settings)
    assert events == order
    assert given["cards"] == plan.trainer and given["card_share"] == pytest.approx(share)


def test_sigterm_cancels_the_flow_and_is_then_handled_as_before():
    assert threading.current_thread() is threading.main_thread(), "no other thread gets signals"

    async def work() -> None:
        with open_run._cancelled_by_sigterm():
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(5)

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(work())
    assert signal.getsignal(signal.SIGTERM) == before
