"""Settings of an imitation that takes a second."""

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
