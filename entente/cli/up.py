"""`entente up` and `entente down`: Prefect server, its key, work pool, deployments of prefect.yaml, automations and worker.

`entente up` reuses what exists. It records the processes that it starts in Prefect's home; `entente down` stops only these, if
process id and start time both match.
"""

import errno
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from uuid import UUID

import psutil
from cyclopts import Parameter, validators

from entente.prefect_server.automations import apply, limit_queue, read_all, server_client
from entente.prefect_server.database import check_database, database_file
from entente.prefect_server.deployed_folder import check_folder, folder_behind
from entente.prefect_server.own_server import check_client, check_home, last_words, wait_until_up, who_answers
from entente.prefect_server.server_key import check_listener, hold_port, key_file, send_key, want_key
from entente.telemetry.child import find_process, process_start
from entente.telemetry.errors import InputError, one_line
from storage.files import check_writable, durable_write, file_lock

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.responses import DeploymentResponse

WORKER_WITHIN_S = 180.0
ENDS_WITHIN_S = 30.0
_RECORD = "up.json"
_API = "PREFECT_API_URL"
_FLOW_RUN = "PREFECT__FLOW_RUN_ID"
_FIRST = "train_policy"
_NOTHING = "nothing that `entente up` started here is running"


@dataclass(frozen=True, slots=True)
class Started:
    what: str
    pid: int
    started: str
    address: str = ""
    """PREFECT_API_URL of the process; empty in records without it."""
    pool: str = ""
    """Work pool of a worker."""
    host: str = ""
    """Where it runs: machines and containers may share the folder. Empty in records without it."""

    def process(self) -> psutil.Process | None:
        return find_process(self.pid, self.started)

    def is_elsewhere(self) -> bool:
        return self.host not in ("", socket.gethostname()) and self.process() is None


def up(
    *,
    port: Annotated[
        int,
        Parameter(
            help="Port of the server on this machine, unless PREFECT_API_URL names one.",
            validator=validators.Number(gte=1, lte=65535),
        ),
    ] = 4200,
    pool: Annotated[str, Parameter(help="Work pool of the worker, one that prefect.yaml names.")] = "local",
) -> None:
    """Start Prefect's server, pools, deployments, automations and a worker on this machine. It is safe to run again.

    Run it in the project's folder, which holds prefect.yaml; runs are written to runs/ there. With PREFECT_API_URL set, that
    server is used and none is started.

    Examples

        entente up

        entente up --port 4300
    """
    if not Path("prefect.yaml").is_file():
        raise InputError("there is no prefect.yaml here: work in the project's folder, whose deployments it describes")
    check_client()
    described = _deployments_in_file()
    pools = sorted({each["work_pool"]["name"] for each in described})
    if pool not in pools:
        raise InputError(f"no deployment of prefect.yaml names work pool '{pool}': choose {' or '.join(pools)} with --pool")
    address = os.environ.get(_API, "").rstrip("/").removesuffix("/api") or f"http://127.0.0.1:{port}"
    check_writable(_in_prefect_home(""), "PREFECT_HOME")
    with file_lock(_in_prefect_home("up.lock")) as alone:
        if not alone:
            raise InputError("another `entente up` or `entente down` is at work here: wait for it")
        _check_started(f"{address}/api", pool)
        _server(address, port)
        os.environ[_API] = f"{address}/api"
        moved = any(each.what == "server" and each.process() for each in _started())
        with server_client() as client:
            there = read_all(client.read_deployments)
            check_folder(address, [each["entrypoint"] for each in described], there, moved=moved)
            for each in pools:
                _pool(client, each)
            _remove_schedules(client, described, there)
            _say("deployments", "Prefect reads prefect.yaml, which takes about half a minute")
            _prefect("deploy", "--all", "--no-prompt")
            if limit_queue(client, pool):
                _say("limit", "one run at a time that uses the whole machine")
            for line in apply(client) or ["all are there"]:
                _say("automations", line)
            flows = {flow.id: flow.name for flow in read_all(client.read_flows)}
            deployed = read_all(client.read_deployments)
            names = {(each.entrypoint, each.name): f"{flows[each.flow_id]}/{each.name}" for each in deployed}
            _say("deployments", ", ".join(sorted(names.values())))
            _worker(client, pool)
    key, prefix = os.environ.get("PREFECT_API_AUTH_STRING"), ""
    print(f"\n{address}/dashboard")
    if key and key_file().is_file() and key_file().read_text().strip() == key:
        print(f"the page asks once for its key; keep it secret, since anyone who has it can run programs as you: {key}")
        prefix = f'PREFECT_API_AUTH_STRING="$(cat {shlex.quote(str(key_file()))})" '
    elif key:
        print("the page asks once for the value of PREFECT_API_AUTH_STRING")
    first = (names[each["entrypoint"], each["name"]] for each in described if each["entrypoint"].endswith(f":{_FIRST}"))
    print(f"run one there, or: PREFECT_API_URL={address}/api {prefix}prefect deployment run {next(first, 'NAME')}")
    print("stop everything with: entente down")


