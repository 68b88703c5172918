"""`paper`: the pipeline with the figures of a GPU, simulated with 1, 2, 4, 8 and 64 inference workers; measures nothing.

A discrete-event simulation of a closed loop. A fork first waits for a game process, which prepares one decision at a time, then
for the inference worker with the fewest requests; a worker shares its rate among its requests. A fork with all its decisions is
finished, and another one starts as soon as the staleness budget allows. The trainer takes the forks of a step when they are
finished. Times are constants, so a run repeats exactly.

Every figure is a field of `Hardware` or `Work` with its source: a data sheet, a count, or an assumption. Figures that other
benchmarks measured in the same sitting replace some of them (`benchmarks/measured_figures.py`). The simulation shows where the
bottleneck moves; it does not replace a measurement. Tests compare it with the utilisation law.
"""

import heapq
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TypeVar

from benchmarks.measured_figures import SOURCES
from benchmarks.outcome import Outcome
from benchmarks.worker_scaling import Rates, Worker
from telemetry.errors import InputError
from telemetry.progress import reporter

WORKERS = (1, 2, 4, 8, 64)
STATIONS = ("games", "workers", "trainer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """An inference worker, the GPUs of the trainer, and the processes that play the games."""

    parameters: float = 7.6e9
    """Weights of the model (Qwen2.5-7B, its model card)."""
    bytes_each: float = 2.0
    """Bytes of a weight (bfloat16)."""
    flops: float = 989e12
    """Dense bfloat16 operations a second (NVIDIA, data sheet of the H100 SXM)."""
    bandwidth: float = 3.35e12
    """Bytes a second of its memory (same sheet)."""
    compute_share: float = 0.4
    """Share of `flops` that prefill and training reach (assumed: a usual figure)."""
    bandwidth_share: float = 0.6
    """Share of `bandwidth` that decoding reaches (assumed: a usual figure)."""
    step_overhead_s: float = 0.004
    """Seconds of an engine step outside the GPU: scheduling, sampling, the mask (assumed)."""
    game_s: float = 0.0022
    """Seconds of a game process for a decision, with its HTTP (assumed; `bench decode` measures client_ms_per_decision_http)."""
    game_processes: int = 1
    """Processes that play games: one in a flow, more with producers."""
    trainer_cards: int = 1
    """GPUs that share the groups of a step, each with the whole model (training.processes)."""
    publish_s: float = 1.0
    """Seconds from the end of a step to its version in every worker (assumed, for an adapter of 81 MB)."""
    orchestration_s: float = 0.010
    """Seconds of Prefect in the flow for a step (counted over laptop runs by `bench orchestration`)."""

    @property
    def matrix_rate(self) -> float:
        """Operations a second that prefill and training reach."""
        return self.flops * self.compute_share


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The work of a step; the defaults are those of the presets for one GPU."""

    forks_a_step: int = 128
    """16 start groups of 8 forks."""
    decisions_a_fork: int = 9
    """Plies of three years with one power in each fork (9 phases in 3 years were measured)."""
    uncached_tokens: float = 36.0
    """Uncached prompt tokens of a decision (counted over a laptop run with the own line last, so with a tiny tokenizer)."""
    completion_tokens: float = 24.0
    """Tokens drawn for a decision (23.6 a call in the old system)."""
    sequence_tokens: float = 464.0
    """Prompt and completion in the trainer: 440 and 24 (assumed: those of the made-up rows of `bench trainer`)."""
    unique_share: float = 0.19
    """Share of the tokens that the model computes (unique_token_share_recorded of `bench trainer`)."""
    trained_share: float = 0.8
    """Share of the decisions in groups with spread (128 of about 165 in laptop runs)."""
    budget_steps: int = 2
    """Steps by which forks may be ahead of the trainer (storage.max_policy_lag)."""


_Given = TypeVar("_Given", Hardware, Work)


def worker_rates(hardware: Hardware, work: Work) -> Rates:
    """Decisions a second of a worker by decisions in flight.

    Prefill takes its operations. A decoding step takes its overhead, and the larger of reading all weights and computing.
    """

    def rate(in_flight: int) -> float:
        prefill_s = work.uncached_tokens * 2 * hardware.parameters / hardware.matrix_rate
        read_s = hardware.parameters * hardware.bytes_each / (hardware.bandwidth * hardware.bandwidth_share)
        compute_s = in_flight * 2 * hardware.parameters / hardware.matrix_rate
        decode_s = work.completion_tokens * (max(read_s, compute_s) + hardware.step_overhead_s)
        return in_flight / (in_flight * prefill_s + decode_s)

    return Rates({in_flight: rate(in_flight) for in_flight in (1, 2, 4, 8, 16, 32, 64, 128, 256)})


def trainer_s(hardware: Hardware, work: Work) -> float:
    """Seconds of a step: four operations for each parameter and unique token, as with LoRA, publishing, and orchestration."""
    unique = work.forks_a_step * work.decisions_a_fork * work.trained_share * work.sequence_tokens * work.unique_share
    return (
        unique * 4 * hardware.parameters / hardware.matrix_rate / hardware.trainer_cards
        + hardware.publish_s
        + hardware.orchestration_s
    )


@dataclass(slots=True, kw_only=True)
class Simulation:
    """The result of a simulation."""

    servers: dict[str, int]
    """Servers of each station."""
    busy_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STATIONS, 0.0))
    """Server-seconds at work by station. A worker at half of its best rate counts as half."""
    seconds: float = 0.0
    steps: int = 0
    decisions: int = 0
    lags: list[int] = field(default_factory=list)
    """Policy lag of the oldest decision of each trained fork."""

    @property
    def decisions_per_s(self) -> float:
        """Decisions drawn a second."""
        return self.decisions / self.seconds

    def busy_share(self, station: str) -> float:
        """Share of the time that a server of this station works."""
        return self.busy_s[station] / (self.seconds * self.servers[station])

    @property
    def bottleneck(self) -> str:
        """The station with the largest share."""
        return max(STATIONS, key=self.busy_share)


