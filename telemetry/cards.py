"""The GPUs that this process may use, which of them engine and trainer take, and what would keep them from it.

Everything is read from NVML and from package files, so no CUDA context is made and torch is not imported: a process that has
initialised CUDA cannot fork, cannot be given other cards, and holds memory of a card. A card is named by its UUID, which means
the same to NVML and CUDA; numbers count in PCI order, as `nvidia-smi` does. A slice of a card in MIG mode is a card of its own.
"""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, TypeVar

from telemetry.errors import InputError

T = TypeVar("T")
VARIABLE = "CUDA_VISIBLE_DEVICES"
"""CUDA's variable: the numbers or UUIDs of the cards that a process sees."""
_HIDES_ALL = ("", "-1", "none", "void", "NoDevFiles")
"""Values of `VARIABLE` that hide every card on purpose."""
_FIRST_DRIVER = {11: 450, 12: 525, 13: 580}
"""Major version of CUDA -> the first driver for it; later minor versions of that CUDA also run with it."""
_found: list[str | None] = []
"""`VARIABLE` as this process found it, once `take_cards` has changed it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """A GPU, or a slice of one in MIG mode."""

    uuid: str
    """'GPU-…' or 'MIG-…'."""
    index: int
    """Number in PCI order; of a slice, its card's."""
    name: str
    total: int
    """Memory, bytes."""
    free: int
    """Memory that nobody takes now, bytes."""
    driver: str
    """Version of the driver."""
    compute_mode: Literal["default", "exclusive", "prohibited"]
    """How many processes may compute on it: any number, one, none."""
    mig: bool
    """Whether it is a slice."""
    capability: tuple[int, int]
    """Compute capability, such as (9, 0) for Hopper."""
    driver_cuda: tuple[int, int] = (0, 0)
    """Newest CUDA that the driver supports; (0, 0): it does not say."""

    @property
    def visible(self) -> str:
        """Its value for `VARIABLE`."""
        return self.uuid

    @property
    def text(self) -> str:
        """Its name for a sentence."""
        return f"MIG slice {self.uuid}" if self.mig else f"card {self.index} ({self.name})"


@dataclass(frozen=True, slots=True, kw_only=True)
class CardPlan:
    """The cards of a run on this machine."""

    engine: tuple[Card, ...] = ()
    """Cards that the engine takes; none: it computes on the CPU or elsewhere."""
    trainer: tuple[Card, ...] = ()
    """Cards that the trainer takes, one for each process; none: it computes on the CPU."""

    @property
    def shared(self) -> bool:
        """Whether engine and trainer take the same card."""
        return bool({card.uuid for card in self.engine} & {card.uuid for card in self.trainer})


def visible_cards(nvml: Any = None, *, environ: Mapping[str, str] | None = None) -> tuple[Card, ...]:
    """The cards that this process may use, in the order of `VARIABLE`, else in PCI order; () without NVML.

    What `take_cards` left to this process does not count: it still tells the cards that the process was given.

    Args:
        nvml: the module `pynvml`, or a stand-in.
        environ: the environment, of which `VARIABLE` is read.
    """
    return _select(nvml, environ)[0]


def unknown_card(nvml: Any = None, *, environ: Mapping[str, str] | None = None) -> str:
    """The first part of `VARIABLE` that names no card of this machine; "" if all do, or if there is no card."""
    return _select(nvml, environ)[1]


def take_cards(cards: Sequence[Card]) -> None:
    """Leave only `cards` to this process and to those that it starts. Does nothing without cards.

    CUDA reads the variable when it is initialised, so this comes before the first CUDA call of the process.
    """
    if cards:
        if not _found:
            _found.append(os.environ.get(VARIABLE))
        os.environ[VARIABLE] = ",".join(card.visible for card in cards)


