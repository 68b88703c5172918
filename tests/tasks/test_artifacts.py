"""A run's page in Prefect: complete where the server takes it, and never a reason for a run to fail or to wait."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId

import tasks.artifacts
from entente.evaluation.score_files import write_score
from storage.runs import RunPaths
from tasks.artifacts import RunPage, result_page
from tests.made_scores import made_record, made_score

FIGURES = {"train/reward": 0.25, "train/decisions": 16.0, "rollout/tokens_per_s": 248.4, "time/orchestration_share": 0.05}


@flow(name="looked-at")
def nothing() -> None:
    """Gives its name to flow runs; it is never run here: Prefect leaves sockets open where it runs a flow."""


@pytest.fixture
def in_flow_run(prefect_server: str, monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[UUID], Awaitable[Any]]], Any]:
    """`in_flow_run(work)`: what `work(flow run's id)` returns, where the code under test takes itself for that flow run."""

    async def begin(work: Callable[[UUID], Awaitable[Any]]) -> Any:
        async with get_client() as client:
            run = await client.create_flow_run(nothing)
        monkeypatch.setattr(tasks.artifacts, "_flow_run_id", lambda: run.id)
        return await work(run.id)

    return lambda work: asyncio.run(asyncio.wait_for(begin(work), 30))


async def artifacts_of(flow_run: UUID) -> dict[str, Any]:
    """The artifacts of a flow run by type."""
    async with get_client() as client:
        found = await client.read_artifacts(artifact_filter=ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[flow_run])))
    assert len({artifact.type for artifact in found}) == len(found), "one of each, however many updates"
    return {str(artifact.type): artifact for artifact in found}


@pytest.mark.system
def test_the_page_of_a_run_ends_with_all_its_steps_under_two_keys_and_its_name(in_flow_run):
    async def run(flow_run: UUID) -> tuple[dict[str, Any], str]:
        async with RunPage(Path("runs/My_run.1"), 3) as page:
            for step in (1, 2, 3):
                page.step(step, FIGURES)
                await asyncio.sleep(0.3)
        assert page.failures == 0
        async with get_client() as client:
            return await artifacts_of(flow_run), (await client.read_flow_run(flow_run)).name

    shown, name = in_flow_run(run)
    assert name == "train-My_run.1"
    keys = {kind: artifact.key for kind, artifact in shown.items()}
    assert keys == {"progress": "progress-my-run-1", "table": "steps-my-run-1"}
    opens = f"entente view My_run.1 --step 3 --runs-root {Path('runs').resolve()}"
    assert shown["progress"].data == 100 and shown["progress"].description == f"My_run.1: 3 of 3 steps. Look at it: `{opens}`"
    assert f"`{opens}`" in str(shown["table"].description)
    rows = json.loads(shown["table"].data)
    assert [row["step"] for row in rows] == ["3", "2", "1"]
    assert rows[0] | {"return": "+0.25", "decisions": "16", "tokens/s": "248", "Prefect": "5.0%", "lag": ""} == rows[0]


def test_a_resumed_run_begins_where_it_is(monkeypatch: pytest.MonkeyPatch):
    shown: list[tuple[str, str | float]] = []

    async def show(artifact: Any, flow_run: UUID, description: str, data: str | float) -> None:
        artifact._id = flow_run
        shown.append((description, data))

    async def resumed() -> None:
        page = RunPage(Path("runs/mine"), 400, done=300)
        page._bar._id = UUID(int=1)  # its flow run has its name
        await page._show(UUID(int=1))
        page.step(301, FIGURES)
        await page._show(UUID(int=1))

    monkeypatch.setattr(tasks.artifacts._Artifact, "show", show)
    asyncio.run(resumed())
    (first, percent), _, (then, _), (table, _) = shown
    assert first.startswith("mine: 300 of 400 steps") and percent == 75, "before its first step ends, or where none is left"
    assert then.startswith("mine: 301 of 400 steps")
    assert table.startswith("mine: its steps after step 300, newest first"), "earlier flow runs have the others"


@pytest.mark.system
def test_an_update_that_the_server_refuses_is_said_once_counted_and_survived(
    in_flow_run, said: list[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(tasks.artifacts, "PAUSE_S", 0.05)

    async def run(flow_run: UUID) -> int:
        async with RunPage(Path("runs/lost"), 4) as page:
            page.step(1, FIGURES)
            while len(shown := await artifacts_of(flow_run)) < 2:
                await asyncio.sleep(0.05)
            async with get_client() as client:
                for artifact in shown.values():
                    await client.delete_artifact(artifact.id)
            for step in (2, 3, 4):
                page.step(step, FIGURES)
                await asyncio.sleep(0.5)
        return page.failures

    failures = in_flow_run(run)
    assert failures >= 2, "each update"
    assert len([sentence for sentence in said if "was not updated" in sentence]) == 1
    assert said[-1].startswith(f"{failures} updates of the run's Prefect page were lost")


def test_a_result_is_what_the_files_of_scores_say(tmp_path):
    paths = RunPaths(tmp_path / "mine").create()
    for label, mean in (("base", 0.0), ("trained", 0.5)):
        found = made_score(mean, 0.1, forks=4, positions=8, source_games=8)
        write_score(paths, made_record(label, found, opponents="mover", policy_version=2))
    paths.settings.write_text(
        json.dumps({"steps": 2, "cache": {"from_run": "night", "from_groups": 16, "on_policy_share": 0.25}})
    )
    page = result_page(paths, {"steps": 2})
    assert "run night reached them in its first 16 start groups" in page
    assert "The intervals do not overlap: training helped." in page and str(paths.root) in page
    assert f"`entente view {paths.root.name} --step 2 --runs-root " in page
    assert "trained against mover: +0.50 centres, 95 % interval [+0.40, +0.60]; 4 forks of 8 positions" in page
