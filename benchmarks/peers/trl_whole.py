"""`peers --whole-s`: TRL's whole GRPO trainer on the game as a reward function, for as many CPU seconds as a run of ours took.

It has the positions of a run's steps, in their order, and the run's prompts, groups, forks, updates, adapter and rate. An answer
is read as an endpoint's is, and played against the run's opponents to the run's horizon; the reward is the number of centres
gained. Two arms run one after the other, on one thread:

    free    draws from the whole vocabulary; a unit without a legal order in the answer holds
    masked  draws under our legal tables

An answer is one decision, and so is a fork of the preset `lm`, which ends at the first count of centres. What else is decided in
a fork, such as a retreat, the player `random` decides. At last the base and the adapters of both arms are scored as a run scores
its versions: under our mask, on the same held-out positions.
"""

import asyncio
import json
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.laptop_run import cache_of, model_of
from benchmarks.outcome import Outcome
from benchmarks.peers.bench import ask, check_python, start, trl_settings
from entente.decoding.codec import Codec
from entente.decoding.legal_table import LegalTable
from entente.evaluation.strength import Score, measure_strength
from entente.game.board import POWERS, Board
from entente.game.legal import LegalOrders
from entente.game.players import player
from entente.game.prompts import board_text, power_text
from entente.game.scores import components
from entente.game.snapshot import Snapshot
from entente.inference.adapter_check import version_in
from entente.inference.torch_engine import TorchEngine
from entente.players.deciders import DecisionRequest
from entente.players.opponents import draw_opponents
from entente.players.read_answer import read_answer
from entente.players.seeds import dice
from entente.rollouts.fork import POLICY, ForkPlan, Tokens, play_fork
from entente.rollouts.roll_out import SETTLED_YEARS
from entente.rollouts.settings import RolloutSettings
from entente.settings.run_settings import RunSettings
from entente.telemetry.errors import EngineError, InputError
from entente.telemetry.progress import reporter
from state_cache.sampling import sample_start_positions
from state_cache.store import StateCache

ARMS = ("free", "masked")
_ROWS_A_FORWARD = 4
"""With 8, TRL's default, an arm takes 8 GiB or more with SmolLM2."""
_ANSWER = "answer"


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A start position and the power that decides there."""

    snapshot: Snapshot
    power: str
    legal: LegalOrders
    text: str
    """The prompt."""
    ids: list[int]
    """Its token ids."""
    table: LegalTable


def questions_of(settings: RunSettings, positions: Sequence[Snapshot], tokens: Tokens) -> list[Question]:
    """The decisions that the steps of a run begin with, in their order; those with a single legal order set are left out."""
    rollouts, found = settings.rollouts, []
    for step in range(1, settings.steps + 1):
        drawn = sample_start_positions(positions, rollouts.start_groups, settings.seed, step, sampling=rollouts.sampling)
        for snapshot, power in drawn:
            board = Board.restore(snapshot)
            legal = board.legal_orders().get(power)
            if legal is not None and not legal.is_forced:
                shown, own = board_text(board, power, tokens.prompts), power_text(legal, board, tokens.prompts, cue="")
                text, ids, table = tokens.form.text(shown, own), tokens.form.ids(shown, own), tokens.tables.table(legal)
                found.append(Question(snapshot=snapshot, power=power, legal=legal, text=text, ids=ids, table=table))
            board.release()
    return found


@dataclass(frozen=True, slots=True)
class _Answer:
    """Gives these orders first, then those of the player `random`."""

    orders: Sequence[str]

    async def decide(self, request: DecisionRequest) -> Sequence[str]:
        if request.ply == 0:
            return self.orders
        return player("random")(request.legal, dice(request.shared, request.board.phase, request.power), request.board)


async def reward_of(orders: Sequence[str], question: Question, rollouts: RolloutSettings, *, shared: str) -> float:
    """Centres gained by these orders; equal names `shared` give equal luck.

    Raises:
        EngineError: the fork failed.
    """
    others = [power for power in POWERS if power != question.power]
    seats = draw_opponents(shared, rollouts.opponent_table, others, by_seat=rollouts.opponents_by == "seat")
    plan = ForkPlan(
        name=shared,
        shared_name=shared,
        seats=seats | {question.power: _ANSWER},
        horizon_years=rollouts.horizon_years,
        settled_years=SETTLED_YEARS,
        last_winter=rollouts.last_winter,
        temperature=1.0,
        snapshot_id=question.snapshot.snapshot_id,
    )
    board, deciders = Board.restore(question.snapshot), {_ANSWER: _Answer(orders)}
    fork = await play_fork(plan, board, None, None, deciders=deciders, record_plies=False)
    if fork.start is None or fork.end is None or fork.status != "complete":
        raise EngineError(f"the fork of an answer failed: {fork.reason}")
    return components(fork.start, fork.end, question.power)["centres_gained"]


class Arm:
    """The rewards of one arm, and its figures."""

    def __init__(self, name: str, questions: Sequence[Question], rollouts: RolloutSettings) -> None:
        self._name, self._questions, self._rollouts = name, questions, rollouts
        self._legal, self._spread = list[bool](), list[bool]()
        self._steps = 0

    def train(self, program: "subprocess.Popen[str]") -> dict[str, float]:
        """Give TRL's program rewards until it has trained."""
        said = ask(program)
        while "texts" in said:
            said = ask(program, json.dumps(self.rewards(**said)))
        return said | {"legal_share": float(np.mean(self._legal)), "spread_share": float(np.mean(self._spread))}

    def rewards(self, texts: Sequence[str], numbers: Sequence[int], spent_s: float) -> dict[str, Any]:
        """Rewards of answers to the questions `numbers`, group after group, and the CPU seconds that they took."""
        began = time.thread_time()
        self._steps += 1
        asked = [self._questions[number] for number in numbers]
        read = [read_answer(text, question.legal) for text, question in zip(texts, asked, strict=True)]

        async def play() -> list[float]:
            # Forks of a position share their luck, as in a run.
            shared = [f"peers/{self._steps}/{number}" for number in numbers]
            played = zip(read, asked, shared, strict=True)
            return [await reward_of(orders, question, self._rollouts, shared=luck) for (orders, _), question, luck in played]

        rewards = asyncio.run(play())
        self._legal += [counts.missing == 0 for _, counts in read]
        self._spread += (np.ptp(np.reshape(rewards, (-1, self._rollouts.forks_per_group)), axis=1) > 0).tolist()
        reporter().say(f"{self._name}, step {self._steps}: reward {np.mean(rewards):+.2f}, {spent_s:.0f} CPU s so far")
        return {"rewards": rewards, "cpu_s": time.thread_time() - began}


