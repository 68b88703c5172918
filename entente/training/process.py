"""The trainer process: `TrainerProcess`, which the flow starts and calls, and the server that answers.

    python -m entente.training.process                                     one process
    torchrun --nproc-per-node 2 -m entente.training.process                several; rank 0 answers

In a child process a device fault is only a failed task, and games do not share the trainer's GIL. Flow and trainer exchange JSON
lines over a socket pair, the child's end as its stdin; the child exits when the flow's end closes, also if the flow was killed.
The signatures that `_operation` marks define the calls and their JSON; the trainer's method of the same name answers. When a step
is published, or could not be, the child sends one more line, at any time: `saved` waits for it.

Only rank 0 selects rows and writes ledgers, checkpoints and adapters. The other ranks read nothing but the base model.
"""

import contextlib
import json
import logging
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial, wraps
from inspect import signature
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, get_type_hints

import psutil
from pydantic import TypeAdapter
from pydantic_core import to_jsonable_python

from entente.decoding.base_identity import base_identity
from entente.records.policy_version import PolicyVersion, TrainedStep
from entente.telemetry import errors
from entente.telemetry.cards import VARIABLE, Card
from entente.telemetry.child import end_with_parent
from entente.telemetry.errors import EntenteError, InputError, TrainingError, disk_full
from entente.telemetry.memory import GIVE_BACK_STEPS, give_back_memory, keep_freed_memory
from entente.training.settings import CARD_SHARE, TrainingSettings
from storage.control import part_sources, source_hash
from storage.files import file_lock
from storage.ledger import Eligible
from storage.retention import RetentionSettings
from storage.runs import RunPaths, hashes_file
from storage.settings import StorageSettings

if TYPE_CHECKING:  # the flow's process does not load torch
    from concurrent.futures import Future

    from entente.training.parallel import Peers
    from entente.training.policy import Policy
    from entente.training.trainer import Trainer

ANSWERS_WITHIN_S = 3600.0
"""Time limit of a request, such as a step, before the trainer is killed."""
_ENDS_WITHIN_S = 10.0
"""`close` then kills the child, which the run's files survive."""
_FORMER_TRAINER_S = 20.0
"""For the run's lock: a trainer whose parent was killed ends within a second, on a busy machine later."""
_TORCHRUN_ENDS_S = 10.0
"""Wait after an error, so that torchrun can kill this process if another one failed first, and the flow reports the cause."""

P = ParamSpec("P")
R = TypeVar("R")
_ARGUMENTS: dict[str, dict[str, TypeAdapter[Any]]] = {}


_TRAINED_STEP, _VERSION = TypeAdapter(TrainedStep), TypeAdapter(PolicyVersion)


def _operation(declared: Callable[P, R]) -> Callable[P, R]:
    """Make a method that calls the trainer's of the same name."""
    name, hints, bind = declared.__name__, get_type_hints(declared), signature(declared).bind
    result = TypeAdapter(hints.pop("return"))
    _ARGUMENTS[name] = {argument: TypeAdapter(hint) for argument, hint in hints.items()}

    @wraps(declared)
    def ask(*values: P.args, **named: P.kwargs) -> R:
        arguments = dict(bind(*values, **named).arguments)
        process = arguments.pop("self")
        return result.validate_python(process.ask(name, arguments))

    return ask


def under_torchrun(processes: int) -> bool:
    """With several processes here or several machines, as torchrun's own variable shows."""
    return processes > 1 or "PET_NNODES" in os.environ


def trainer_command(processes: int, meeting: Path) -> list[str]:
    """`meeting`: file that torchrun makes and over which it meets its own processes if they are all here, in a folder of this
    user alone. The port that it would open instead unpickles what anybody sends to it."""
    trainer = [sys.executable, "-P", "-m", "entente.training.process"]
    if not under_torchrun(processes):
        return trainer
    torchrun = [sys.executable, "-P", "-m", "torch.distributed.run", "--nproc-per-node", str(processes)]
    how = "store_type=file,keep_alive_interval=600"  # each sign of life makes the file longer
    here = ["--nnodes", "1", "--rdzv-backend", "c10d", "--rdzv-conf", how, "--rdzv-endpoint", str(meeting)]
    where = [] if "PET_NNODES" in os.environ else here
    return [*torchrun, *where, "--max-restarts", "0", "--log-dir", os.devnull, "--no-python", *trainer]


