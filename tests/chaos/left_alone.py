"""A training run left alone, with one kill of each kind: does it go on by itself each time, and end complete?

    python tests/chaos/left_alone.py --minutes 60
    python tests/chaos/left_alone.py --minutes 6 --kinds flow,trainer --folder somewhere

Everything is real and its own: `entente up` in a folder outside of the project, a vLLM server, a run started through the
deployment without a name. The only help from outside is what a host gives its services: who was killed of server, worker and
vLLM server is begun again (`entente up`). The last line is one JSON object; the exit code is 0 if the run ended complete.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from base64 import b64encode
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from storage.runs import RunPaths
from tests.chaos.audit_run import audit
from tests.command import runs
from tests.waiting import free_port, kill, say, wait_for

ROOT = Path(__file__).resolve().parents[2]
GOES_ON_WITHIN_S = 900.0
"""Seconds that a run may take after a kill until it records further steps."""
_WARM_UP_STEPS = 12
_SMALL: dict[str, Any] = {
    "tiny_model": {"hidden": 64, "layers": 2, "source_games": 6, "imitation_steps": 12, "imitation_positions": 2},
    "inference": {"threads": 1, "max_sequences": 32},
    "cache": {"train_snapshots": 24, "held_out_snapshots": 6},
    "rollouts": {"start_groups": 4, "forks_per_group": 4},
    "training": {"threads": 1},
    "evaluation": {"positions": 4, "powers_per_position": 1},
    "telemetry": {"wandb": "disabled", "report": False},
}
"""Over the deployment's own parameters: the laptop run, made light enough to be left alone beside other work."""


class Servers:
    """A folder with a server, a Prefect worker and a vLLM server of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.runs = folder, folder / "runs"
        self.api = f"http://127.0.0.1:{free_port()}/api"
        self._engine_port = free_port()
        self._engine: subprocess.Popen[bytes] | None = None
        for name in ("prefect.yaml", "prefect.toml"):
            shutil.copy(ROOT / name, folder)
        if not (folder / "flows").exists():
            (folder / "flows").symlink_to(ROOT / "flows")

    # -- what a host does for its services ------------------------------------------------------------------------------

    def up(self) -> None:
        """Begin what is not there of server, pool, deployments, automations and worker."""
        self._entente("up", "--port", self.api.split(":")[2].removesuffix("/api"))

    def serve(self) -> None:
        """Begin the vLLM server, on the model of the runs here."""
        words = ["--dtype", "float32", "--max-model-length", "512", "--threads", "1"]
        with (self.folder / "engine.log").open("ab") as log:
            self._engine = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "entente.cli.main",
                    "serve",
                    "--model",
                    str(self._model()),
                    "--port",
                    str(self._engine_port),
                    *words,
                ],
                cwd=self.folder,
                env=self._environment(),
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def close(self) -> list[str]:
        """End all of it; command lines of what was still there afterwards, and was killed."""
        self._entente("down")
        if self._engine is not None:
            kill(self._engine.pid)
        left = [process for process in psutil.process_iter() if self._is_ours(process)]
        told = [" ".join(process.cmdline())[:120] for process in left if process.status() != psutil.STATUS_ZOMBIE]
        for process in left:
            process.kill()
        return told

    # -- who is there ---------------------------------------------------------------------------------------------------

    def begun(self, what: str) -> int:
        """Process id of what `entente up` began: server or worker."""
        record = json.loads((self.folder / ".prefect" / "up.json").read_text())
        return next(each["pid"] for each in record if each["what"] == what)

    def engine(self) -> int:
        """Process id of the vLLM server."""
        assert self._engine is not None
        return self._engine.pid

    def engine_died(self) -> None:
        """Take note of the vLLM server's end, and begin another."""
        assert self._engine is not None
        self._engine.wait(30)
        self.serve()

    def trains(self, run: str = "") -> dict[str, Any] | None:
        """The newest record of a process that trains, of `run` or any; None if there is none yet."""
        records = [json.loads(file.read_text()) for file in (self.runs / "_flow_runs").glob("[0-9a-f]*.json")]
        mine = [record for record in records if not run or record["run"] == run]
        return max(mine, key=lambda record: record["began"], default=None)

    # -- Prefect --------------------------------------------------------------------------------------------------------

    def ask(self, path: str, body: Mapping[str, Any]) -> Any:
        """What the server answers; a busy one is asked again."""
        key = b64encode((self.folder / ".prefect" / "key").read_text().strip().encode()).decode()
        kind = {"content-type": "application/json", "authorization": f"Basic {key}"}
        request = urllib.request.Request(f"{self.api}/{path}", json.dumps(body).encode(), kind, method="POST")
        until = time.monotonic() + 60
        while True:
            try:
                with urllib.request.urlopen(request, timeout=60) as answer:
                    return json.load(answer)
            except OSError:
                if time.monotonic() > until:
                    raise
                time.sleep(2)

    def train(self, run: str, steps: int) -> str:
        """Start train-policy/train; the flow run's id."""
        deployments = self.ask("deployments/filter", {"deployments": {"tags": {"all_": ["train"]}}})
        (deployment,) = (each for each in deployments if each["entrypoint"].endswith(":train_policy"))
        small = _SMALL["inference"] | {"urls": [f"http://127.0.0.1:{self._engine_port}"]}
        settings = _merged(deployment["parameters"]["settings"], _SMALL | {"run": run, "steps": steps, "inference": small})
        body = {"parameters": deployment["parameters"] | {"settings": settings}, "state": {"type": "SCHEDULED"}}
        return self.ask(f"deployments/{deployment['id']}/create_flow_run", body)["id"]

    def make_model(self) -> None:
        """Make the model that the vLLM server serves."""
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in _SMALL["tiny_model"].items()]
        self._entente("model", "make", *flags)

    def _model(self) -> Path:
        return next(iter((self.runs / "_models").glob("tiny-*")))

    def _entente(self, *words: str) -> None:
        line = [sys.executable, "-m", "entente.cli.main", *words]
        done = subprocess.run(line, cwd=self.folder, env=self._environment(), capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"entente {' '.join(words)}: {done.stderr.strip()}")

    def _environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
        return kept | {
            "PYTHONPATH": str(ROOT),
            "PREFECT_WORKER_QUERY_SECONDS": "3",
            "PREFECT_HOME": str(self.folder / ".prefect"),
            "ENTENTE_ADDRESSES": f"http://127.0.0.1:{self._engine_port}",
        }

    def _is_ours(self, process: psutil.Process) -> bool:
        try:
            return process.environ().get("PREFECT_HOME") == str(self.folder / ".prefect")
        except (psutil.Error, OSError):
            return False


