"""The GPUs that this process may use, and their assignment to engine and trainer.

Reads NVML and package files, without a CUDA context and without torch: a process that has initialised CUDA cannot fork or switch
cards. The UUID identifies a card for NVML and CUDA; indices are in PCI order, as in `nvidia-smi`. A MIG slice is its own card.
"""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import psutil

from entente.telemetry.errors import InputError

T = TypeVar("T")
VARIABLE = "CUDA_VISIBLE_DEVICES"
"""Numbers or UUIDs of the GPUs that a process sees."""
_HIDES_ALL = ("", "-1", "none", "void", "NoDevFiles")
"""Values that hide every GPU on purpose."""
LEAST_DRIVER = {12: 525, 13: 580}
"""Oldest NVIDIA driver for each major release of CUDA (its release notes, "CUDA Toolkit and corresponding driver versions")."""
_original: list[str | None] = []
"""The value before `take_cards` changed it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """A GPU or a MIG slice."""

    uuid: str
    """'GPU-…' or 'MIG-…'."""
    index: int
    """PCI order; a slice has that of its card."""
    name: str
    total: int
    """Memory, bytes; the machine's if the card has none of its own."""
    free: int
    driver: str
    mig: bool

    @property
    def text(self) -> str:
        return f"MIG slice {self.uuid}" if self.mig else f"card {self.index} ({self.name})"


@dataclass(frozen=True, slots=True, kw_only=True)
class CardPlan:
    engine: tuple[Card, ...] = ()
    """Empty: on the CPU or elsewhere."""
    trainer: tuple[Card, ...] = ()
    """One per process; empty: on the CPU."""

    @property
    def shared(self) -> bool:
        return bool({card.uuid for card in self.engine} & {card.uuid for card in self.trainer})


def visible_cards(nvml: Any = None, *, environ: Mapping[str, str] | None = None) -> tuple[Card, ...]:
    """In the order of `VARIABLE`, else PCI order; () without NVML. Ignores `take_cards`."""
    return _select(nvml, environ)[0]


def take_cards(cards: Sequence[Card]) -> None:
    """Restrict this process and its children to `cards`, if any. Call it before CUDA is initialised."""
    if cards:
        if not _original:
            _original.append(os.environ.get(VARIABLE))
        os.environ[VARIABLE] = ",".join(card.uuid for card in cards)


def plan_cards(
    cards: Sequence[Card],
    *,
    engine: Sequence[int] | None,
    tensor_parallel: int = 1,
    processes: int = 0,
) -> CardPlan:
    """Assign `cards` to engine and trainer; raises InputError if an index has no card or there are too few.

    Args:
        engine: indices of the engine's cards; (): the first `tensor_parallel`; None: no engine on a GPU.
        processes: trainer processes, a card each: the first that the engine leaves, else the first of all; 0: no GPU.
    """
    if not cards:
        return CardPlan()
    taken: list[int] = []
    if engine is not None:
        taken = list(engine) or list(range(tensor_parallel))
        if len(taken) != tensor_parallel or len(set(taken)) != len(taken):
            different = f"{tensor_parallel} different cards" if tensor_parallel > 1 else "1 card"
            raise InputError(
                f"inference.cards {list(engine)} must name {different}, as many as inference.tensor_parallel: change one of them"
            )
        _check_places(taken, cards, "inference.cards" if engine else "inference.tensor_parallel")
    left = [place for place in range(len(cards)) if place not in taken]
    places = (left if len(left) >= max(1, processes) else list(range(len(cards))))[:processes]
    if len(places) < processes:
        raise InputError(
            f"training.processes {processes} need a card each, but {len(places)} of the {len(cards)} visible cards are theirs: "
            "lower it"
        )
    return CardPlan(engine=tuple(cards[place] for place in taken), trainer=tuple(cards[place] for place in places))


def check_visible(nvml: Any = None, *, environ: Mapping[str, str] | None = None) -> None:
    """Raise InputError for an unknown card in `VARIABLE`: CUDA would silently ignore it and all cards after it."""
    if unknown := _select(nvml, environ)[1]:
        everything = visible_cards(nvml, environ={})
        listed = ", ".join(f"{card.index} {card.uuid}" for card in everything) or "none that can be used"
        raise InputError(f"{VARIABLE} names '{unknown}', which is no card of this machine (it has {listed}): correct or unset it")


def unusable_cards(nvml: Any = None) -> list[str]:
    """A sentence per card whose name or memory NVML cannot read; such a card is not visible."""
    return _devices(nvml)[1]


def torch_cuda(torch: metadata.Distribution | None = None) -> tuple[int, int] | None:
    """CUDA version of an installed `torch`, by default this environment's, read from its files; None for a CPU build or without
    torch."""
    try:
        file = Path(str((torch or metadata.distribution("torch")).locate_file("torch/version.py")))
        version = re.search(r"^cuda\b[^=\n]*=\s*['\"](\d+)\.(\d+)", file.read_text(encoding="utf-8"), re.MULTILINE)
    except (metadata.PackageNotFoundError, OSError):
        return None
    return (int(version[1]), int(version[2])) if version else None