def plan_cards(
    cards: Sequence[Card],
    *,
    engine: Sequence[int] | None,
    tensor_parallel: int = 1,
    processes: int = 0,
) -> CardPlan:
    """Who takes which of `cards`, given by place.

    Args:
        engine: places of the engine's cards; (): the first `tensor_parallel`; None: there is no engine on a card.
        processes: processes of the trainer, each with a card: the first ones that the engine does not take, else the first; 0:
            there is no trainer on a card.

    Raises:
        InputError: a place has no card, a card is named twice, or there are too few.
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


def check_cards(plan: CardPlan, *, cuda: tuple[int, int] | None = None) -> None:
    """Refuse cards that cannot be used as planned.

    Args:
        cuda: version of CUDA that the installed torch is built for; None: unknown.

    Raises:
        InputError: the driver is too old, a card's compute mode is against it, or a slice would be shared or combined.
    """
    for card in (*plan.engine, *plan.trainer):
        if cuda and card.driver_cuda > (0, 0) and card.driver_cuda[0] < cuda[0]:
            newer = f"of version {_FIRST_DRIVER[cuda[0]]} or later" if cuda[0] in _FIRST_DRIVER else "that supports it"
            raise InputError(
                f"the driver {card.driver} supports CUDA up to {_dotted(card.driver_cuda)}, but the installed torch is built for "
                f"CUDA {_dotted(cuda)}: install a driver {newer}, or a torch built for CUDA {card.driver_cuda[0]}"
            )
        if card.compute_mode == "prohibited":
            raise InputError(
                f"{card.text} is in compute mode 'prohibited', so nobody may compute on it: set it to 'default' "
                f"(nvidia-smi -i {card.index} -c 0), or hide it from {VARIABLE}"
            )
    for card in plan.engine if plan.shared else ():
        if card.compute_mode == "exclusive":
            raise InputError(
                f"{card.text} is in compute mode 'exclusive', which lets one process compute on it, but engine and trainer would "
                f"share it: set it to 'default' (nvidia-smi -i {card.index} -c 0), or inference.cards to another card"
            )
        if card.mig:
            raise InputError(
                f"engine and trainer need a slice each, but {card.text} is the only one for both: make a second slice "
                "(nvidia-smi mig), let servers elsewhere draw (inference.urls), or set training.device to 'cpu'"
            )
    for cards, setting in ((plan.engine, "inference.tensor_parallel"), (plan.trainer, "training.processes")):
        if len(cards) > 1 and any(card.mig for card in cards):
            raise InputError(f"{setting} {len(cards)} needs whole cards, because MIG slices cannot exchange tensors: set it to 1")


def check_visible(nvml: Any = None, *, environ: Mapping[str, str] | None = None) -> None:
    """Refuse a `VARIABLE` that names a card which this machine does not have; CUDA ignores it and all after it.

    Raises:
        InputError: it does; or a card that it leaves is in MIG mode and has no slice, and no other card is left.
    """
    if unknown := unknown_card(nvml, environ=environ):
        everything = visible_cards(nvml, environ={})
        listed = ", ".join(f"{card.index} {card.uuid}" for card in everything) or "none that can be used"
        raise InputError(f"{VARIABLE} names '{unknown}', which is no card of this machine (it has {listed}): correct or unset it")
    empty = [place for place, device in enumerate(_devices(nvml)) if not device.cards]
    if empty and not _hides_all(environ) and not visible_cards(nvml, environ=environ):
        raise InputError(
            f"card {empty[0]} is in MIG mode and has no slice: make one (nvidia-smi mig -i {empty[0]} -cgi ... -C), or turn the "
            f"mode off (nvidia-smi -i {empty[0]} -mig 0)"
        )


def torch_cuda() -> tuple[int, int] | None:
    """Version of CUDA that the installed torch is built for, read from its files; None: built for none, or not installed."""
    try:
        file = Path(str(metadata.distribution("torch").locate_file("torch/version.py")))
        found = re.search(r"^cuda\b[^=\n]*=\s*['\"](\d+)\.(\d+)", file.read_text(encoding="utf-8"), re.MULTILINE)
    except (metadata.PackageNotFoundError, OSError):
        return None
    return (int(found[1]), int(found[2])) if found else None


def _check_places(places: Sequence[int], cards: Sequence[Card], setting: str) -> None:
    wrong = [place for place in places if not 0 <= place < len(cards)]
    if wrong:
        seen = f"{len(cards)} cards" if len(cards) > 1 else "1 card"
        raise InputError(
            f"{setting} asks for card {wrong[0]}, but this process sees {seen}, counted from 0: lower it, or make more visible "
            f"({VARIABLE})"
        )


def _given(environ: Mapping[str, str] | None) -> str | None:
    """`VARIABLE` as the process found it."""
    return _found[0] if environ is None and _found else (os.environ if environ is None else environ).get(VARIABLE)


def _hides_all(environ: Mapping[str, str] | None) -> bool:
    given = _given(environ)
    return given is not None and given.strip() in _HIDES_ALL


def _select(nvml: Any, environ: Mapping[str, str] | None) -> tuple[tuple[Card, ...], str]:
    """(the visible cards, the first unknown part of `VARIABLE`)."""
    given = _given(environ)
    devices = _devices(nvml)
    if given is None or not devices:
        return tuple(card for device in devices for card in device.cards), ""
    if _hides_all(environ):
        return (), ""
    chosen: dict[str, Card] = {}
    for part in (part.strip() for part in given.split(",")):
        if part == "-1":
            break
        found = _named(part, devices)
        if found is None:  # CUDA ignores this part and all that follow
            return tuple(chosen.values()), part
        chosen |= {card.uuid: card for card in found}
    return tuple(chosen.values()), ""


@dataclass(frozen=True, slots=True)
class _Device:
    uuid: str
    cards: tuple[Card, ...]
    """The card itself, or its slices; none if it is in MIG mode without a slice."""


def _named(part: str, devices: Sequence[_Device]) -> Sequence[Card] | None:
    """The cards that a number, a UUID or the unique beginning of one names; None: there is no such card."""
    if part.isdigit():
        return devices[int(part)].cards if int(part) < len(devices) else None
    if not part.startswith(("GPU-", "MIG-")):
        return None
    found = [device.cards for device in devices if device.uuid.startswith(part)]
    found += [(card,) for device in devices for card in device.cards if card.mig and card.uuid.startswith(part)]
    return found[0] if len(found) == 1 else None


def _devices(nvml: Any) -> list[_Device]:
    """All cards of this machine in PCI order; [] without NVML or its driver."""
    if nvml is None:
        import pynvml as nvml
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return []
    try:
        driver = str(_ask(nvml, nvml.nvmlSystemGetDriverVersion, "unknown"))
        number = int(_ask(nvml, nvml.nvmlSystemGetCudaDriverVersion_v2, 0))
        known = {"driver": driver, "driver_cuda": (number // 1000, number % 1000 // 10)}
        return [_device(nvml, index, known) for index in range(nvml.nvmlDeviceGetCount())]
    except nvml.NVMLError:  # a card fell off the bus: CUDA cannot be initialised either
        return []
    finally:
        nvml.nvmlShutdown()


def _device(nvml: Any, index: int, known: Mapping[str, Any]) -> _Device:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    uuid, modes = (
        nvml.nvmlDeviceGetUUID(handle),
        {
            nvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS: "exclusive",
            nvml.NVML_COMPUTEMODE_EXCLUSIVE_THREAD: "exclusive",
            nvml.NVML_COMPUTEMODE_PROHIBITED: "prohibited",
        },
    )
    shared = {
        **known,
        "index": index,
        "compute_mode": modes.get(_ask(nvml, lambda: nvml.nvmlDeviceGetComputeMode(handle), 0), "default"),
        "capability": tuple(nvml.nvmlDeviceGetCudaComputeCapability(handle)),
    }

    def card(part: Any, *, mig: bool) -> Card:
        memory = nvml.nvmlDeviceGetMemoryInfo(part)
        total, free = int(memory.total), int(memory.free)
        return Card(
            uuid=nvml.nvmlDeviceGetUUID(part), name=str(nvml.nvmlDeviceGetName(part)), total=total, free=free, mig=mig, **shared
        )

    current, _ = _ask(nvml, lambda: nvml.nvmlDeviceGetMigMode(handle), (nvml.NVML_DEVICE_MIG_DISABLE, 0))
    if current != nvml.NVML_DEVICE_MIG_ENABLE:
        return _Device(uuid, (card(handle, mig=False),))
    places = range(_ask(nvml, lambda: nvml.nvmlDeviceGetMaxMigDeviceCount(handle), 0))
    slices = [_ask(nvml, lambda place=place: nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, place), None) for place in places]
    return _Device(uuid, tuple(card(part, mig=True) for part in slices if part is not None))


def _ask(nvml: Any, question: Callable[[], T], otherwise: T) -> T:
    """The answer of NVML, or `otherwise` where this card or driver has none."""
    try:
        return question()
    except nvml.NVMLError:
        return otherwise


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