class Run:
    """The run that is left alone, seen from its files."""

    def __init__(self, servers: Servers, name: str) -> None:
        self._servers, self.paths = servers, RunPaths(servers.runs / name)

    def recorded(self) -> int:
        """Steps whose ledger stands."""
        return len(list(self.paths.ledger.glob("step-*.arrow")))

    def reaches(self, step: int, limit_s: float) -> None:
        """Wait until that step is recorded."""
        wait_for(f"step {step}", limit_s, lambda: self.recorded() >= step)

    def flow(self) -> psutil.Process:
        """The process that trains now."""
        record = self._servers.trains(self.paths.root.name)
        assert record is not None
        return psutil.Process(record["pid"])

    def trainer(self) -> psutil.Process:
        """Its trainer."""
        return next(child for child in self.flow().children() if runs(child, "entente.training.serve_steps"))

    def step_s(self) -> float:
        """Median seconds between two steps."""
        times = sorted(file.stat().st_mtime for file in self.paths.ledger.glob("step-*.arrow"))
        return median(after - before for before, after in pairwise(times))


def _flow(servers: Servers, run: Run) -> None:
    kill(run.flow().pid)


def _both(servers: Servers, run: Run) -> None:
    """As when a host is lost: its worker, the flow and the trainer go in one instant."""
    flow = run.flow()
    for pid in (servers.begun("worker"), flow.pid, *(child.pid for child in flow.children(recursive=True))):
        kill(pid)
    time.sleep(10)
    servers.up()


def _trainer(servers: Servers, run: Run) -> None:
    kill(run.trainer().pid)


def _engine(servers: Servers, run: Run) -> None:
    kill(servers.engine())
    time.sleep(5)
    servers.engine_died()


def _server_away(servers: Servers, run: Run) -> None:
    kill(servers.begun("server"))
    time.sleep(60)
    servers.up()


def _flow_stopped(servers: Servers, run: Run) -> None:
    os.kill(run.flow().pid, signal.SIGSTOP)


def _trainer_stopped(servers: Servers, run: Run) -> None:
    os.kill(run.trainer().pid, signal.SIGSTOP)


KINDS: dict[str, tuple[Callable[[Servers, Run], None], float]] = {
    "flow": (_flow, 60),
    "trainer": (_trainer, 60),
    "engine": (_engine, 60),
    "both": (_both, 240),
    "server-away": (_server_away, 120),
    "trainer-stopped": (_trainer_stopped, 120),
    "flow-stopped": (_flow_stopped, 240),
}
"""Kind of kill -> what it does, and seconds that the run is expected to stand still for it."""