def driver_problem(driver: str, cuda: tuple[int, int] | None) -> tuple[str, str] | None:
    """What is wrong with NVIDIA's `driver` and a torch built for `cuda`, and its cure; None if the two can compute on a card."""
    if cuda is None:
        return "a GPU is visible, but the installed torch is built for the CPU", "`make setup` on this machine"
    least = LEAST_DRIVER.get(cuda[0])
    number = re.match(r"\d+", driver)
    if least is None or number is None or int(number[0]) >= least:
        return None
    return (
        f"torch is built for CUDA {cuda[0]}.{cuda[1]}, which needs NVIDIA driver {least} or newer, and this machine has {driver}",
        f"upgrade the driver, or install the package cuda-compat-{cuda[0]}-{cuda[1]}",
    )


def torch_problem() -> tuple[str, str] | None:
    """What prevents the installed torch from computing on the visible cards, and its cure; None also without a card."""
    cards = visible_cards()
    return driver_problem(cards[0].driver, torch_cuda()) if cards else None


def _check_places(places: Sequence[int], cards: Sequence[Card], setting: str) -> None:
    wrong = [place for place in places if not 0 <= place < len(cards)]
    if wrong:
        seen = f"{len(cards)} cards" if len(cards) > 1 else "1 card"
        raise InputError(
            f"{setting} asks for card {wrong[0]}, but this process sees {seen}, counted from 0: lower it, or make more visible "
            f"({VARIABLE})"
        )


def _original_value(environ: Mapping[str, str] | None) -> str | None:
    return _original[0] if environ is None and _original else (os.environ if environ is None else environ).get(VARIABLE)


def _select(nvml: Any, environ: Mapping[str, str] | None) -> tuple[tuple[Card, ...], str]:
    """(the visible cards, the first unknown part of `VARIABLE`)."""
    value = _original_value(environ)
    devices, _ = _devices(nvml)
    if value is None or not devices:
        return tuple(card for device in devices for card in device), ""
    if value.strip() in _HIDES_ALL:
        return (), ""
    chosen: dict[str, Card] = {}
    for part in (part.strip() for part in value.split(",")):
        if part == "-1":
            break
        named = _named(part, devices)
        if named is None:  # CUDA ignores this part and all that follow
            return tuple(chosen.values()), part
        chosen |= {card.uuid: card for card in named}
    return tuple(chosen.values()), ""


def _named(part: str, devices: Sequence[Sequence[Card]]) -> Sequence[Card] | None:
    """By number, UUID or unique prefix of one."""
    if part.isdigit():
        return (devices[int(part)] or None) if int(part) < len(devices) else None
    matching = [card for cards in devices for card in cards if card.uuid.startswith(part)]
    return matching if len(matching) == 1 and part.startswith(("GPU-", "MIG-")) else None


def _devices(nvml: Any) -> tuple[list[Sequence[Card]], list[str]]:
    """(each card or its slices, in PCI order; why cards are missing). Empty without a driver."""
    if nvml is None:
        import pynvml as nvml
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return [], []
    devices, failures = list[Sequence[Card]](), list[str]()

    def usable(index: int, question: Callable[[], list[T]]) -> list[T]:
        """[] for a lost or forbidden card, so that others remain usable."""
        try:
            return question()
        except nvml.NVMLError as error:
            failures.append(f"card {index} cannot be used ({error})")
            return []

    try:
        driver = str(_ask(nvml, nvml.nvmlSystemGetDriverVersion, "unknown"))
        for index in range(_ask(nvml, nvml.nvmlDeviceGetCount, 0)):
            parts = usable(index, lambda index=index: _parts(nvml, index))
            cards = [usable(index, lambda part=part, index=index: [_card(nvml, *part, index, driver)]) for part in parts]
            devices.append([card for some in cards for card in some])
    finally:
        nvml.nvmlShutdown()
    return devices, failures


def _parts(nvml: Any, index: int) -> list[tuple[Any, bool]]:
    """(handle, is a MIG slice)."""
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    current, _ = _ask(nvml, lambda: nvml.nvmlDeviceGetMigMode(handle), (nvml.NVML_DEVICE_MIG_DISABLE, 0))
    if current != nvml.NVML_DEVICE_MIG_ENABLE:
        return [(handle, False)]
    places = range(_ask(nvml, lambda: nvml.nvmlDeviceGetMaxMigDeviceCount(handle), 0))
    slices = [_ask(nvml, lambda place=place: nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, place), None) for place in places]
    return [(part, True) for part in slices if part is not None]


def _card(nvml: Any, handle: Any, mig: bool, index: int, driver: str) -> Card:
    (total, free), name = _memory(nvml, handle), str(_ask(nvml, lambda: nvml.nvmlDeviceGetName(handle), "unnamed"))
    return Card(uuid=nvml.nvmlDeviceGetUUID(handle), index=index, name=name, total=total, free=free, driver=driver, mig=mig)


def _memory(nvml: Any, part: Any) -> tuple[int, int]:
    """(total, free) bytes. NVML reports none for a card that shares the machine's memory, such as the GB10."""
    from pynvml import NVML_ERROR_NOT_SUPPORTED

    try:
        memory = nvml.nvmlDeviceGetMemoryInfo(part)
    except nvml.NVMLError as error:
        if error.value != NVML_ERROR_NOT_SUPPORTED:
            raise
    else:
        if memory.total:
            return int(memory.total), int(memory.free)
    of_machine = psutil.virtual_memory()
    return of_machine.total, of_machine.available


def _ask(nvml: Any, question: Callable[[], T], otherwise: T) -> T:
    try:
        return question()
    except nvml.NVMLError:
        return otherwise
