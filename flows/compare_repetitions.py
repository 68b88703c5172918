"""Compares a version's score and cost at several numbers of draws for each decision."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from evaluation.contestants import Contestant
from evaluation.settings import EvaluationSettings, PlaySettings
from evaluation.strength import Score
from flows.open_players import open_players
from game.snapshot import Snapshot
from storage.files import durable_write, make_directory
from storage.runs import RunPaths
from tasks.artifacts import show_table
from tasks.evaluation import evaluate_player
from telemetry.errors import InputError


async def compare_repetitions(
    paths: RunPaths,
    player: Contestant,
    runs_root: Path,
    repetitions: Sequence[int],
    held_out: Sequence[Snapshot],
    evaluation: EvaluationSettings,
) -> dict[str, Any]:
    """Score the version with each number of draws. The table is stored as `scores/repetitions/<version>.json`.

    Raises:
        InputError: a number below 1.
    """
    if min(repetitions) < 1:
        raise InputError(f"a decision is drawn at least once, not {min(repetitions)} times: give --repetitions 1 or more")
    opponents, rows = evaluation.opponents[0], []
    async with open_players([player], runs_root, PlaySettings()) as opened:
        for number in sorted(set(repetitions)):
            decider = opened.repeated(player.name, number)
            began = time.monotonic()
            score: Score = await evaluate_player(
                f"{player.name} x {number}", player.name, opponents, held_out, evaluation, opened.host, None, None, decider
            )
            seconds = time.monotonic() - began
            rows.append(
                {
                    "repetitions": number,
                    "score": round(score.mean, 4),
                    "ci": score.estimate.rounded(),
                    "source_games": score.source_games,
                    "seconds": round(seconds, 1),
                    "decisions": decider.decisions,
                    "drawn": decider.drawn,
                    "drawn_share": round(decider.drawn / max(1, decider.decisions * number), 4),
                    "forks": score.forks,
                }
            )
    result = {"run": paths.root.name, "policy_version": player.version, "opponents": opponents, "repetitions": rows}
    folder = paths.scores / "repetitions"
    make_directory(folder)
    kept = result | {"settings": evaluation.model_dump(mode="json")}
    durable_write(folder / f"v{player.version:06d}.json", TypeAdapter(dict).dump_json(kept, indent=1))
    words = f"{paths.root.name}, {player.name}: centres gained against '{opponents}' by draws for each decision"
    await show_table(f"repetitions-{paths.root.name}-{player.name}", words, rows)
    return result
