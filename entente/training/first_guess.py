"""Estimates the time of a CPU step of an unmeasured model, from its FLOPs and this machine's matmul rate.

    rollout seconds = 2 B u / (share · rate)        train seconds = trained · 6 B u / (share · rate)

u: unique tokens of a step (a shared prefix counts once); B: weights of the linear layers. Head and adapter are small beside B.
"""

import time
from collections.abc import Callable

import torch

from entente.decoding.architectures import Architecture

SHARE = 0.6
"""Rate of whole steps over bare matmuls; `entente bench trainer --model` measures the trainer's."""
_TRAINED = 0.5
"""Share of start groups that train: in the others, forks end alike early in a run."""
_ROWS = 512
_LEAST_S = 0.3


def step_seconds(sizes: Architecture, unique_tokens: float, *, overlaps: bool) -> float:
    """`overlaps`: one core samples the next step while another trains."""
    forward = 2 * sizes.linear_parameters * unique_tokens / (SHARE * matrix_rate(sizes))
    both = (forward, 3 * _TRAINED * forward)
    return max(both) if overlaps else sum(both)


def matrix_rate(sizes: Architecture) -> float:
    """Operations per second on one thread, of one block's matmuls with a few hundred tokens."""
    products, threads, done = block_products(sizes, rows=_ROWS), torch.get_num_threads(), 0
    torch.set_num_threads(1)
    try:
        products()  # the first call of a shape prepares it
        began = time.process_time()
        while (spent := time.process_time() - began) < _LEAST_S:
            products()
            done += 1
    finally:
        torch.set_num_threads(threads)
    return 2 * _ROWS * sizes.linear_parameters / sizes.layers * done / spent


def block_products(sizes: Architecture, *, rows: int) -> Callable[[], object]:
    shapes = [shape for path, shape in sizes.linear_layers().items() if ".layers.0." in path]
    pairs = [(torch.rand(rows, into), torch.rand(out, into)) for out, into in shapes]
    return lambda: [torch.nn.functional.linear(left, right) for left, right in pairs]
