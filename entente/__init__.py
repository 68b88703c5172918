"""What the author of a package that extends Entente imports: types and a version, and nothing else of Entente's folders.

`entente.bots`, `entente.losses` and `entente.rewards` say what a bot, a loss and a reward is; docs/extending.md has examples.
Only `entente.losses` loads torch.
"""

API_VERSION = 1
"""Goes up when a package that was written for the number before would no longer work."""
