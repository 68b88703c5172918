"""A reward: an additional component, computed from those of a row. Settings name one as `module:attribute`."""

from storage.arrow_files import COMPONENTS
from storage.rewards import Components, Reward

__all__ = ["COMPONENTS", "Components", "Reward"]
