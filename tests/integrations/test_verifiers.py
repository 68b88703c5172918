"""`vf-eval` asks our server for the positions of a state cache, and pays what the answers gain."""

import asyncio
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from game.board import Board
from game.scores import COMPONENTS
from game.snapshot import Snapshot
from integrations.questions import Question, score_orders
from rollouts.settings import RolloutSettings
from state_cache.settings import CacheSettings
from state_cache.store import write_cache

ROOT = Path(__file__).resolve().parents[2]
VF_EVAL = ROOT / ".venv-verifiers" / "bin" / "vf-eval"
AGENT = ["--env.agent.harness.id", "null", "--env.agent.runtime.type", "subprocess"]


@pytest.mark.system
def test_vf_eval_asks_the_server_and_its_rewards_are_centres_gained(entente, positions: list[Snapshot], tmp_path: Path):
    if not VF_EVAL.with_name("entente").exists():  # what is installed last
        pytest.skip("verifiers has no environment: `make integrations` makes .venv-verifiers")
    if (uv := shutil.which("uv", path=f"{os.environ['PATH']}:{Path.home() / '.local' / 'bin'}")) is None:
        pytest.skip("vf-eval runs its tasks by uv, which it would download")
    (tmp_path / ".local" / "bin").mkdir(parents=True)
    (tmp_path / ".local" / "bin" / "uv").symlink_to(uv)  # it looks in the home folder, which is this one here
    cache = write_cache(tmp_path / "caches", CacheSettings(), positions[:6], positions[6:])
    (entente.folder / "models").symlink_to(ROOT / "models")
    server = entente.start("serve", "--openai", "--model", "models/dumbbot-192", "--port", "0")
    try:
        assert server.stdout is not None
        url = next(line for line in server.stdout if line.startswith("serving ")).split()[-1]
        words = ["verifiers-entente", "-n", "2", "-r", "2", "--no-push", "--model", "models/dumbbot-192", *AGENT]
        words += ["--client.base-url", url, "--client.api-key-var", "ENTENTE_KEY"]
        words += ["--env.taskset.cache", str(cache), "-o", str(tmp_path / "out")]
        done = subprocess.run(
            [VF_EVAL, *words],
            cwd=tmp_path,
            env=os.environ | {"ENTENTE_KEY": "none", "HOME": str(tmp_path)},  # it keeps its runtimes in the home folder
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    finally:
        server.kill()
        server.communicate()
    (file,) = (tmp_path / "out").rglob("traces.jsonl")
    episodes = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(episodes) == 4 and all(episode["ok"] for episode in episodes)
    for (trace,) in (episode["traces"] for episode in episodes):
        asked = next(each for each in positions if each.snapshot_id == trace["task"]["data"]["snapshot"]["snapshot_id"])
        legal = Board.restore(asked).legal_orders()[trace["task"]["data"]["power"]]
        orders = trace["nodes"][-1]["message"]["content"].split("\n")
        assert legal.admits(orders)
        question, shared = Question(text="", snapshot=asked, power=legal.power, legal=legal), f"verifiers/{asked.snapshot_id}"
        found = asyncio.run(score_orders(question, orders, RolloutSettings(horizon_years=1), shared=shared, name="again"))
        assert trace["rewards"]["centres_gained"]["score"] == found["centres_gained"]
        assert trace["metrics"].keys() == {*COMPONENTS, "ordered_share"} - {"centres_gained"}
