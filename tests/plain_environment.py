"""The environment variables of the tests, the same on every machine. tests/conftest.py imports this before what reads them.

It unsets what the programs under test read, and sets what has no default. Worker processes and the commands that tests start
inherit it. Variables that describe the machine stay: paths, pip's index, libraries, the instruction set.
"""

import os
import time
from pathlib import Path

_READ = (
    # A terminal and its language.
    "CLICOLOR", "COLORTERM", "COLUMNS", "FORCE_COLOR", "JUPYTER_", "LANG", "LC_", "LINES", "NO_COLOR", "TERM", "TTY_", "TZ",
    # Threads, cards, and what torch and its relatives read.
    "CUDA_", "GOMP_", "KMP_", "LOCAL_", "MASTER_", "MKL_NUM_", "NCCL_", "NVIDIA_", "OMP_", "OPENBLAS_NUM_", "PYTORCH_", "RANK",
    "TORCH", "VLLM_", "WORLD_SIZE",
    # Python, its memory, and git, which a hook may point to another tree.
    "GIT_", "GLIBC_TUNABLES", "MALLOC_", "PYTHON",
    # Services and their clients.
    "DASK_", "DO_NOT_TRACK", "ENTENTE_", "HF_", "HUGGINGFACE_", "MPLBACKEND", "OPENAI_", "PREFECT_", "TOKENIZERS_",
    "TRANSFORMERS_", "WANDB_",
)  # fmt: skip
"""Starts of names."""
_KEPT = {"ENTENTE_FUZZ_EXAMPLES", "PYTHON"}
"""What asks for more examples, and what chooses the Python of a set-up."""
_ROOT = Path(__file__).parent.parent
PLAIN = {
    "COLUMNS": "80",
    "LC_ALL": "C.UTF-8",
    "LINES": "24",
    "PREFECT_PROFILES_PATH": str(_ROOT / "tests" / "no-profiles.toml"),  # a user's profile holds settings too
    "PYTHONPATH": str(_ROOT),  # also of a copy of the tree that no install names
    "TERM": "xterm",
    "TZ": "UTC",
}


def is_read(name: str) -> bool:
    """Whether a program under test reads the variable."""
    return name.upper().endswith("_PROXY") or (name.startswith(_READ) and name not in _KEPT)


for _name in filter(is_read, list(os.environ)):
    del os.environ[_name]
os.environ.update(PLAIN)
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["OMP_NUM_THREADS"] = "1"  # Two workers on two cores: further threads of torch would only wait.
time.tzset()
