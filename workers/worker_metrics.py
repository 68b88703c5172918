"""A worker's Prometheus page: its engine's counts, seconds of queue, prefill and decode, and its GPUs.

Each worker has its own registry. vLLM's series, if the engine keeps them, come from the process's registry.
"""

from collections.abc import Iterator

from prometheus_client import CONTENT_TYPE_LATEST, REGISTRY, CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from inference.engine import EngineStats
from records.generation import Generation
from telemetry.nvml import FIGURES, Nvml

CONTENT_TYPE = CONTENT_TYPE_LATEST
_COUNTED = {
    "requests": "Requests admitted",
    "prompt_tokens": "Prompt tokens",
    "cached_tokens": "Prompt tokens found in the prefix cache",
    "completion_tokens": "Completion tokens",
    "drawn_tokens": "Completion tokens that took a row of a forward pass",
    "forced_tokens": "Completion tokens that had a single legal id",
    "engine_steps": "Forward passes",
    "preemptions": "Requests put back because the key-value cache was full",
}
_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100)


class WorkerMetrics:
    """Series of one worker."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._stats = _Stats()
        self._registry.register(self._stats)
        self._registry.register(_Gpus())
        self._stages = {
            stage: Histogram(
                f"entente_{stage}_seconds", f"Seconds of a request's {stage}", buckets=_SECONDS, registry=self._registry
            )
            for stage in ("queue", "prefill", "decode")
        }
        self._refusals = Counter("entente_refusals", "Requests not answered, by kind", ["kind"], registry=self._registry)

    def answered(self, generation: Generation) -> None:
        """Record an answered request."""
        for stage, ms in (
            ("queue", generation.cost.queue_ms), ("prefill", generation.cost.prefill_ms), ("decode", generation.cost.decode_ms)
        ):  # fmt: skip
            self._stages[stage].observe(1e-3 * ms)

    def refused(self, kind: str) -> None:
        """Count a refused request."""
        self._refusals.labels(kind).inc()

    def text(self, stats: EngineStats, restarts: int) -> bytes:
        """All series, in Prometheus's text format."""
        self._stats.now, self._stats.restarts = stats, restarts
        return generate_latest(self._registry) + generate_latest(REGISTRY)


class _Stats(Collector):
    """The engine's counts at the last read."""

    def __init__(self) -> None:
        self.now: EngineStats | None = None
        self.restarts = 0

    def collect(self) -> Iterator[Metric]:
        if self.now is None:
            return
        for name, meaning in _COUNTED.items():
            yield CounterMetricFamily(f"entente_{name}", meaning, value=getattr(self.now, name))
        yield CounterMetricFamily("entente_engine_restarts", "Engines built again after one failed", value=self.restarts)
        yield GaugeMetricFamily("entente_running", "Requests in flight", value=self.now.running)
        yield GaugeMetricFamily("entente_policy_version", "Newest version served", value=self.now.policy_version)


class _Gpus(Collector):
    """The machine's GPUs, read with each page; hardware counters cover the time since the previous page."""

    def __init__(self) -> None:
        self._nvml: Nvml | None = None

    def describe(self) -> Iterator[Metric]:
        """Nothing, so that registering the collector does not read devices."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        self._nvml = self._nvml or Nvml()
        readings = self._nvml.read() if len(self._nvml) else {}
        for name, meaning in FIGURES.items():
            values = {device: reading[name] for device, reading in readings.items() if name in reading}
            if values:
                family = GaugeMetricFamily(f"entente_gpu_{name}", f"GPU: {meaning}", labels=["device"])
                for device, value in values.items():
                    family.add_metric([device], value)
                yield family
