"""A reward: one more component, computed from those that a row holds. Settings name one as `module:attribute`."""

from storage.arrow_files import COMPONENTS
from storage.rewards import Components, Reward

__all__ = ["COMPONENTS", "Components", "Reward"]
