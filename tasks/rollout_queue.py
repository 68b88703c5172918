"""Plays the start groups of a run's steps, at most `pipeline.buffer_depth` steps ahead of the step that trains.

    depth   while step s trains                      a step begins when
    0       nothing is played                        all its own start groups are played
    1       those of step s + 1, by version s - 1    all its own start groups are played
    2..     those of steps up to s + depth           enough start groups are ready, from any steps

With depth 0 or 1 nothing depends on measured time, so two CPU runs with the same seed are identical. With depth 1 this needs
two rules: rollouts played ahead are published only after the training step has selected its rows, and a new version is served
only between the rollouts of two steps. A task that fails after its retries stops the run. A start-group number always means
the same position; a published one is never played again (`play.py`).
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self

from entente.records.policy_version import BASE, PolicyVersion
from entente.rollouts.figures import Figures, rollout_figures
from entente.rollouts.groups import GroupRange
from entente.settings.run_settings import DEEPEST_BUFFER, RunSettings
from entente.telemetry.errors import DataError
from entente.telemetry.progress import reporter
from storage.adapters import read_adapter
from storage.ledger import ledger_path, ledgers_after
from storage.shards import LOCAL_PRODUCER, Coverage, coverage, shard_path
from tasks.open_objects import OpenRun


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRollouts:
    reports: tuple[Figures, ...]
    """Figures of the tasks that ended since the previous step."""
    ready_share: float
    """Fraction of the step's own start groups that were ready at the request."""
    queue: dict[str, float]
    """Registered `queue/` metrics."""


RANGES_AT_ONCE = 4
"""Ranges of groups that a process plays at once; their requests share the batches of one engine."""


