"""What `entente serve --openai` adds to the engine's own work: `python -m benchmarks.orders_api MODEL [DECISIONS]`.

Two arms draw the same decisions, 64 at a time, in turn: the engine alone in this process, with requests that are ready, and the
server in its own process, asked over HTTP with states of the diplomacy package. CPU is that of the process that draws; its torch
has one thread. Occupancy is the mean number of requests in a decoding pass of the engine. The output is one JSON object.
"""

import asyncio
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp

from benchmarks.entente_run import tree_cpu_s
from decoding.codec import Codec
from decoding.model_files import max_position, recipe_prompts
from game.board import Board
from game.players import player
from game.prompt_settings import DEFAULT_PROMPTS
from game.recorded import as_recorded
from inference.settings import InferenceSettings
from records.generation import GenerationRequest
from rollouts.deciders import Tokens
from rollouts.seeds import seed_of

IN_FLIGHT, ROUNDS = 64, 3


def make_cases(model: Path) -> Iterator[tuple[GenerationRequest, dict[str, Any]]]:
    """Decisions for the engine and for the server: all powers of positions from games between movers."""
    tokens, number, game = Tokens(Codec(model), recipe_prompts(model) or DEFAULT_PROMPTS), 0, 0
    while True:
        dice, board, boards, turns, game = random.Random(game), Board.start(), list[Board](), list[Any](), game + 1
        while board.year < 1906:
            boards.append(board.fork())
            turns.append((board.phase, {power: player("mover")(own, dice) for power, own in board.legal_orders().items()}))
            board.step(turns[-1][1])
        for position, phase in zip(boards, json.loads(as_recorded("bench", turns))["phases"], strict=False):
            for power, legal in position.legal_orders().items():
                ids, table, seed = (
                    tokens.prompt_ids(position, legal),
                    tokens.tables.table(legal),
                    seed_of(f"seed {number}", 0, power),
                )
                content = json.dumps({"power": power, "state": phase["state"]})
                body = {"model": str(model), "messages": [{"role": "user", "content": content}], "seed": number}
                yield GenerationRequest(request_id=str(number), prompt_ids=ids, table=table, seed=seed), body
                number += 1


async def measure(model: Path, address: str, server: int, decisions: int) -> dict[str, float]:
    """Medians of both arms over ROUNDS rounds, after one that warms them."""
    from inference.torch_engine import TorchEngine

    engine = TorchEngine(model, InferenceSettings(model=str(model), engine="torch", max_model_length=max_position(model)))
    await engine.start()
    cases, rounds = make_cases(model), list[dict[str, float]]()
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), raise_for_status=True) as session:

        async def work(arm: str) -> tuple[int, int]:
            if arm == "engine":
                return (stats := await engine.stats()).drawn_tokens, stats.engine_steps
            async with session.get(address.removesuffix("/v1") + "/health") as answer:
                return (stats := (await answer.json())["engine"])["drawn_tokens"], stats["engine_steps"]

        async def ask_on(arm: str, left: Iterator[tuple[GenerationRequest, dict[str, Any]]]) -> None:
            for request, body in left:
                if arm == "engine":
                    await engine.generate(request)
                else:
                    async with session.post(f"{address}/chat/completions", json=body) as answer:
                        await answer.read()

        cpu: dict[str, Callable[[], float]] = {"engine": time.process_time, "server": lambda: tree_cpu_s(server)}
        for _ in range(ROUNDS + 1):
            part, figures = [next(cases) for _ in range(decisions // ROUNDS)], dict[str, float]()
            for arm, clock in cpu.items():
                before, begun, spent, left = await work(arm), time.perf_counter(), clock(), iter(part)
                await asyncio.gather(*(ask_on(arm, left) for _ in range(IN_FLIGHT)))
                figures[f"{arm}_cpu_ms"] = 1e3 * (clock() - spent) / len(part)
                figures[f"{arm}_wall_ms"] = 1e3 * (time.perf_counter() - begun) / len(part)
                drawn, steps = (now - then for now, then in zip(await work(arm), before, strict=True))
                figures[f"{arm}_occupancy"] = drawn / steps
            rounds.append(figures | {"added_cpu_ms": figures["server_cpu_ms"] - figures["engine_cpu_ms"]})
    return {name: median(figures[name] for figures in rounds[1:]) for name in rounds[0]}


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"  # before torch is loaded, here and in the server
    chosen, count = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 1920
    words = ["-c", "from cli.main import main; main()", "serve", "--openai", "--model", str(chosen), "--port", "0"]
    with subprocess.Popen([sys.executable, *words], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url = next(line for line in process.stdout if line.startswith("serving ")).split()[-1]
        sys.stdout.write(json.dumps(asyncio.run(measure(chosen, url, process.pid, count))) + "\n")
        process.terminate()