def down() -> None:
    """Stop what `entente up` started in this folder: cancel the worker's runs, stop the worker, then the server.

    Continue a cancelled run later with `entente train --resume`.

    Example

        entente down
    """
    if not _started():
        print(_NOTHING)
        return
    with file_lock(_in_prefect_home("up.lock")) as alone:
        if not alone:
            raise InputError("another `entente up` or `entente down` is at work here: wait for it")
        _end_all(_started())


def _end_all(begun: list[Started]) -> None:
    if not any(each.process() for each in begun):
        print(_NOTHING)
        return  # the record stays: another machine or container that shares the folder may have started it
    elsewhere = [each for each in begun if each.is_elsewhere()]
    for each in reversed(begun):
        process = each.process()
        if process is not None:
            with _cancelled(process):
                _end(process)
            _say(each.what, f"ended (process {each.pid})")
    _record(elsewhere)


def _say(what: str, words: str) -> None:
    """Print a line unbuffered: a step may take half a minute."""
    print(f"{what:<16}{words}", flush=True)


# -- the parts -------------------------------------------------------------------------------------------------------------


def _check_started(api: str, pool: str) -> None:
    """Raise InputError if a process of an earlier `entente up` serves another address or pool: a second one would replace its
    record, and no command would stop the first."""
    for each in _started():
        address, its_pool = each.address or api, each.pool or pool
        if (_plain(address), its_pool) != (_plain(api), pool) and each.process():
            also = f" and work pool '{its_pool}'" if its_pool != pool else ""
            raise InputError(f"the {each.what} that `entente up` started here is for {address}{also}: run `entente down` first")


def _check_machines() -> None:
    """Raise InputError if a server on another machine has the database that one started here would open."""
    there = next((each.host for each in _started() if each.what == "server" and each.is_elsewhere()), "")
    if there and database_file() is not None:
        raise InputError(
            f"`entente up` on '{there}' started a server with this PREFECT_HOME, and two would damage the database: run `entente "
            f"down` there (remove '{_in_prefect_home(_RECORD)}' if it no longer runs), or set another PREFECT_HOME here"
        )


def _plain(address: str) -> str:
    return address.replace("//localhost:", "//127.0.0.1:")


def _server(address: str, port: int) -> None:
    from_environment = bool(os.environ.get(_API))
    if not from_environment and not os.environ.get("PREFECT_API_AUTH_STRING"):
        check_listener(address)
    send_key(address)
    answer, wants_key, reason = _who_answers(f"{address}/api")
    if answer == "refuses":
        folder = "" if from_environment else folder_behind(port)
        if folder and folder != str(Path.cwd()):
            raise InputError(f"port {port} has the Prefect server of another folder, '{folder}': choose another with --port")
        raise InputError(f"the Prefect server at {address} wants another key: set PREFECT_API_AUTH_STRING to it")
    if answer == "accepts":
        _say("server", f"answers at {address}")
        if not wants_key:
            print("                without a key, so anyone who reaches it can run programs as you: start it with `entente up`,")
            print("                or set PREFECT_SERVER_API_AUTH_STRING where it is started")
        return
    if from_environment:
        raise InputError(f"no Prefect server answers at PREFECT_API_URL {address} ({reason}): start it, or unset that")
    check_home()
    _check_machines()
    check_database()
    want_key()
    log = _in_prefect_home("server.log")
    with _listen(port, reason) as listener:
        _say("server", f"starting at {address}; the first time it takes about half a minute")
        words = ["-P", "-m", "entente.prefect_server.serve", str(listener.fileno())]
        more = {_API: f"{address}/api", "PREFECT_SERVER_LOGGING_LEVEL": "WARNING"}
        since = _size(log)
        process = _start("server", words, log, more, listener.fileno())
    wait_until_up(process, f"{address}/api", log, since)
    _say("server", f"started (process {process.pid}, {log})")