def _loopback() -> str:
    interfaces = psutil.net_if_addrs().items()
    return next(name for name, addresses in interfaces if any(each.address == "127.0.0.1" for each in addresses))


_Answers = SimpleQueue[dict[str, Any] | None]
"""None: the child's end is closed."""


class TrainerProcess:
    """A trainer child. Calls block, so make them from a thread, not from an event loop.

    They raise the error that the child reports, or TrainingError if it exits or does not answer in time."""

    def __init__(
        self,
        paths: RunPaths,
        model: Path,
        training: TrainingSettings,
        storage: StorageSettings,
        threads: int,
        cards: Sequence[Card] = (),
        card_share: float = 0.0,
        engine_dtype: str = "float32",
    ) -> None:
        """Start the child; `ready` waits until it has loaded its model.

        Args:
            threads: CPU threads of all trainer processes together.
            cards: GPUs, one per process; empty: those visible here.
            card_share: largest share of a GPU shared with the engine that a process may allocate; 0: no limit.
        """
        self._log, self._several = paths.trainer_log, under_torchrun(training.processes)
        self._answers_within_s, self._hung = ANSWERS_WITHIN_S, threading.Event()
        self._meeting = Path(tempfile.mkdtemp(prefix="entente-torchrun-") if self._several else "")
        parent, child = socket.socketpair()
        environment = {key: value for key, value in os.environ.items() if key != "LD_PRELOAD"}
        each = str(max(1, threads // training.processes))
        environment |= {
            "OMP_NUM_THREADS": each,
            "MKL_NUM_THREADS": each,
            "TOKENIZERS_PARALLELISM": "false",
            # oneDNN keeps a kernel for each matrix shape, and each micro-batch has another length.
            "ONEDNN_PRIMITIVE_CACHE_CAPACITY": os.environ.get("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "128"),
        }
        if self._several and "PET_NNODES" not in os.environ:
            environment.setdefault("GLOO_SOCKET_IFNAME", _loopback())  # else gloo resolves the machine's name and listens there
        # Each micro-batch has another shape, and fixed segments would fragment the card's memory.
        environment.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
        if cards:
            environment[VARIABLE] = ",".join(card.uuid for card in cards)
        if card_share:
            environment[CARD_SHARE] = f"{card_share:.4f}"
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                trainer_command(training.processes, self._meeting / "store"),
                stdin=child.fileno(),
                stdout=log,
                stderr=log,
                env=environment,
                # Only the parent receives Ctrl-C; it then closes its end of the socket.
                start_new_session=True,
            )
        child.close()
        self._socket = parent
        self._answered, self._saved = _Answers(), _Answers()
        self._reader = threading.Thread(target=self._read, name="trainer-answers", daemon=True)
        self._reader.start()
        self._opened: TrainedStep | None = None
        opening = {"run": paths.root, "model": model, "training": training, "storage": storage, "engine_dtype": engine_dtype}
        try:
            self._send("open", opening)
        except TrainingError:
            self.close()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def ready(self) -> TrainedStep:
        """Wait until model and newest checkpoint are loaded; returns the last completed step."""
        if self._opened is None:
            self._opened = _TRAINED_STEP.validate_python(self._receive(self._answered))
        return self._opened

    # -- operations: see `Trainer`, whose methods of the same names answer ------------------------------------------------

    @_operation
    def fresh_rows(self) -> int: ...

    @_operation
    def eligible(self, step: int, start_groups: int) -> Eligible: ...

    @_operation
    def retire(self, settings: RetentionSettings) -> int: ...

    @_operation
    def measure_mismatch(self, begins: bool) -> dict[str, float]: ...

    @_operation
    def step(self, step: int, start_groups: int) -> dict[str, float]: ...

    def saved(self) -> PolicyVersion:
        """Wait for the version of the next step whose publication was not asked for, also while a later step trains. Raises the
        error of the thread that writes it."""
        return _VERSION.validate_python(self._receive(self._saved))

    # -- the socket -------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Close the socket, which makes the child exit; kill it after `_ENDS_WITHIN_S`. Waiting threads get a TrainingError."""
        with contextlib.suppress(OSError):  # macOS raises if the other end is already closed
            # `close` alone would wait for a reading thread, and the child would not notice it.
            self._socket.shutdown(socket.SHUT_RDWR)
        self._reader.join()
        self._socket.close()
        try:
            self._process.wait(timeout=_ENDS_WITHIN_S)
        except subprocess.TimeoutExpired:
            self._kill()
            self._process.wait()
        if self._several:
            shutil.rmtree(self._meeting, ignore_errors=True)

    def ask(self, name: str, arguments: Mapping[str, Any]) -> Any:
        self.ready()
        self._send(name, arguments)
        return self._receive(self._answered)

    def _read(self) -> None:
        with contextlib.suppress(OSError), self._socket.makefile("r", encoding="utf-8") as lines:
            for line in lines:
                answer = json.loads(line)
                (self._saved if answer.pop("saved") else self._answered).put(answer)
        for answers in (self._answered, self._saved):
            answers.put(None)

    def _send(self, name: str, arguments: Mapping[str, Any]) -> None:
        message = {"op": name, "arguments": to_jsonable_python(arguments)}
        try:
            # Not buffered, so that `close` has no unsent rest of a message to send.
            self._socket.sendall(json.dumps(message).encode() + b"\n")
        except (OSError, ValueError) as error:
            self._receive(self._answered)  # raises the error that the child reported, if it did
            raise self._ended_error() from error

    def _receive(self, answers: "_Answers") -> Any:
        watch = threading.Timer(self._answers_within_s or threading.TIMEOUT_MAX, self._kill_hung_child)
        watch.daemon = True
        watch.start()
        try:
            answer = answers.get()
        finally:
            watch.cancel()
        if answer is None:
            answers.put(None)  # for the next call
            raise self._ended_error()
        if "error" in answer:
            kind = getattr(errors, answer["error"], EntenteError)
            raise kind(answer["sentence"])
        return answer["result"]

    def _kill_hung_child(self) -> None:
        self._hung.set()
        self._kill()

    def _kill(self) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in (child := psutil.Process(self._process.pid), *child.children(recursive=True)):
                process.kill()

    def _ended_error(self) -> TrainingError:
        try:
            code: int | str = self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            code = "still running"
        if self._hung.is_set():
            within = f"{self._answers_within_s:g} s"
            return TrainingError(f"the trainer process did not answer within {within} and was killed; its log is {self._log}")
        if self._several:
            return TrainingError(
                f"one of the trainer's processes exited, so torchrun stopped the others; see the last lines of {self._log}, and "
                "resume the run, which repeats the step"
            )
        return TrainingError(f"the trainer process exited (exit code {code}); see the last lines of {self._log}")


# -- in the child --------------------------------------------------------------------------------------------------------


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The run's files survive a kill, so the process may exit with its parent or the flow at any time.
    end_with_parent()
    if os.environ.get("GROUP_RANK", "0") == "0":  # torchrun's rank of this machine; the flow runs on machine 0
        threading.Thread(target=_end_with_flow, name="flow-watch", daemon=True).start()
    keep_freed_memory()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    from entente.training.parallel import Peers

    peers = Peers.join()
    if peers is None or peers.leads:
        _serve(socket.socket(fileno=0), peers)
    else:
        _follow(peers)


def _end_with_flow() -> None:
    watch = select.poll()
    watch.register(0, 0)  # only a hang-up is reported
    while not any(event & select.POLLHUP for _, event in watch.poll()):
        pass
    os._exit(0)


def _serve(connection: socket.socket, peers: "Peers | None") -> None:
    """Answer the flow's requests, and report each step once it is published. An error ends the process if `_answer` says so."""
    trainer, lock, sending = None, ExitStack(), threading.Lock()

    def send(answer: Mapping[str, Any], *, saved: bool = False) -> bool:
        """False if the flow has closed its end."""
        try:
            with sending:
                connection.sendall(json.dumps({**answer, "saved": saved}).encode() + b"\n")
        except (BrokenPipeError, ConnectionResetError):
            return False
        return True

    def report(saving: "Future[PolicyVersion]") -> None:
        send(_answer(saving.result, peers)[0], saved=True)

    def open_trainer(arguments: Mapping[str, Any]) -> TrainedStep:
        nonlocal trainer
        trainer = _open(arguments, lock, peers)
        return trainer.resume_point()

    for line in connection.makefile("r", encoding="utf-8"):
        message = json.loads(line)
        name, arguments = message["op"], message["arguments"]
        if trainer is None:
            answer, ends = _answer(partial(open_trainer, arguments), peers)
        else:
            answer, ends = _answer(partial(_call, trainer, name, arguments), peers)
        if trainer is not None and name == "step" and "result" in answer:
            trainer.saving.add_done_callback(report)
        if not send(answer):
            return
        if ends:
            sys.exit(1)
        if name in ("open", "measure_mismatch") or arguments.get("step", 1) % GIVE_BACK_STEPS == 0:
            give_back_memory()


def _call(trainer: "Trainer", name: str, arguments: Mapping[str, Any]) -> Any:
    return getattr(trainer, name)(**{each: _ARGUMENTS[name][each].validate_python(value) for each, value in arguments.items()})


def _answer(call: Callable[[], Any], peers: "Peers | None") -> tuple[dict[str, Any], bool]:
    """The answer, and whether the process ends after it. An `EntenteError` becomes its message. Any other exception is logged,
    becomes a message, and ends the process with exit code 1. With several processes every error does, because the others may
    wait for this one."""
    try:
        return {"result": to_jsonable_python(call())}, False
    except EntenteError as error:
        return {"error": type(error).__name__, "sentence": str(error)}, peers is not None
    except Exception as error:
        traceback.print_exc()
        if peers is not None:
            time.sleep(_TORCHRUN_ENDS_S)
        known = disk_full(error) or TrainingError(f"the trainer failed unexpectedly: {type(error).__name__}: {error}")
        return {"error": type(known).__name__, "sentence": str(known)}, True


def _open(opening: Mapping[str, Any], lock: ExitStack, peers: "Peers | None" = None) -> "Trainer":
    from entente.decoding.codec import Codec
    from entente.training.trainer import Trainer

    paths = RunPaths(Path(opening["run"]))
    # A former trainer that was killed may need a moment to exit.
    if not lock.enter_context(file_lock(paths.trainer_lock, wait_s=_FORMER_TRAINER_S)):
        raise InputError(f"another trainer works on run '{paths.root.name}': wait for it, or stop it")
    if peers is not None:
        peers.broadcast(opening)
    policy, training = _load(opening, peers)
    storage = StorageSettings.model_validate(opening["storage"])
    codec = Codec(Path(opening["model"]))
    ends = {codec.separator_id, codec.eos_id}
    return Trainer(paths, policy, training, storage, peers=peers, engine_dtype=opening["engine_dtype"], order_ends=ends)


def _follow(peers: "Peers") -> None:
    from entente.training.parallel import on_other_ranks
    from entente.training.update import Updater

    policy, training = _load(peers.broadcast(), peers)
    on_other_ranks(peers, policy.parameters(), Updater(policy, training, peers).compute)
    os._exit(0)  # the process group is closed, so no clean shutdown is possible


def _load(opening: Mapping[str, Any], peers: "Peers | None") -> "tuple[Policy, TrainingSettings]":
    import torch

    from entente.training.policy import Policy, choose_device

    training = TrainingSettings.model_validate(opening["training"])
    if peers is not None:
        _check_machines(peers, opening, training.loss)
    if peers is not None and choose_device(training.device).type == "cuda":
        if torch.cuda.device_count() <= peers.local_rank:
            raise InputError(
                f"training.processes is {training.processes} but torch sees {torch.cuda.device_count()} GPUs here, and each "
                "process needs one of its own: lower it"
            )
        torch.cuda.set_device(peers.local_rank)
    return Policy(Path(opening["model"]), training, fsdp=peers is not None and training.fsdp), training


def _check_machines(peers: "Peers", opening: Mapping[str, Any], loss: str) -> None:
    """Raise InputError on rank 0 if another process, such as one on another machine, has other code of this program or loss, or
    another machine another base model. Only rank 0 has the runs, and so the file with the hashes of models."""
    ours = {name: source_hash(name) for name in ("entente", "storage")} | part_sources([loss])
    if peers.local_rank == 0:
        hashes = hashes_file(Path(opening["run"]).parent) if peers.leads else None
        ours["the base model"] = base_identity(Path(opening["model"]), hashes)
    for rank, theirs in enumerate(peers.gather(ours)):
        if theirs is not None and (other := [name for name, mark in ours.items() if theirs.get(name, mark) != mark]):
            raise InputError(
                f"process {rank} of the trainer has another version of {', '.join(other)}: put the same one on all "
                "machines, and start the run and the other torchrun again"
            )


if __name__ == "__main__":
    from entente.training import process  # under its own name, by which the trainer's modules import it

    process.main()
