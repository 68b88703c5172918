"""Runs as objects, for a notebook or a program; and what the author of a package that extends Entente imports.

`entente.run("mine")` and the other functions are of `entente.notebook`, which is loaded when one of them is first used:
`import entente` loads none of Entente's other folders. `entente.bots`, `entente.losses` and `entente.rewards` say what a bot, a
loss and a reward is; docs/extending.md has examples. Of these only `entente.losses` loads torch.
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
