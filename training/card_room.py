"""Bounds the memory that a trainer takes of a card which it shares with the engine."""

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

CARD_SHARE = "ENTENTE_TRAINER_CARD_SHARE"
"""Environment variable of the trainer's processes: largest share of its card that each may take; not set: no limit."""


def leave_room(device: "torch.device") -> None:
    """Let torch take at most the share in `CARD_SHARE` of `device`, memory that it has freed and keeps included.

    Beyond it torch raises its out-of-memory error here, in the trainer, where a smaller micro-batch helps, and not later in an
    engine that restarts.
    """
    share = float(os.environ.get(CARD_SHARE, "0"))
    if share and device.type == "cuda":
        import torch

        torch.cuda.set_per_process_memory_fraction(share, device.index)
