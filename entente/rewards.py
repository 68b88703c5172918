"""A reward: one more component, computed from those that a row holds. Entry points of the group `entente.rewards`."""

from storage.rewards import Components, Reward
from storage.schema import COMPONENTS

__all__ = ["COMPONENTS", "Components", "Reward"]
