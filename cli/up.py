"""`entente up` and `entente down`: a Prefect server, its key and work pool, the deployments of prefect.yaml with their limits and
automations, and a worker, on one machine.

Promise: what stands already is left as it is and said so; what was begun is written down in Prefect's home, and `entente down`
ends that and nothing else: a process counts as ours if number and start time are those that were written down.
"""

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import psutil
from cyclopts import Parameter

from cli.automations import Ask, apply, asker, limit_queue
from cli.server_key import key_file, send_key, want_key
from telemetry.errors import InputError

WORKER_WITHIN_S = 180.0
ENDS_WITHIN_S = 30.0
_RECORD = "up.json"
PRODUCERS = "producers"
"""Work pool of rollout producers: machines that play for others have its workers."""
_FIRST = "train_policy"
"""Flow whose deployment is the first to try."""
_FORMER_NAME = "local"
"""Name that all deployments bore once; those are removed, for their schedules would act beside those of today's."""


@dataclass(frozen=True, slots=True)
class Begun:
    """A process that `entente up` began."""

    what: str
    pid: int
    started: float
    """Seconds of 1970, as the system tells of the process."""

    def process(self) -> psutil.Process | None:
        """It, if it still is."""
        try:
            found = psutil.Process(self.pid)
            alive = found.status() != psutil.STATUS_ZOMBIE and abs(found.create_time() - self.started) < 0.1
        except psutil.NoSuchProcess:
            return None
        return found if alive else None


def up(
    *,
    port: Annotated[int, Parameter(help="Port of the server on this machine, if none is named by PREFECT_API_URL.")] = 4200,
    pool: Annotated[str, Parameter(help="Work pool that the worker works for, one that prefect.yaml names.")] = "local",
) -> None:
    """Start what running from Prefect's UI needs: server, pool, deployments, automations, a worker. Again is harmless.

    Work in the project's folder, where prefect.yaml lies; runs appear in runs/ there. With PREFECT_API_URL set, that server is
    used and none is started.

    Examples

        entente up

        entente up --port 4300
    """
    if not Path("prefect.yaml").is_file():
        raise InputError("there is no prefect.yaml here: work in the project's folder, whose deployments it describes")
    described = _described()
    pools = sorted({each["work_pool"]["name"] for each in described})
    if pool not in pools:
        raise InputError(f"no deployment of prefect.yaml names work pool '{pool}': choose {' or '.join(pools)} with --pool")
    address = _server(port)
    os.environ["PREFECT_API_URL"] = f"{address}/api"
    for each in pools:
        _pool(each)
    _pool(PRODUCERS)
    _prefect("deploy", "--all", "--no-prompt")
    ask = asker(os.environ["PREFECT_API_URL"])
    _remove_former(ask, described)
    if limit_queue(ask, pool):
        print("limit           one run at a time that wants the whole machine")
    for line in apply(ask) or ["all are there"]:
        print(f"automations     {line}")
    names = {(each["entrypoint"], each["name"]): f"{each['flow']}/{each['name']}" for each in _deployments()}
    print(f"deployments     {', '.join(sorted(names.values()))}")
    _worker(pool)
    print(f"\n{address}/dashboard")
    key, told = os.environ.get("PREFECT_API_AUTH_STRING"), ""
    if key and key_file().is_file() and key_file().read_text().strip() == key:
        print(f"the page asks once for this key, which lets run programs as you: {key}")
        told = f'PREFECT_API_AUTH_STRING="$(cat {shlex.quote(str(key_file()))})" '
    elif key:
        print("the page asks once for what PREFECT_API_AUTH_STRING holds")
    first = (names[each["entrypoint"], each["name"]] for each in described if each["entrypoint"].endswith(f":{_FIRST}"))
    print(f"run one there, or: PREFECT_API_URL={address}/api {told}prefect deployment run {next(first, 'NAME')}")
    print("end all of it with: entente down")


def down() -> None:
    """End what `entente up` began in this folder: the worker, with the runs at work in it, then the server.

    A run that was at work goes on later with `entente train --resume`.

    Example

        entente down
    """
    begun = _read()
    if not any(each.process() for each in begun):
        print("nothing that `entente up` began here is running")
    for each in reversed(begun):
        process = each.process()
        if process is not None:
            _end(process)
            print(f"{each.what:<16}ended (process {each.pid})")
    _home(_RECORD).unlink(missing_ok=True)


# -- the parts -------------------------------------------------------------------------------------------------------------


def _server(port: int) -> str:
    """Address of the server that stands or is started now."""
    from cli.prefect_server import accepts, wait_until_up

    given = os.environ.get("PREFECT_API_URL", "").removesuffix("/api")
    address = given or f"http://127.0.0.1:{port}"
    reason = _unlike_prefect(f"{address}/api")
    if not reason:
        send_key(address)
        if not accepts(f"{address}/api", os.environ.get("PREFECT_API_AUTH_STRING", "")):
            raise InputError(f"the Prefect server at {address} wants another key: set PREFECT_API_AUTH_STRING to it")
        print(f"server          answers at {address}")
        if accepts(f"{address}/api", ""):
            print("                without a key, so whoever reaches it can run programs as you: begin it by `entente up`, or")
            print("                set PREFECT_SERVER_API_AUTH_STRING where it is started")
        return address
    if given:
        raise InputError(f"no Prefect server answers at PREFECT_API_URL {given} ({reason}): start it, or unset that")
    if _is_taken(port):
        raise InputError(f"port {port} is taken by something that is no Prefect server ({reason}): choose another with --port")
    want_key()
    log = _home("server.log")
    words = ["server", "start", "--host", "127.0.0.1", "--port", str(port)]
    process = _begin("server", words, log, {"PREFECT_API_URL": f"{address}/api", "PREFECT_SERVER_LOGGING_LEVEL": "WARNING"})
    wait_until_up(process, f"{address}/api", log)
    print(f"server          started at {address} (process {process.pid}, {log})")
    return address


