"""A stand-in for `pynvml`: a machine with the cards that a test wants. A test holds its names to those of the real module."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pynvml

from entente.telemetry.cards import Card

GIB = 2**30


def card(place: int, *, total: int = 80, free: int = 80, mig: bool = False) -> Card:
    """A card as the code knows it; memory in GiB."""
    name = f"GPU-{place}"
    return Card(uuid=name, index=place, name="H100", total=total * GIB, free=free * GIB, driver="580", mig=mig)


@dataclass(kw_only=True)
class FakeCard:
    """One card, or a slice of one."""

    uuid: str
    name: str = "NVIDIA H100"
    total: int = 80 * GIB
    free: int = 79 * GIB
    slices: "Sequence[FakeCard] | None" = None
    """Slices in MIG mode; None: the mode is off."""
    old: bool = False
    """Whether the card knows no MIG mode at all."""
    errors: Mapping[str, int] = field(default_factory=dict)
    """Functions that fail for this card, such as `nvmlDeviceGetMemoryInfo`, each with the number of NVML's error."""


@dataclass(kw_only=True)
class FakeNvml:
    """The names of `pynvml` that `entente.telemetry.cards` uses, over `cards`."""

    cards: Sequence[FakeCard] = ()
    driver: str = "580.65.06"
    has_driver: bool = True
    opened: int = 0
    NVMLError: type[Exception] = pynvml.NVMLError
    NVML_DEVICE_MIG_DISABLE: int = pynvml.NVML_DEVICE_MIG_DISABLE
    NVML_DEVICE_MIG_ENABLE: int = pynvml.NVML_DEVICE_MIG_ENABLE
    asked: list[str] = field(default_factory=list)

    def nvmlInit(self) -> None:
        if not self.has_driver:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)
        self.opened += 1

    def nvmlShutdown(self) -> None:
        self.opened -= 1

    def nvmlSystemGetDriverVersion(self) -> str:
        return self.driver

    def nvmlDeviceGetCount(self) -> int:
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeCard:
        return self._asked(self.cards[index], "nvmlDeviceGetHandleByIndex")

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> FakeCard:
        everything = [piece for card in self.cards for piece in (card, *(card.slices or ()))]
        return self._asked(next(card for card in everything if card.uuid == uuid), "nvmlDeviceGetHandleByUUID")

    def nvmlDeviceGetUUID(self, card: FakeCard) -> str:
        return self._asked(card, "nvmlDeviceGetUUID").uuid

    def nvmlDeviceGetName(self, card: FakeCard) -> str:
        return self._asked(card, "nvmlDeviceGetName").name

    def nvmlDeviceGetMemoryInfo(self, card: FakeCard) -> SimpleNamespace:
        self.asked.append(self._asked(card, "nvmlDeviceGetMemoryInfo").uuid)
        return SimpleNamespace(total=card.total, free=card.free, used=card.total - card.free)

    def nvmlDeviceGetMigMode(self, card: FakeCard) -> list[int]:
        if self._asked(card, "nvmlDeviceGetMigMode").old:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return [int(card.slices is not None), 0]

    def nvmlDeviceGetMaxMigDeviceCount(self, card: FakeCard) -> int:
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, card: FakeCard, place: int) -> FakeCard:
        if place >= len(card.slices or ()):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return (card.slices or ())[place]

    def _asked(self, card: FakeCard, function: str) -> FakeCard:
        if function in card.errors:
            raise pynvml.NVMLError(card.errors[function])
        return card

    def install(self, patch: Callable[[Any, str, Any], None]) -> None:
        """Put this machine behind the real module, by `patch(module, name, value)`."""
        for name in (name for name in dir(self) if name.startswith("nvml")):
            patch(pynvml, name, getattr(self, name))
