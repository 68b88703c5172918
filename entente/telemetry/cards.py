"""The GPUs that this process may use, and their assignment to engine and trainer.

Reads NVML and package files only, without a CUDA context and without torch: a process that has initialised CUDA cannot fork,
cannot switch to other cards, and holds memory of a card. The UUID identifies a card for NVML and CUDA; numbers are in PCI order,
as in `nvidia-smi`. A slice of a card in MIG mode is a card of its own. If a driver or a mode denies a card to a process, torch
and vLLM report it.
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
"""CUDA's variable: the numbers or UUIDs of the cards that a process sees."""
_HIDES_ALL = ("", "-1", "none", "void", "NoDevFiles")
"""Values of `VARIABLE` that hide every card on purpose."""
_original: list[str | None] = []
"""The original value of `VARIABLE`, once `take_cards` has changed it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """A GPU, or a slice of one in MIG mode."""

    uuid: str
    """'GPU-…' or 'MIG-…'."""
    index: int
    """Number in PCI order; a slice has that of its card."""
    name: str
    total: int
    """Memory, bytes; that of the machine if the card has none of its own."""
    free: int
    """Free memory, bytes."""
    driver: str
    """Driver version."""
    mig: bool
    """True for a slice."""

    @property
    def text(self) -> str:
        return f"MIG slice {self.uuid}" if self.mig else f"card {self.index} ({self.name})"


@dataclass(frozen=True, slots=True, kw_only=True)
class CardPlan:
    engine: tuple[Card, ...] = ()
    """Cards of the engine; empty if it computes on the CPU or elsewhere."""
    trainer: tuple[Card, ...] = ()
    """Cards of the trainer, one per process; empty if it computes on the CPU."""

    @property
    def shared(self) -> bool:
        return bool({card.uuid for card in self.engine} & {card.uuid for card in self.trainer})


def visible_cards(nvml: Any = None, *, environ: Mapping[str, str] | None = None) -> tuple[Card, ...]:
    """The cards that this process may use, in the order of `VARIABLE`, else in PCI order; () without NVML.

    Ignores `take_cards`: reports the cards that the process started with.

    Args:
        nvml: the module `pynvml`, or a fake.
        environ: environment with `VARIABLE`.
    """
    return _select(nvml, environ)[0]


def take_cards(cards: Sequence[Card]) -> None:
    """Restrict this process and its children to `cards`. Does nothing without cards.

    CUDA reads the variable when it is initialised, so call this before the first CUDA call of the process.
    """
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
    """Assign `cards` to engine and trainer.

    Args:
        engine: indices of the engine's cards; (): the first `tensor_parallel`; None: no engine on a card.
        processes: processes of the trainer, with a card each: the first ones that the engine leaves, else the first of all;
            0: no trainer on a card.

    Raises:
        InputError: an index has no card, a card is named twice, or there are too few.
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
    """Raise InputError if `VARIABLE` names an unknown card; CUDA would silently ignore it and all cards after it."""
    if unknown := _select(nvml, environ)[1]:
        everything = visible_cards(nvml, environ={})
        listed = ", ".join(f"{card.index} {card.uuid}" for card in everything) or "none that can be used"
        raise InputError(f"{VARIABLE} names '{unknown}', which is no card of this machine (it has {listed}): correct or unset it")


def unusable_cards(nvml: Any = None) -> list[str]:
    """A sentence for each card whose name or memory NVML cannot read; such a card is not visible."""
    return _devices(nvml)[1]


def torch_cuda() -> tuple[int, int] | None:
    """CUDA version of the installed torch, read from its files; None for a CPU build or without torch."""
    try:
        file = Path(str(metadata.distribution("torch").locate_file("torch/version.py")))
        version = re.search(r"^cuda\b[^=\n]*=\s*['\"](\d+)\.(\d+)", file.read_text(encoding="utf-8"), re.MULTILINE)
    except (metadata.PackageNotFoundError, OSError):
        return None
    return (int(version[1]), int(version[2])) if version else None


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
    """The cards of a number, a UUID or a unique prefix of one; None if there is no such card."""
    if part.isdigit():
        return (devices[int(part)] or None) if int(part) < len(devices) else None
    matching = [card for cards in devices for card in cards if card.uuid.startswith(part)]
    return matching if len(matching) == 1 and part.startswith(("GPU-", "MIG-")) else None


def _devices(nvml: Any) -> tuple[list[Sequence[Card]], list[str]]:
    """(the card or its slices, for each card in PCI order; why cards are missing). Empty without a driver."""
    if nvml is None:
        import pynvml as nvml
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return [], []
    devices, failures = list[Sequence[Card]](), list[str]()

    def usable(index: int, question: Callable[[], list[T]]) -> list[T]:
        """Records a failure and returns [] for a lost or forbidden card, so that others remain usable."""
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
    """(handle, is a slice) of a card or of each of its slices."""
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
    """Total and free bytes of a card. NVML reports none for one that shares the machine's memory, such as the GB10."""
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
