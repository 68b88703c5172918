"""Starts the follower processes of a trainer (`training.parallel`), and is their main module.

    python -m training.followers MODEL SETTINGS        one follower, with torchrun's variables in its environment

If a follower ends, the trainer ends at once, because a collective operation would wait for the follower forever. If the trainer
ends, so do its followers. Followers write to the trainer's log and do not read the run's files.
"""

import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import torch

from telemetry.errors import InputError
from telemetry.parent import end_with_parent
from training.parallel import Peers, follow, join_peers
from training.policy import Policy, choose_device
from training.settings import TrainingSettings
from training.update import Updater


def start_followers(model: Path, settings: TrainingSettings) -> Peers | None:
    """Start the followers that `training.processes` asks for, and join their process group; None without followers.

    Raises:
        InputError: there are fewer GPUs than processes.
    """
    if settings.processes == 1:
        return None
    device = choose_device(settings.device)
    if device.type == "cuda" and torch.cuda.device_count() < settings.processes:
        raise InputError(
            f"training.processes is {settings.processes} but torch sees {torch.cuda.device_count()} GPUs here, and each process "
            "needs one of its own: lower it"
        )
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": _free_port(), "WORLD_SIZE": str(settings.processes)}
    for rank in range(1, settings.processes):
        follower = subprocess.Popen(
            [sys.executable, "-P", "-m", "training.followers", str(model), settings.model_dump_json(), str(os.getpid())],
            stdin=subprocess.DEVNULL,
            env=os.environ | common | _place(rank),
        )
        threading.Thread(target=_end_with, args=(follower, rank), name=f"follower-{rank}", daemon=True).start()
    os.environ |= common | _place(0)
    return join_peers(device)


def _free_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def _place(rank: int) -> dict[str, str]:
    return {"RANK": str(rank), "LOCAL_RANK": str(rank)}


def _end_with(follower: subprocess.Popen[bytes], rank: int) -> None:
    code = follower.wait()
    sys.stderr.write(f"follower {rank} of the trainer ended with exit code {code}, and the trainer with it\n")
    sys.stderr.flush()
    os._exit(1)


def main(model: Path, settings: TrainingSettings, parent: int) -> None:
    """Run one follower until the leader ends."""
    end_with_parent(parent=parent)
    peers = join_peers(choose_device(settings.device))
    assert peers is not None, "a follower needs a leader"
    policy = Policy(model, settings)
    follow(peers, policy.trained_parameters(), Updater(policy, settings).gradient)


if __name__ == "__main__":
    main(Path(sys.argv[1]), TrainingSettings.model_validate_json(sys.argv[2]), int(sys.argv[3]))
