"""What is started on the other machines of a trainer: it keeps one follower at work (`training.follower`), run after run.

    torchrun --nproc-per-node 8 -m training.follow 10.0.0.1:29500      a process for each of eight GPUs
    python -m training.follow 10.0.0.1:29500                           one process

torchrun starts the processes of a machine and numbers them (LOCAL_RANK). Their place among all processes comes from the trainer.
"""

import argparse
import os
import subprocess
import sys
import time

from telemetry.errors import InputError
from training.follower import Wanted
from training.joining import KEY_VARIABLE, read_address

_AGAIN_S = 1.0
_DESCRIPTION = f"""Share the updates of a trainer on another machine, until this is ended.

Waits until a run trains at the address, joins it, and waits for the next trainer when that one ends. The trainer says how many
processes it wants (training.processes_elsewhere) and at which address (training.address). This machine needs the same program,
the same versions of its libraries, and a copy of the base model, but none of the run's files. Where the address is no loopback
one, both sides need the same key in {KEY_VARIABLE}. Keep the network between them private: rows, weights and gradients travel
without encryption, and whoever joins can run programs here.
"""
_EXAMPLES = """Examples

  entente train --run big --training.processes-elsewhere 8 --training.address 10.0.0.1:29500       on the first machine
  torchrun --nproc-per-node 8 -m training.follow 10.0.0.1:29500                                     eight GPUs of another
  torchrun --nproc-per-node 8 -m training.follow 10.0.0.1:29500 --run big --model /data/Qwen2.5-7B
  python -m training.follow 10.0.0.1:29500                                                          one process

The exit code is 2 if this machine and the trainer do not fit together; the sentence says why.
"""


def command_line() -> argparse.ArgumentParser:
    """The arguments of this program."""
    parser = argparse.ArgumentParser(
        prog="python -m training.follow",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("address", help="HOST:PORT of the trainer, its training.address")
    parser.add_argument("--model", default="", help="folder or hub id of the base model here; default: the trainer's folder")
    parser.add_argument("--run", default="", help="join this run alone; default: any that trains there")
    return parser


def main(words: list[str] | None = None) -> int:
    """Follow one trainer after another; returns the exit code, 2, once one refuses."""
    parser = command_line()
    given = parser.parse_args(words)
    try:
        read_address(given.address)
    except InputError as error:
        parser.error(str(error))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    wanted = Wanted(address=given.address, model=given.model, run=given.run, local_rank=local_rank, parent=os.getpid())
    while True:
        # A process for each trainer: memory, threads and the process group of the one before end with it.
        code = subprocess.run([sys.executable, "-P", "-m", "training.follower", wanted.to_json()], check=False).returncode
        if code == InputError.exit_code:
            return code
        if code:
            sys.stderr.write(f"a follower of {given.address} ended with exit code {code}; another begins\n")
        time.sleep(_AGAIN_S)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