def left_alone(folder: Path, minutes: float, kinds: list[str]) -> dict[str, Any]:
    """Train for about `minutes` with one kill of each kind; what came of it."""
    began, servers = time.monotonic(), Servers(folder)
    kills: list[dict[str, Any]] = []
    told: dict[str, Any] = {"benchmark": "left_alone", "kinds": kinds, "kills": kills}
    try:
        servers.make_model()
        servers.serve()
        servers.up()
        servers.train("warm-up", _WARM_UP_STEPS)
        warm = Run(servers, "warm-up")
        wait_for("the first run", 600, lambda: warm.paths.summary.is_file())
        left = 60 * minutes - (time.monotonic() - began) - sum(KINDS[kind][1] for kind in kinds)
        steps = max(12 * (len(kinds) + 1), int(left / warm.step_s()))
        say(f"a step takes {warm.step_s():.2f} s; {steps} steps")
        servers.train("", steps)
        record = wait_for("the run's beginning", 300, lambda: (found := servers.trains()) and found["run"] != "warm-up" and found)
        run = Run(servers, record["run"])
        for number, kind in enumerate(kinds, start=1):
            run.reaches(steps * number // (len(kinds) + 1), 60 * minutes + 600)
            kills.append(_killed(servers, run, kind))
            say(json.dumps(kills[-1]))
        wait_for("the run's end", 60 * minutes + 600, lambda: run.paths.summary.is_file())
        wait_for("the flow run's end", 120, lambda: _states(servers, run).get("COMPLETED"))
        told |= {"run": run.paths.root.name, "steps": steps} | _what_it_came_to(servers, run, steps)
    finally:
        told |= {"wall_minutes": round((time.monotonic() - began) / 60, 1), "processes_left": servers.close()}
    told["ok"] = told["audit"] == "holds" and len(kills) == len(kinds) and not told["unsettled"] and not told["processes_left"]
    return told


def _killed(servers: Servers, run: Run, kind: str) -> dict[str, Any]:
    """Kill, and wait until the run has gone on by three steps."""
    at, began = run.recorded(), time.monotonic()
    before = servers.trains(run.paths.root.name)
    KINDS[kind][0](servers, run)
    wait_for(f"the run after '{kind}'", GOES_ON_WITHIN_S, lambda: run.recorded() >= at + 3 or run.paths.summary.is_file())
    after = servers.trains(run.paths.root.name)
    assert before is not None and after is not None
    return {
        "kind": kind,
        "at_step": at,
        "stood_still_s": round(time.monotonic() - began, 1),
        "new_process": before["flow_run"] != after["flow_run"],
    }


def _what_it_came_to(servers: Servers, run: Run, steps: int) -> dict[str, Any]:
    """The audit of its files, and what Prefect's pages still show as running."""
    try:
        audit(run.paths, steps, max_lag=json.loads(run.paths.settings.read_text())["storage"]["max_policy_lag"])
        audited = "holds"
    except AssertionError as broken:
        audited = f"broken: {broken}"
    ids = [json.loads(file.read_text())["flow_run"] for file in (servers.runs / "_flow_runs").glob("[0-9a-f]*.json")]
    running = {"state": {"type": {"any_": ["RUNNING", "PENDING"]}}}
    time.sleep(20)  # the server writes down what tasks tell some seconds later
    unsettled = servers.ask("task_runs/filter", {"flow_runs": {"id": {"any_": ids}}, "task_runs": running})
    unsettled += servers.ask("flow_runs/filter", {"flow_runs": running | {"id": {"any_": ids}}})
    return {
        "audit": audited,
        "flow_runs": _states(servers, run),
        "unsettled": [each["name"] for each in unsettled],
        "alerts": len(run.paths.alerts.read_text().splitlines()) if run.paths.alerts.is_file() else 0,
        "recovery": json.loads(run.paths.recovery.read_text()) if run.paths.recovery.is_file() else {},
    }


def _states(servers: Servers, run: Run) -> dict[str, int]:
    """The run's flow runs by their states."""
    found = servers.ask("flow_runs/filter", {"flow_runs": {"name": {"any_": [f"train-{run.paths.root.name}"]}}})
    states = [each["state_type"] for each in found]
    return {state: states.count(state) for state in sorted(set(states))}


def _merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    both = dict(base)
    for name, value in over.items():
        inner = both.get(name)
        both[name] = _merged(inner, value) if isinstance(inner, Mapping) and isinstance(value, Mapping) else value
    return both


def main() -> int:
    """Run it; 0 if all held."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0, help="how long it should take, about, on an idle machine")
    parser.add_argument("--kinds", default=",".join(KINDS), help="kinds of kill, in this order")
    parser.add_argument("--folder", type=Path, help="where to work, and leave everything; default: a folder that goes afterwards")
    given = parser.parse_args()
    if unknown := [kind for kind in given.kinds.split(",") if kind not in KINDS]:
        parser.error(f"there is no kind '{unknown[0]}'; known: {', '.join(KINDS)}")
    with tempfile.TemporaryDirectory(prefix="left-alone-", ignore_cleanup_errors=True) as scratch:
        folder = given.folder or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        told = left_alone(folder.resolve(), given.minutes, given.kinds.split(","))
    sys.stdout.write(json.dumps(told) + "\n")
    return 0 if told["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
