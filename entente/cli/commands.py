"""The commands of `entente`: names and import paths."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cyclopts import App

_TRAIN = "Train a policy, or one per combination of settings and seeds."
_UP = "Start or stop Prefect's server, deployments and a worker."
_SERVE = "Serve a model to runs, or legal orders over the OpenAI API."
_PLAY = "Play against versions in a browser; enter one on a server."
_PAGES = "Write the HTML report of a run, or compare several."
_LISTED = "List, inspect, replay or clean runs; watch a run."
_CHECKED = "Check this environment; test a run's parts on a new GPU."
ABOUT = "Train a language model to play Diplomacy, as a data pipeline."
COMMANDS = {
    "Train": {
        "train": ("entente.cli.train:train", _TRAIN),
        "sweep": ("entente.cli.sweep:sweep", _TRAIN),
        "label": ("entente.cli.label:label", "Label decisions of a policy in whole games by search."),
        "evaluate": ("entente.cli.evaluate:evaluate", "Measure strength on held-out positions and in matches."),
        "play": ("entente.cli.play:play", _PLAY),
        "enter": ("entente.cli.enter:enter", _PLAY),
        "cache": ("entente.cli.cache:app", "Build and check the positions that rollouts start from."),
        "model": ("entente.cli.model:app", "Make, fetch and show base models."),
        "export": ("entente.cli.model:export", "Export a version for transformers and vLLM."),
    },
    "Inspect runs": {
        "view": ("entente.cli.view:view", "Look at runs live in a browser: steps, groups, tokens, SQL."),
        "runs": ("entente.cli.runs:app", _LISTED),
        "watch": ("entente.cli.watch:watch", _LISTED),
        "report": ("entente.cli.report:report", _PAGES),
        "compare": ("entente.cli.compare:compare", _PAGES),
        "replay": ("entente.cli.replay_game:replay", "Step through a game; 'runs what-if' tries other orders."),
        "sql": ("entente.cli.sql:sql", "Query the rows of runs with SQL, even while they train."),
    },
    "Services": {
        "serve": ("entente.cli.serve:serve", _SERVE),
        "up": ("entente.cli.up:up", _UP),
        "down": ("entente.cli.up:down", _UP),
    },
    "This machine": {
        "doctor": ("entente.cli.doctor:doctor", _CHECKED),
        "smoke": ("entente.cli.smoke:smoke", _CHECKED),
        "settings": ("entente.cli.settings:settings", "Print settings as TOML, or the reference of all settings."),
        "bench": ("entente.cli.bench:app", "Run benchmarks; tune the engine."),
    },
}
"""Heading -> name -> (import path, imported only when the command runs; line in `entente --help`)."""


def command_line() -> "App":
    from cyclopts import App

    app = App(
        name="entente",
        help=ABOUT,
        version=_version,
        version_flags=["--version"],
        suppress_keyboard_interrupt=False,
    )
    for commands in COMMANDS.values():
        for name, (path, _) in commands.items():
            app.command(path, name=name)
    app.register_install_completion_command()
    return app


def overview() -> str:
    """The text of `entente --help`: one screen, without importing the commands or cyclopts."""
    lines = ["Usage: entente COMMAND [OPTIONS], entente COMMAND --help, entente --version", ABOUT]
    for heading, commands in COMMANDS.items():
        names: dict[str, list[str]] = {}  # commands with one line share it
        for name, (_, line) in commands.items():
            names.setdefault(line, []).append(name)
        lines += [f"{heading}:", *(f"  {', '.join(same):<15} {line}" for line, same in names.items())]
    return "\n".join([*lines, ""])


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("entente")
    except PackageNotFoundError:
        return "unknown: the package is not installed"