def _described() -> list[dict[str, Any]]:
    """The deployments of prefect.yaml, each with the name of a work pool.

    Raises:
        InputError: it cannot be read.
    """
    import yaml

    try:
        found = yaml.safe_load(Path("prefect.yaml").read_text())["deployments"]
        return [each for each in found if each["work_pool"]["name"]]
    except (yaml.YAMLError, TypeError, KeyError) as error:
        said = " ".join(str(error).split())
        raise InputError(f"prefect.yaml does not say which deployments there are, each with a work pool: {said}") from error


def _remove_former(ask: Ask, described: list[dict[str, Any]]) -> None:
    """Remove deployments of our flows under the name that an earlier version gave to all of them."""
    ours = {each["entrypoint"]: each.get("name") for each in described}
    for each in _deployments():
        if each["name"] == _FORMER_NAME and ours.get(each["entrypoint"], _FORMER_NAME) != _FORMER_NAME:
            ask(f"deployments/{each['id']}", method="DELETE")
            print(f"deployments     {each['flow']}/{_FORMER_NAME} removed: it is {each['flow']}/{ours[each['entrypoint']]} now")


def _pool(name: str) -> None:
    if any(pool["name"] == name for pool in _ask("work_pools/filter")):
        print(f"work pool       {name} is there")
        return
    _prefect("work-pool", "create", name, "--type", "process")
    print(f"work pool       {name} made")


def _worker(pool: str) -> None:
    standing = next((each for each in _read() if each.what == "worker" and each.process()), None)
    if standing is not None:
        print(f"worker          at work (process {standing.pid})")
        return
    log = _home("worker.log")
    process = _begin("worker", ["worker", "start", "--pool", pool, "--name", f"entente-{socket.gethostname()}"], log, {})
    until = time.monotonic() + WORKER_WITHIN_S
    while not any(each["status"] == "ONLINE" for each in _ask(f"work_pools/{pool}/workers/filter")):
        if process.poll() is not None or time.monotonic() > until:
            said = (log.read_text(errors="replace").strip().splitlines() or ["it said nothing"])[-1]
            raise InputError(f"the worker did not come up: {said.strip()}; {log} has all")
        time.sleep(0.2)
    print(f"worker          started (process {process.pid}, {log})")


def _deployments() -> list[dict[str, Any]]:
    flows = {flow["id"]: flow["name"] for flow in _ask("flows/filter")}
    return [{**each, "flow": flows[each["flow_id"]]} for each in _ask("deployments/filter")]


def _prefect(*words: str) -> None:
    """`prefect WORDS` to its end.

    Raises:
        InputError: it fails.
    """
    done = subprocess.run(
        [sys.executable, "-m", "prefect", *words], capture_output=True, text=True, check=False, env=_environment()
    )
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise InputError(f"`prefect {' '.join(words)}` failed: {said[-1].strip() if said else 'it said nothing'}")


def _begin(what: str, words: list[str], log: Path, more: dict[str, str]) -> "subprocess.Popen[bytes]":
    """Begin `prefect WORDS`, which outlives this command, and write it down."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "cli.collect_aside" if what == "server" else "prefect", *words],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
            env=_environment() | more,
        )
    begun = [each for each in _read() if each.what != what and each.process()]
    begun.append(Begun(what, process.pid, psutil.Process(process.pid).create_time()))
    begun.sort(key=lambda each: each.what)  # the server first
    _home(_RECORD).write_text(json.dumps([asdict(each) for each in begun]))
    return process


def _end(process: psutil.Process) -> None:
    """End a process and all below it, gently first."""
    below = process.children(recursive=True)
    process.send_signal(signal.SIGTERM)
    _, left = psutil.wait_procs([process, *below], timeout=ENDS_WITHIN_S)
    for each in left:
        try:
            each.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(left, timeout=5)


def _ask(path: str) -> list[dict[str, Any]]:
    """What the server answers to a filter of everything."""
    return asker(os.environ["PREFECT_API_URL"])(path)


def _unlike_prefect(address: str) -> str:
    """Why what answers there, if anything does, is no Prefect server; '' if it is one."""
    import urllib.request

    try:
        with urllib.request.urlopen(f"{address}/health", timeout=5) as answer:
            return "" if answer.read().strip() == b"true" else "its health is not what Prefect says"
    except (OSError, ValueError) as error:
        return str(getattr(error, "reason", error))


def _environment() -> dict[str, str]:
    """That of what is begun: its logs have what the terminal is spared."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_LOGGING_", "PYTHONWARNINGS"))}


def _read() -> list[Begun]:
    file = _home(_RECORD)
    return [Begun(**each) for each in json.loads(file.read_text())] if file.is_file() else []


def _home(name: str) -> Path:
    return Path(os.environ["PREFECT_HOME"]) / name


def _is_taken(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
