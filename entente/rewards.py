"""A reward: one more component, computed from those that a row holds. Settings name one as `module:attribute`."""

from storage.rewards import Components, Reward
from storage.schema import COMPONENTS

__all__ = ["COMPONENTS", "Components", "Reward"]
