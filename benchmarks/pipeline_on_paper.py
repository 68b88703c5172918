"""`paper`: the pipeline with a GPU's figures, simulated: how far 1, 2, 4, 8 and 64 inference workers carry, and what stops them.

A discrete-event simulation of a closed loop, nothing measured. Forks ask a game process (one decision's Python at a time, first
come, first served), then the inference worker with the fewest in flight, which shares itself among its requests and draws the
more a second the more it has. A fork that has made its decisions is a finished game, and another begins as soon as the staleness
budget leaves room. The trainer takes a step's decisions when they are there. Times are exact: nothing is sampled, a run repeats.

Every figure of the hardware is a field of `Hardware` or `Work` with its source. Those of a GPU are data sheets and arithmetic, no
substitute for a run on one: what the simulation is for is where the bottleneck moves. That it keeps its books (Little's law, the
utilisation bounds) is tested.
"""

import heapq
import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.outcome import Outcome
from benchmarks.worker_scaling import Rates, _Worker
from telemetry.errors import InputError
from telemetry.progress import reporter

WORKERS = (1, 2, 4, 8, 64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """An inference worker, the trainer's card, and the processes that play the games."""

    parameters: float = 7.6e9
    """Weights of the model: Qwen2.5-7B, its model card."""
    bytes_each: float = 2.0
    """Of a weight in bfloat16."""
    flops: float = 989e12
    """Dense bfloat16 operations a second: NVIDIA's data sheet of the H100 SXM."""
    bandwidth: float = 3.35e12
    """Bytes a second of its memory: the same sheet."""
    compute_share: float = 0.4
    """Part of the operations that prefill and training reach: a usual figure, unmeasured here."""
    bandwidth_share: float = 0.6
    """Part of the bandwidth that decoding reaches: the same."""
    step_overhead_s: float = 0.004
    """Seconds of an engine step beside the card's own work: scheduling, sampling, the mask; unmeasured on a GPU."""
    game_s: float = 0.001
    """Seconds of one game process for a decision: `bench decode` measures client_ms_per_decision, about a millisecond."""
    game_processes: int = 1
    """Processes that play games; a flow has one, producers more."""
    trainer_cards: int = 1
    """Cards that share a step's groups, each with the whole model (training.processes)."""
    publish_s: float = 1.0
    """Seconds from a step's end to its version in every worker: an 81 MB adapter, on paper."""

    @property
    def matrix_rate(self) -> float:
        """Operations a second that are reached."""
        return self.flops * self.compute_share


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a step is made of; the defaults are the `single-gpu` preset's shape."""

    forks_a_step: int = 128
    """16 start groups of 8 forks."""
    decisions_a_fork: int = 9
    """Plies of three years, one power of each fork: `seed-system.md` measured 9 phases in 3 years."""
    uncached_tokens: float = 60.0
    """Prompt tokens of a decision that no cache holds: `bench decode` saw 46, a general tokenizer takes somewhat more."""
    completion_tokens: float = 24.0
    """Tokens drawn: 23.6 a call in the figures of the old system."""
    sequence_tokens: float = 464.0
    """Prompt and completion, as the trainer sees them: 440 and 24."""
    unique_share: float = 0.15
    """Part of them that passes the model: `bench trainer`, groups of 8."""
    trained_share: float = 0.8
    """Part of the decisions in groups with spread: seen in laptop runs, 128 of about 165."""
    budget_steps: int = 2
    """Steps' worth of finished and unfinished forks that may be ahead of the trainer: storage.max_policy_lag."""


def worker_rates(hardware: Hardware, work: Work) -> Rates:
    """Decisions a second of a worker by decisions in flight: prefill by operations, decoding by the larger of reading all
    weights and computing, and a step's overhead."""

    def rate(in_flight: int) -> float:
        prefill_s = work.uncached_tokens * 2 * hardware.parameters / hardware.matrix_rate
        read_s = hardware.parameters * hardware.bytes_each / (hardware.bandwidth * hardware.bandwidth_share)
        compute_s = in_flight * 2 * hardware.parameters / hardware.matrix_rate
        decode_s = work.completion_tokens * (max(read_s, compute_s) + hardware.step_overhead_s)
        return in_flight / (in_flight * prefill_s + decode_s)

    return Rates({in_flight: rate(in_flight) for in_flight in (1, 2, 4, 8, 16, 32, 64, 128, 256)})


def trainer_s(hardware: Hardware, work: Work) -> float:
    """Seconds of a step: twice forward and twice backward for each parameter and unique token, as LoRA costs, and publishing."""
    unique = work.forks_a_step * work.decisions_a_fork * work.trained_share * work.sequence_tokens * work.unique_share
    return unique * 4 * hardware.parameters / hardware.matrix_rate / hardware.trainer_cards + hardware.publish_s


@dataclass(slots=True, kw_only=True)
class Station:
    """One kind of server, and what passed it."""

    servers: int
    busy_s: float = 0.0
    """Server-seconds at work; a worker that draws at half of its best rate counts as half at work."""
    present_s: float = 0.0
    """Integral of those who are there, waiting or served."""
    stays_s: float = 0.0
    """Sum of the stays of those who left."""
    left: int = 0

    def over(self, seconds: float, *, busy: float, present: int) -> None:
        """So many seconds went by."""
        self.busy_s += busy * seconds
        self.present_s += present * seconds


@dataclass(slots=True, kw_only=True)
class Seen:
    """What a simulation came to."""

    seconds: float
    steps: int
    decisions: int
    games: Station
    workers: Station
    trainer: Station
    lags: list[int] = field(default_factory=list)
    """Versions between the oldest draw of a fork and the step that trained on it, one for each fork."""

    @property
    def decisions_per_s(self) -> float:
        return self.decisions / self.seconds

    def busy_share(self, name: str) -> float:
        """Part of the time that a server of this station works."""
        station: Station = getattr(self, name)
        return station.busy_s / (self.seconds * station.servers)

    @property
    def bottleneck(self) -> str:
        """The station that works most of the time."""
        return max(("games", "workers", "trainer"), key=self.busy_share)


@dataclass(slots=True)
class _Life:
    """A fork on its way."""

    left: int
    version: int
    since: float


def simulate(workers: int, *, rates: Rates, work: Work, game_s: float, game_processes: int, step_s: float, steps: int) -> Seen:
    """Play `steps` steps; the first ones fill the pipeline and count like the others."""
    if workers < 1 or steps < 1:
        raise InputError(f"There is no pipeline of {workers} workers over {steps} steps: at least 1 of each.")
    best = rates(1 << 30)
    pool, most = [_Worker(rates) for _ in range(workers)], work.forks_a_step * (1 + work.budget_steps)
    seen = Seen(
        seconds=0.0,
        steps=0,
        decisions=0,
        games=Station(servers=game_processes),
        workers=Station(servers=workers),
        trainer=Station(servers=1),
    )
    now, lives, numbers = 0.0, {}, itertools.count()
    asking: deque[int] = deque()
    playing: list[tuple[float, int]] = []
    finished: deque[_Life] = deque()
    trains_until, batch, came = float("inf"), [], deque()

    def begin() -> None:
        while len(lives) + len(finished) + len(batch) < most:
            number = next(numbers)
            lives[number] = _Life(left=work.decisions_a_fork, version=seen.steps, since=now)
            asking.append(number)

    begin()
    while seen.steps < steps:
        while asking and len(playing) < game_processes:
            heapq.heappush(playing, (now + game_s, asking.popleft()))
        if not batch and len(finished) >= work.forks_a_step:
            batch = [finished.popleft() for _ in range(work.forks_a_step)]
            trains_until = now + step_s
            came.append(now)
        ends = [worker.next_end() for worker in pool]
        then = min(min(ends), trains_until, playing[0][0] if playing else float("inf"))
        gone = then - now
        seen.games.over(gone, busy=len(playing), present=len(playing) + len(asking))
        busy = sum(rates(len(worker)) for worker in pool if len(worker)) / best
        seen.workers.over(gone, busy=busy, present=sum(map(len, pool)))
        seen.trainer.over(gone, busy=float(bool(batch)), present=int(bool(batch)))
        now = then
        for worker in pool:
            worker.advance(now)
        if batch and now >= trains_until:
            seen.lags += [seen.steps - life.version for life in batch]
            _leave(seen.trainer, now - came.popleft())
            batch, trains_until = [], float("inf")
            seen.steps += 1
            begin()
        elif playing and now >= playing[0][0]:
            number = heapq.heappop(playing)[1]
            _leave(seen.games, now - lives[number].since)
            lives[number].since = now
            min(pool, key=len).add(number)
        else:
            number = pool[ends.index(min(ends))].pop()
            life = lives[number]
            _leave(seen.workers, now - life.since)
            seen.decisions += 1
            life.left, life.since = life.left - 1, now
            if life.left:
                asking.append(number)
            else:
                finished.append(lives.pop(number))
    seen.seconds = now
    return seen


def _leave(station: Station, stay_s: float) -> None:
    station.left += 1
    station.stays_s += stay_s


def bench_paper(
    *, hardware: Hardware | None = None, work: Work | None = None, workers: Sequence[int] = WORKERS, steps: int = 8
) -> Outcome:
    """Simulate each number of workers, and say where each is stopped."""
    hardware, work = hardware or Hardware(), work or Work()
    rates, step_s = worker_rates(hardware, work), trainer_s(hardware, work)
    metrics = {
        "worker_decisions_per_s_1_in_flight": rates(1),
        "worker_decisions_per_s_128_in_flight": rates(128),
        "games_decisions_per_s": hardware.game_processes / hardware.game_s,
        "trainer_s_a_step": step_s,
        "trainer_decisions_per_s": work.forks_a_step * work.decisions_a_fork / step_s,
    }
    for number in workers:
        seen = simulate(
            number,
            rates=rates,
            work=work,
            game_s=hardware.game_s,
            game_processes=hardware.game_processes,
            step_s=step_s,
            steps=steps,
        )
        busy = {name: seen.busy_share(name) for name in ("games", "workers", "trainer")}
        metrics |= {
            f"decisions_per_s_{number}_workers": seen.decisions_per_s,
            f"steps_per_hour_{number}_workers": 3600 * seen.steps / seen.seconds,
            **{f"{name}_busy_{number}_workers": share for name, share in busy.items()},
            f"lag_max_{number}_workers": float(max(seen.lags, default=0)),
        }
        shares = ", ".join(f"{name} {share:.0%}" for name, share in busy.items())
        reporter().say(
            f"{number} workers: {3600 * seen.steps / seen.seconds:.0f} steps an hour; busy: {shares}; {seen.bottleneck} bound"
        )
    return Outcome(benchmark="paper", metrics=metrics, targets={})