def bench_whole(settings: RunSettings, trl_python: Path, whole_s: float) -> Outcome:
    """The figures of both arms, and the score of the base.

    Args:
        settings: settings of a run.
        trl_python: the Python of the environment that has TRL.
        whole_s: CPU seconds of each arm; it ends with the step in which they are spent, after the second one at least.

    Raises:
        InputError: there is no such environment, or nothing that TRL could be trained on.
        EntenteError: TRL's program ended.
    """
    if not whole_s > 0:
        raise InputError(f"nothing can be trained in {whole_s:g} CPU seconds: give those of a run")
    check_python(trl_python)
    model, cache = model_of(settings), cache_of(settings)
    tokens = Tokens(Codec(model), settings.prompts)
    if tokens.thinking is not None:
        raise InputError("TRL's arms answer without a thought: leave out prompts.thinking_tokens")
    questions = questions_of(settings, cache.train, tokens)
    if len(questions) < settings.rollouts.start_groups:
        raise InputError("too few of the positions ask for a decision: build a state cache with movement phases")
    with tempfile.TemporaryDirectory(prefix="entente-peers-") as folder:
        figures = _train(settings, trl_python, whole_s, model, questions, Path(folder))
        scores = asyncio.run(_scores(settings, cache, model, tokens, Path(folder)))
    for name, score in scores.items():
        found = {"score": score.mean, "score_low": score.low, "score_high": score.high}
        figures |= {f"{name}_{what}": value for what, value in found.items() if value is not None}
    return Outcome(benchmark="peers", metrics=figures, targets={})


def _train(
    settings: RunSettings, trl_python: Path, whole_s: float, model: Path, questions: Sequence[Question], folder: Path
) -> dict[str, float]:
    """Train both arms; their adapters are then in `folder`, each in a folder of its name."""
    rollouts, training = settings.rollouts, settings.training
    whole = {
        "prompts": [{"text": question.text, "ids": question.ids} for question in questions],
        "groups": rollouts.start_groups,
        "forks": rollouts.forks_per_group,
        "updates": training.updates_per_step,
        "warm_up_updates": training.warm_up_steps,  # TRL counts it in updates, and begins at a rate of 0
        "longest": max(question.table.longest for question in questions),
        "budget_s": whole_s,
    }
    names = ("offsets", "token_ids", "next_nodes")
    tables = {f"{name}_{number}": getattr(each.table, name) for number, each in enumerate(questions) for name in names}
    figures = dict[str, float]()
    np.savez(folder / "tables.npz", **tables)
    for arm in ARMS:
        own = {"whole": whole | {"masked": arm == "masked", "adapter": str(folder / arm)}}
        (folder / "settings.json").write_text(json.dumps(trl_settings(model, training, [_ROWS_A_FORWARD]) | own))
        with start(trl_python, str(folder)) as program:
            figures |= {f"{arm}_{name}": value for name, value in Arm(arm, questions, rollouts).train(program).items()}
    return figures


async def _scores(settings: RunSettings, cache: StateCache, model: Path, tokens: Tokens, folder: Path) -> dict[str, Score]:
    """The score of the base, and of the adapter of each arm."""
    engine, scores = TorchEngine(model, settings.inference, name="peers"), dict[str, Score]()
    await engine.start()
    try:
        for version, name in enumerate(("base", *ARMS)):
            if version:
                await engine.publish(version_in(folder / name, version))
            reporter().say(f"scoring {name}")
            question, opponents = settings.evaluation, settings.evaluation.opponents[0]
            scores[name] = await measure_strength(POLICY, opponents, cache.held_out, question, engine, tokens)
    finally:
        await engine.close()
    return scores