def simulate(
    workers: int, *, rates: Rates, work: Work, game_s: float, game_processes: int, step_s: float, steps: int
) -> Simulation:
    """Simulate `steps` steps; the first ones fill the pipeline and count as well.

    Raises:
        InputError: there are no workers or no steps.
    """
    if workers < 1 or steps < 1:
        raise InputError(f"There is no pipeline of {workers} workers over {steps} steps: at least 1 of each.")
    best_rate, pool = rates(1 << 30), [Worker(rates) for _ in range(workers)]
    found = Simulation(servers={"games": game_processes, "workers": workers, "trainer": 1})
    now, trained_at = 0.0, float("inf")
    left: list[int] = []  # decisions left, by fork
    versions: list[int] = []  # policy version at the start, by fork
    waiting: deque[int] = deque()  # forks that wait for a game process
    playing: list[tuple[float, int]] = []  # end of the game process's work, and fork
    finished: deque[int] = deque()
    batch: list[int] = []

    def start_forks() -> None:
        while len(left) - found.steps * work.forks_a_step < work.forks_a_step * (1 + work.budget_steps):
            waiting.append(len(left))
            left.append(work.decisions_a_fork)
            versions.append(found.steps)

    start_forks()
    while found.steps < steps:
        while waiting and len(playing) < game_processes:
            heapq.heappush(playing, (now + game_s, waiting.popleft()))
        if not batch and len(finished) >= work.forks_a_step:
            batch = [finished.popleft() for _ in range(work.forks_a_step)]
            trained_at = now + step_s
        ends = [worker.next_end() for worker in pool]
        until = min(min(ends), trained_at, playing[0][0] if playing else float("inf"))
        found.busy_s["games"] += len(playing) * (until - now)
        found.busy_s["workers"] += sum(rates(len(worker)) for worker in pool if len(worker)) / best_rate * (until - now)
        found.busy_s["trainer"] += bool(batch) * (until - now)
        now = until
        for worker in pool:
            worker.advance(now)
        if batch and now >= trained_at:
            found.lags += [found.steps - versions[fork] for fork in batch]
            batch, trained_at = [], float("inf")
            found.steps += 1
            start_forks()
        elif playing and now >= playing[0][0]:
            min(pool, key=len).add(heapq.heappop(playing)[1])
        else:
            fork = pool[ends.index(min(ends))].pop()
            found.decisions += 1
            left[fork] -= 1
            (waiting if left[fork] else finished).append(fork)
    found.seconds = now
    return found


def _with(given: _Given, measured: Mapping[str, float]) -> _Given:
    return replace(given, **{name: value for name, value in measured.items() if hasattr(given, name)})


def bench_paper(
    *,
    hardware: Hardware | None = None,
    work: Work | None = None,
    workers: Sequence[int] = WORKERS,
    steps: int = 8,
    measured: Mapping[str, float] = MappingProxyType({}),
) -> Outcome:
    """Simulate each number of workers and report the bottleneck.

    Args:
        measured: values of fields of `hardware` and `work` that replace theirs, as `measured_figures.read_measured` returns them.
    """
    hardware, work = _with(hardware or Hardware(), measured), _with(work or Work(), measured)
    rates, step_s = worker_rates(hardware, work), trainer_s(hardware, work)
    metrics = {"measured_figures": float(len(measured)), "trainer_s_a_step": step_s}
    for name, source in SOURCES.items():
        metrics[name] = getattr(hardware if hasattr(hardware, name) else work, name)
        reporter().say(f"{name} {metrics[name]:.4g}: {f'measured, {source.text}' if name in measured else 'assumed'}")
    for number in workers:
        result = simulate(
            number,
            rates=rates,
            work=work,
            game_s=hardware.game_s,
            game_processes=hardware.game_processes,
            step_s=step_s,
            steps=steps,
        )
        busy = {name: result.busy_share(name) for name in STATIONS}
        metrics |= {
            f"steps_per_hour_{number}_workers": 3600 * result.steps / result.seconds,
            **{f"{name}_busy_{number}_workers": share for name, share in busy.items()},
        }
        shares = ", ".join(f"{name} {share:.0%}" for name, share in busy.items())
        reporter().say(
            f"{number} workers: {metrics[f'steps_per_hour_{number}_workers']:.0f} steps an hour; busy: {shares}; "
            f"{result.bottleneck} bound"
        )
    return Outcome(benchmark="paper", metrics=metrics, targets={})
