"""Runs as objects, for notebooks and programs; and the API for packages that extend Entente (examples: docs/extending.md).

`import entente` is light: `entente.notebook` (`entente.run("mine")` etc.) loads on first use. `entente.bots`, `entente.losses`
and `entente.rewards` define what a bot, a loss and a reward is. Of these only `entente.losses` loads torch.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from entente.notebook import run, runs, train

API_VERSION = 1
"""Goes up when a package that was written for the number before would no longer work."""

__all__ = ["API_VERSION", "run", "runs", "train"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'entente' has no attribute '{name}'")
    from entente import notebook

    return getattr(notebook, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