def _deployments_in_file() -> list[dict[str, Any]]:
    import yaml

    try:
        deployments = yaml.safe_load(Path("prefect.yaml").read_text(encoding="utf-8"))["deployments"]
        return [each for each in deployments if each["work_pool"]["name"]]
    except (yaml.YAMLError, TypeError, KeyError) as error:
        raise InputError(f"prefect.yaml must list deployments, each with a work pool: {one_line(error)}") from error


def _pool(client: "SyncPrefectClient", name: str) -> None:
    if any(pool.name == name for pool in read_all(client.read_work_pools)):
        _say("work pool", f"{name} is there")
        return
    _prefect("work-pool", "create", name, "--type", "process")
    _say("work pool", f"{name} made")


def _remove_schedules(
    client: "SyncPrefectClient", described: list[dict[str, Any]], deployed: "Iterable[DeploymentResponse]"
) -> None:
    """Remove schedules of its deployments that prefect.yaml does not have. `prefect deploy` keeps them, and beside one without a
    slug, as Prefect's page makes it, it switches paused ones on again."""
    slugs = {
        (each["entrypoint"], each["name"]): {schedule.get("slug") for schedule in each.get("schedules") or ()}
        for each in described
    }
    for each in deployed:
        for schedule in each.schedules:
            if schedule.slug not in slugs.get((each.entrypoint, each.name), {schedule.slug}):
                client.delete_deployment_schedule(each.id, schedule.id)
                _say("schedules", f"removed one of {each.name} that prefect.yaml does not have")


def _worker(client: "SyncPrefectClient", pool: str) -> None:
    running = next((each for each in _started() if each.what == "worker" and each.process()), None)
    if running is not None:
        _say("worker", f"at work (process {running.pid})")
        return
    log = _in_prefect_home("worker.log")
    name = f"entente-{socket.gethostname()}"

    def last_heartbeat() -> datetime | None:
        return next((each.last_heartbeat_time for each in client.read_workers_for_work_pool(pool) if each.name == name), None)

    before, since = last_heartbeat(), _size(log)  # of earlier workers; those of other machines do not count
    words = ["-m", "prefect", "worker", "start", "--pool", pool, "--name", name]
    with hold_port(os.environ[_API]) as held:
        process = _start("worker", words, log, {}, held.fileno(), pool=pool)
    until = time.monotonic() + WORKER_WITHIN_S
    while last_heartbeat() == before:
        if process.poll() is not None or time.monotonic() > until:
            raise InputError(f"the worker did not start: {last_words(log, since)}; the log is {log}")
        time.sleep(0.2)
    _say("worker", f"started (process {process.pid}, {log})")


def _prefect(*words: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "prefect", *words], capture_output=True, text=True, check=False, env=_environment()
    )
    if done.returncode:
        output = (done.stderr or done.stdout).strip().splitlines()
        raise InputError(f"`prefect {' '.join(words)}` failed: {output[-1].strip() if output else 'without output'}")


