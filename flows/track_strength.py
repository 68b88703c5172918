"""A run's strength while it trains: every `evaluation.every`-th version is measured, in its own flow run or between two steps,
and so is the version at the end of each round of `entente improve`.

A measurement that cannot be started as a flow run is reported once, and done inside the training flow instead. A point enters the
run's metrics at the step after it was measured, together with its version.
"""

import asyncio

from evaluation.score_files import ScoreRecord, TrackPoint, read_track, track_label, write_score
from evaluation.strength import POLICY
from inference.choose_engine import engine_here
from pipeline.resources import Resources
from pipeline.run_settings import RunSettings
from tasks.evaluation import evaluate_player, has_evaluation_worker, start_evaluation
from telemetry.errors import DataError
from telemetry.progress import reporter


class StrengthTrack:
    """Measures versions of a run, or starts flow runs that do, and returns the points as metrics."""

    def __init__(self, resources: Resources, settings: RunSettings) -> None:
        self._resources, self._settings = resources, settings
        self._returned: set[int] = {0, settings.steps}  # the training flow scores base and last version
        self._beside: bool | None = None
        self._expects_points = bool(settings.evaluation.every)

    def due(self, version: int) -> bool:
        """Whether this version is measured during training."""
        every = self._settings.evaluation.every
        return bool(every) and version % every == 0 and version < self._settings.steps

    async def measure(self, version: int) -> None:
        """Measure a version: in a flow run of its own that is not awaited, or here by the run's engine, which serves it."""
        self._expects_points = True
        if self._beside is None:
            self._beside = await self._can_run_beside()
        if self._beside:
            refused = await start_evaluation(self._settings.run, version, self._settings.runs_root.resolve())
            if not refused:
                return
            reporter().say(f"versions are measured between steps, because their own flow run was refused: {refused}")
            self._beside = False
        with self._resources.spans.span("evaluate"):
            await self._measure_here(version)

    def figures(self) -> dict[str, float]:
        """Metrics of the newest point that was not returned before, if any."""
        new = [point for point in self._points() if point.version not in self._returned] if self._expects_points else []
        if not new:
            return {}
        self._returned |= {point.version for point in new}
        return point_figures(new[-1])

    def point(self, version: int) -> TrackPoint | None:
        """The point of a version; None if it is not measured yet."""
        return next((point for point in self._points() if point.version == version), None)

    def _points(self) -> list[TrackPoint]:
        try:
            return read_track(self._resources.paths)
        except DataError as error:
            reporter().say(f"the strength over versions cannot be read: {error}")
            return []

    async def _can_run_beside(self) -> bool:
        wanted, inference = self._settings.evaluation.beside, self._settings.inference
        if wanted == "inside":
            return False
        if wanted == "deployment":
            return True
        # A second engine on the same GPU would run out of memory.
        shares_a_gpu = not inference.urls and engine_here(inference)[0] == "vllm"
        return not shares_a_gpu and await has_evaluation_worker()

    async def _measure_here(self, version: int) -> None:
        resources, settings = self._resources, self._settings.evaluation
        opponents = settings.opponents[0]
        score = await evaluate_player(
            f"v{version}",
            POLICY,
            opponents,
            resources.cache.held_out,
            settings,
            resources.host,
            resources.engine,
            resources.tokens,
        )
        record = ScoreRecord(
            label=track_label(version), player=POLICY, opponents=opponents, policy_version=version, settings=settings, score=score
        )
        await asyncio.to_thread(write_score, resources.paths, record)


def point_figures(point: TrackPoint) -> dict[str, float]:
    """A point as registered metrics."""
    figures = {
        "score/track": point.score.mean,
        "score/track_version": float(point.version),
    }
    if point.score.interval is not None:
        figures["score/track_low"], figures["score/track_high"] = point.score.interval
    return figures
