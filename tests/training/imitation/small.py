"""Settings of an imitation that takes a second, and what its tests share."""

from pathlib import Path

from entente.training.imitation.settings import ImitationSettings

SMALL = ImitationSettings(
    teachers=("mover", "random"),
    games=4,
    last_year=1901,
    hidden=32,
    layers=1,
    steps=6,
    positions=2,
    eval_every=3,
    checkpoint_minutes=0,
)


def quiet(*each: object) -> None:
    """Reports nothing."""


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}