def _start(
    what: str, words: list[str], log: Path, more: dict[str, str], *descriptors: int, pool: str = ""
) -> "subprocess.Popen[bytes]":
    """Start `python WORDS` as a process that outlives this command, and record it; it inherits `descriptors`."""
    log.parent.mkdir(parents=True, exist_ok=True)
    environment = _environment() | more
    with log.open("ab") as out:
        process = subprocess.Popen(
            [sys.executable, *words],
            pass_fds=descriptors,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
            env=environment,
        )
    begun = [each for each in _started() if each.is_elsewhere() or (each.what != what and each.process())]
    begun.append(Started(what, process.pid, process_start(process.pid), environment[_API], pool, socket.gethostname()))
    begun.sort(key=lambda each: each.what)  # the server first
    _record(begun)
    return process


def _record(begun: list[Started]) -> None:
    if begun:
        durable_write(_in_prefect_home(_RECORD), json.dumps([asdict(each) for each in begun]).encode())
    else:
        _in_prefect_home(_RECORD).unlink(missing_ok=True)


def _end(process: psutil.Process) -> None:
    below = process.children(recursive=True)
    process.send_signal(signal.SIGTERM)
    _, left = psutil.wait_procs([process, *below], timeout=ENDS_WITHIN_S)
    for each in left:
        try:
            each.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(left, timeout=5)


@contextmanager
def _cancelled(worker: psutil.Process) -> Iterator[None]:
    """Cancel the flow runs of `worker`, which the block stops: recovery would continue a run that only crashed."""
    environments = [each.environ() for each in worker.children(recursive=True) if each.status() != psutil.STATUS_ZOMBIE]
    ids = sorted({each[_FLOW_RUN] for each in environments if _FLOW_RUN in each})
    if not ids:
        yield
        return
    os.environ |= {name: value for name, value in worker.environ().items() if name in (_API, "PREFECT_API_AUTH_STRING")}
    from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
    from prefect.client.schemas.objects import StateType
    from prefect.states import Cancelled, Cancelling

    try:
        with server_client() as client:
            for each in ids:
                client.set_flow_run_state(each, Cancelling())
    except InputError as error:
        _say("runs", f"not cancelled, so recovery may continue them after the next `entente up`: {error}")
        yield
        return
    yield
    with server_client() as client:
        for run in client.read_flow_runs(flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[*map(UUID, ids)]))):
            if run.state_type is not StateType.COMPLETED:
                ended = Cancelled(message="ended by `entente down`: resume it with `entente train --resume`")
                client.set_flow_run_state(run.id, ended, force=True)
                _say("run", f"{run.name} cancelled")


def _who_answers(address: str) -> tuple[str, bool, str]:
    """What `who_answers` says, whether the server wants a key, and why it is no Prefect server."""
    import httpx

    key = os.environ.get("PREFECT_API_AUTH_STRING", "")
    try:
        answer = who_answers(address, within_s=5)
        if (wants_key := answer == "refuses") and key:
            answer = who_answers(address, key)
        return answer, wants_key, "its version does not match Prefect's reply"
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        return "other", False, str(error)


def _environment() -> dict[str, str]:
    """Environment of the started processes: without the settings that silence the terminal."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_LOGGING_", "PYTHONWARNINGS"))}


def _started() -> list[Started]:
    file = _in_prefect_home(_RECORD)
    return [Started(**each) for each in json.loads(file.read_text())] if file.is_file() else []


def _in_prefect_home(name: str) -> Path:
    return Path(os.environ["PREFECT_HOME"]) / name


def _size(log: Path) -> int:
    return log.stat().st_size if log.is_file() else 0


def _listen(port: int, reason: str) -> socket.socket:
    """The listening socket of a new server. Raises InputError, with the `reason` why no Prefect server answers, if the port is
    taken."""
    with socket.socket() as probe:
        probe.settimeout(1)
        free = probe.connect_ex(("127.0.0.1", port)) == errno.ECONNREFUSED  # a stopped server with a full queue does not answer
    if not free:
        raise InputError(f"port {port} is in use by something other than a Prefect server ({reason}): choose another with --port")
    try:
        return socket.create_server(("127.0.0.1", port), reuse_port=True)
    except OSError as error:  # one that is bound does not always listen
        raise InputError(f"port {port} cannot be used ({error.strerror}): choose another with --port") from error
