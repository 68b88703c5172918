"""The card and its driver, or the CPU: what torch can compute on, and how fast it multiplies matrices."""

import psutil
import torch

from inference.engine_cards import vllm_build
from inference.memory_plan import size_text
from pipeline.threads import usable_cores
from smoke.job import Found, Job, StageFailed
from smoke.training_step import matrix_rate
from telemetry.cards import check_cards, check_visible, plan_cards, torch_cuda, visible_cards

_GIB = 2**30


def run(job: Job) -> Found:
    """Name the device and measure its matrix rate."""
    if job.device == "cpu":
        memory = psutil.virtual_memory()
        rate = matrix_rate(torch.device("cpu"), 512)
        return Found(
            sentence=f"a CPU with {usable_cores()} cores and {size_text(memory.available)} of free memory",
            figures={"cores": usable_cores(), "free_bytes": memory.available, "total_bytes": memory.total, **rate},
        )
    check_visible()
    cards = visible_cards()
    if not cards:
        raise StageFailed("NVML shows no card to this process", "CUDA_VISIBLE_DEVICES, and `nvidia-smi`")
    check_cards(plan_cards(cards, engine=(), trainer=0, processes=1), cuda=torch_cuda())
    if not torch.cuda.is_available():
        raise StageFailed(
            f"the driver shows {cards[0].text}, but torch {torch.__version__} cannot compute on it",
            "a torch built for CUDA, as the extra `gpu` brings it",
        )
    if vllm_build() == "cpu":
        raise StageFailed("the installed vLLM computes on CPUs only", "the extra `gpu` instead of `cpu`")
    card, device = cards[0], torch.device("cuda", 0)
    free, total = torch.cuda.mem_get_info(device)
    rate = matrix_rate(device, 8192)
    notes = [] if card.capability >= (8, 0) else ["compute capability below 8.0: bfloat16 is slow here"]
    return Found(
        sentence=f"{card.name}, driver {card.driver}, {size_text(free)} of {size_text(total)} free, torch {torch.__version__}",
        figures={"cards": len(cards), "free_bytes": free, "total_bytes": total, **rate},
        notes=notes,
    )