def groups_per_task(settings: RunSettings) -> int:
    """Start groups of a rollout task: a step's, divided by the number of rollout processes. With depth 0 or 1 a task has all
    of them, for reproducible batches; else a quarter, because a step may start before all its own groups are played."""
    pipeline = settings.pipeline
    processes = pipeline.dask_workers if pipeline.task_runner == "dask" else 1
    parts = processes * (1 if pipeline.buffer_depth <= 1 else RANGES_AT_ONCE)
    return -(-settings.rollouts.start_groups // parts)


class RolloutQueue:
    """Starts rollouts, collects them for each step, and publishes trained versions. An async context manager around the steps."""

    def __init__(
        self,
        resources: OpenRun,
        play: Callable[[GroupRange], Awaitable[Figures]],
        *,
        depth: int,
        last_step: int,
        groups_per_task: int,
        step_done: int = 0,
        logged: Mapping[int, Mapping[str, float]] | None = None,
    ) -> None:
        """`play` plays and publishes a range of groups, except published ones; it is idempotent. `logged`: the metrics of the
        steps before a resume."""
        self._resources, self._play, self._depth, self._last_step = resources, play, depth, last_step
        self._groups_per_task = groups_per_task
        self._wanted = resources.rollouts.start_groups
        self._begun = step_done
        """Newest step with started groups."""
        depths = {step: int(figures.get("queue/depth", depth)) for step, figures in (logged or {}).items()}
        self._logged_to = max((step + before for step, before in depths.items() if before > 1), default=0)
        """Newest step whose published start groups are in the metrics: a deeper buffer logged them when they were played."""
        self._held: asyncio.Future[PolicyVersion] | None = None  # version to serve before the rollouts of the next step
        self._publishing: asyncio.Task[None] | None = None
        self._in_flight: dict[asyncio.Future[Figures], GroupRange] = {}
        self._reports: list[Figures] = []
        self._ready = 0
        self._expired: int | None = None  # total of the run; None before the first request to the trainer

    @property
    def in_step(self) -> bool:
        """True if each step trains on exactly its own start groups."""
        return self._depth <= 1

    # -- what the flow calls, in this order ------------------------------------------------------------------------------

    async def take(self, step: int) -> StepRollouts:
        """Wait until `step` can be trained; raises the error of a rollout task that failed after its retries."""
        self._begin_steps(step)
        missing = sum(each.count for task, each in self._in_flight.items() if each.step == step and not task.done())
        expired = await self._collect(step)
        await self._publish_held(at_once=False)
        reports, self._reports = tuple(self._reports), []
        in_flight = sum(group_range.count for group_range in self._in_flight.values())
        queue = {"queue/depth": float(self._depth), "queue/in_flight": float(in_flight)}
        if not self.in_step:  # else the trainer was not asked
            queue |= {"queue/ready": float(self._ready), "queue/expired": float(expired)}
        return StepRollouts(reports=reports, ready_share=1 - missing / self._wanted, queue=queue)

    def play_ahead(self, step: int) -> None:
        self._begin_steps(min(step + self._depth, self._last_step), while_training=step)

    async def hand_over(self, saved: asyncio.Future[PolicyVersion], *, at_once: bool) -> None:
        """Publish a trained version to the engines, once the trainer has saved it; with depth 1, after the rollouts of the
        previous version. With `at_once` it returns only when the engines serve it, even if rollouts in flight must finish
        first."""
        if self._depth != 1:
            await self._publish(saved, at_once=at_once or not self._depth)
            return
        self._held = saved
        if at_once:
            await self.all_played()
            await self._publish_held(at_once=True)

    async def catch_up(self, step: int) -> None:
        """After a resume, serve its version `step`; with depth 1 after the rollouts that the version before it plays."""
        if self._held is not None:
            self.play_ahead(step)
            await self.all_played()
            await self._publish_held(at_once=True)

    async def served(self) -> None:
        """Wait until the engines serve the newest version that rollouts may sample from; raises the error of its publication."""
        publishing, self._publishing = self._publishing, None
        if publishing is not None:
            await publishing

    async def all_played(self) -> None:
        await asyncio.gather(*self._in_flight, return_exceptions=True)

    # -- publishing: versions in order, each to all engines before the next; errors surface at the next wait --------------------

    async def _publish(self, saved: asyncio.Future[PolicyVersion], *, at_once: bool) -> None:
        await self.served()
        self._publishing = asyncio.create_task(self._serve(saved))
        if at_once:
            await self.served()

    async def _serve(self, saved: asyncio.Future[PolicyVersion]) -> None:
        await self._resources.serve(await saved)

    async def _publish_held(self, *, at_once: bool) -> None:
        held, self._held = self._held, None
        if held is not None:
            await self._publish(held, at_once=at_once)

    # -- starting and collecting -----------------------------------------------------------------------------------------

    def _begin_steps(self, last: int, while_training: int | None = None) -> None:
        held = None
        if self.in_step and while_training is not None:
            held = ledger_path(self._resources.paths, while_training).resolve()  # a worker of a cluster works in another folder
        while self._begun < last:
            self._begun += 1
            for first, count in self._missing(self._begun):
                group_range = GroupRange(first_group=first, count=count, step=self._begun, after=held)
                self._in_flight[asyncio.ensure_future(self._play_by_newest(group_range))] = group_range

    async def _play_by_newest(self, group_range: GroupRange) -> Figures:
        """With depth 1 a step is played by one version, so its rollouts wait for the engines; the training step does not."""
        publishing = self._publishing
        if self._depth == 1 and publishing is not None:
            await asyncio.wait((publishing,))  # not cancelled with this rollout
            publishing.result()
        return await self._play(group_range)

    def _missing(self, step: int) -> Iterable[tuple[int, int]]:
        """(first group, count) of each task of a step. Skips groups that are already in shards, as after a resume."""
        if ledger_path(self._resources.paths, step).exists():
            return []  # the rows are selected already, and the trainer will use exactly these
        paths, first, named = self._resources.paths, (step - 1) * self._wanted, set[str]()
        if any(shard_path(paths, LOCAL_PRODUCER, number).exists() for number in range(first, first + self._wanted)):
            # Earlier steps may have trained on groups of this one, also if the buffer was deeper before the run was resumed.
            ledgers = ledgers_after(paths, step - 1 - DEEPEST_BUFFER)
            named.update(name for rows in ledgers for name in rows["shard"].unique().to_pylist())
        covered = coverage(paths, LOCAL_PRODUCER, first, self._wanted, named)
        self._note_published(step, covered)
        size = self._groups_per_task
        return [
            (first + offset, min(size, count - offset)) for first, count in covered.missing for offset in range(0, count, size)
        ]

    def _note_published(self, step: int, covered: Coverage) -> None:
        for sentence in covered.set_aside:
            reporter().say(f"set aside, to be played again: {sentence}")
        # Else an earlier step has logged the rollouts that were played ahead of it.
        if step > self._logged_to and (covered.published or covered.set_aside):
            missing = sum(count for _, count in covered.missing)
            self._reports.append(rollout_figures(covered, self._wanted - missing, self._resources.tokens.thinking))

    async def _collect(self, step: int) -> int:
        """Wait for the rollouts of `step`. Returns the number of advantage groups that became too old since the previous step."""
        before = self._expired
        while True:
            self._take_reports()
            enough = not self.in_step and await self._count_ready(step)
            if enough or all(group_range.step > step for group_range in self._in_flight.values()):
                return 0 if before is None or self._expired is None else self._expired - before
            await asyncio.wait(self._in_flight, return_when=asyncio.FIRST_COMPLETED)

    def _take_reports(self) -> None:
        """Collect the reports of finished tasks; raises the error of a failed one."""
        for task in [task for task in self._in_flight if task.done()]:
            del self._in_flight[task]
            self._reports.append(task.result())

    async def _count_ready(self, step: int) -> bool:
        """Ask the trainer, which selects the rows, whether enough start groups are ready for a step."""
        eligible = await asyncio.to_thread(self._resources.trainer.eligible, step, self._wanted)
        self._ready, self._expired = eligible.start_groups, eligible.expired
        return self._ready >= self._wanted

    # -- opening and closing ---------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        newest = self._resources.resume_point.published
        if newest == BASE:
            return self
        saved = asyncio.get_running_loop().create_future()
        saved.set_result(newest)
        if self._depth == 1 and await self._serve_the_one_before(newest):
            self._held = saved
        else:
            await self._publish(saved, at_once=True)
        return self

    async def _serve_the_one_before(self, newest: PolicyVersion) -> bool:
        """Serve the version that would have played the next step's start groups. Returns False if it was removed."""
        before = BASE  # the engine here starts with it; workers of a cluster read which version to serve
        if newest.version > 1:
            try:
                before = await asyncio.to_thread(read_adapter, self._resources.paths, newest.version - 1)
            except DataError as error:
                reporter().say(
                    f"the rollouts of step {newest.version + 1} are sampled by version {newest.version} instead of the previous "
                    f"one: {error}"
                )
                return False
        await self._resources.serve(before)
        return True

    async def __aexit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        """Cancel rollouts in flight. On success serve the newest version, which evaluation then plays."""
        try:
            if kind is None:
                await self._publish_held(at_once=True)
                await self.served()
            else:
                unpublished: list[asyncio.Future[Any]] = [each for each in (self._publishing, self._held) if each is not None]
                for each in unpublished:
                    each.cancel()
                await asyncio.gather(*unpublished, return_exceptions=True)
        finally:
            for task in self._in_flight:
                task.cancel()
            await asyncio.gather(*self._in_flight, return_exceptions=True)
            self._in_flight.clear()
