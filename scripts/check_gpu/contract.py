"""What our source cannot tell about its use of vLLM: a small table, each entry with its reason.

Classes are those of the V1 runner on CUDA, in modules of vLLM. `uses` derives all the rest.
"""

import tomllib
from dataclasses import dataclass

from scripts.check_gpu.lock import ROOT

FOLDERS = (
    *tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"],
    "tests",
)
"""Where vLLM may be used: every room, and the tests."""
ONLY_IMPORTS = ("tests",)
"""Folders of which only imports are checked: tests put stand-ins in the place of vLLM's objects."""

RUNNER = ("vllm.v1.worker.gpu_model_runner", "GPUModelRunner")
WORKER = ("vllm.v1.worker.gpu_worker", "Worker")
"""The worker on CUDA; the CPU's is a subclass."""
ENGINES = (("vllm.v1.engine.llm_engine", "LLMEngine"), ("vllm.v1.engine.async_llm", "AsyncLLM"))

ROOTS: dict[str, dict[str, tuple[str, str]]] = {
    # `ForcedJump` is mixed into vLLM's worker by name, so its runner is Any to us.
    "inference/forced_jump.py": {"runner": RUNNER, "self.model_runner": RUNNER},
    # A list of engines that were closed.
    "inference/embedded.py": {"_closed_engines.pop()": ENGINES[0]},
    # Futures hold vLLM's outputs: both engines pass them on as Any.
    "inference/vllm_engine.py": {"output": ("vllm.outputs", "RequestOutput")},
    # The benchmark steps the engine of `EmbeddedEngine` itself.
    "benchmarks/decode.py": {"engine._engine": ENGINES[0]},
}
"""File, variable, and the class that it is an instance of."""

ARGUMENTS = {"inference/vllm_arguments.py::engine_arguments": ("vllm.engine.arg_utils", "EngineArgs")}
"""Functions that fill a dictionary with arguments of a class: its keys are unpacked elsewhere."""

BY_NAME = ("_call",)
"""Our methods that call a method of vLLM's engines by name."""
OUR_WORKER_METHODS = ("jump_forced_tokens",)
"""Worker methods that are ours; vLLM refuses an extension whose methods its worker has already."""

OUTPUT_TIMES = ("vllm.v1.metrics.stats", "RequestStateStats", ("scheduled_ts", "first_token_ts", "last_token_ts"))
"""Read in a loop, by `getattr` with a default: without them, times of a request would silently be zero."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replaced:
    """A private method of vLLM that we wrap: parameters, results and how it is called must all be these."""

    owner: tuple[str, str]
    method: str
    parameters: tuple[str, ...]
    results: tuple[str, ...]
    """Names in its return statement, in order; ours takes the first ones apart."""
    used_in: str
    reason: str


REPLACED = (
    Replaced(
        owner=RUNNER,
        method="_bookkeeping_sync",
        parameters=("scheduler_output", "sampler_output", "logits", "hidden_states", "num_scheduled_tokens"),
        results=(
            "num_nans_in_logits", "num_nans", "logprobs_lists", "valid_sampled_token_ids", "prompt_logprobs_dict",
            "req_ids_output_copy", "req_id_to_index_output_copy", "invalid_req_indices",
        ),
        used_in="inference/forced_jump.py",
        reason="forced tokens are appended to the drawn one; only positional arguments are passed on",
    ),
)  # fmt: skip
