"""Entry point of `entente`: the commands, and what becomes of errors.

An expected failure is one sentence on standard error: exit code 2 where the user's input cannot be used, 1 for everything else. A
traceback appears with `--debug` only. `entente --help` loads no torch, vllm, prefect or wandb.
"""

import asyncio
import errno
import sys
import traceback

from cyclopts import App, CycloptsError
from pydantic import ValidationError
from rich.console import Console

from cli.plain_text import shown

try:
    from telemetry.errors import EntenteError, disk_full
except ImportError as error:  # found before any command could say it
    sys.exit(
        f"entente: the package `telemetry` that Python finds first is not this application's ({error}): "
        "use an environment of its own, and look at PYTHONPATH and the working folder"
    )

_COMMANDS = {
    "train": ("cli.train:train", "Train a policy: roll out, train, publish, repeat."),
    "up": ("cli.up:up", "Start Prefect's server, deployments and a worker on this machine."),
    "down": ("cli.up:down", "End what `entente up` began."),
    "cache": ("cli.cache:app", "Build, refresh, show and verify the frozen positions that rollouts start from."),
    "serve": ("cli.serve:serve", "Serve an inference worker over HTTP."),
    "evaluate": ("cli.evaluate:evaluate", "Measure the strength of a policy version."),
    "watch": ("cli.watch:watch", "Watch a run's figures on one screen, while it trains."),
    "runs": ("cli.runs:runs", "List the runs: how far each is, what it gained, and how large it is."),
    "report": ("cli.report:report", "Write what a run came to as one page."),
    "explain-step": ("cli.explain:explain_step", "Say where one step's seconds went, why, and what to change."),
    "explain-run": ("cli.explain:explain_run", "Say what limits a run, and which setting moves it."),
    "replay": ("cli.replay_game:replay", "Step through a game of a run: boards, orders, and how sure the policy was."),
    "replay-step": ("cli.replay_step:replay_step", "Run a past step again, and compare it with its record."),
    "lab": ("cli.lab:lab", "Compare losses on batches that a run trained on, without new rollouts."),
    "inspect": ("cli.inspect:app", "Look at one decision, one group of forks, or one step of a run."),
    "sql": ("cli.sql:sql", "Ask a run's rows with SQL, also while it trains."),
    "model": ("cli.model:app", "Make and look at the tiny model."),
    "profile": ("cli.profile:app", "Profile rollouts, the trainer or a whole run, and compare with a stored profile."),
    "tune": ("cli.tune:app", "Find the engine settings that draw the most decisions, with the adapter on."),
    "bench": ("cli.bench:app", "Measure this machine against the targets."),
    "settings": ("cli.settings:settings", "Print what settings come to, as TOML, and what each of them means."),
    "doctor": ("cli.doctor:doctor", "Say what is installed, what does not fit, and the cure."),
    "clean": ("cli.clean:clean", "Remove what has grown old: adapters, checkpoints, asides, Prefect's old runs."),
}
"""Name -> where the command lies, which is imported only when it runs, and its line in the list of commands."""

_PATHS_THAT_CANNOT_BE_USED = (errno.ENAMETOOLONG, errno.ENOTDIR, errno.EISDIR, errno.EACCES, errno.EROFS)
"""What the system says of a path that is the user's mistake; a full disk, for one, is not."""


def command_line(*, listing: bool = False) -> App:
    """The commands; `listing` gives each its line for `entente --help`, which would hide its own longer help."""
    app = App(
        name="entente",
        help="Train a language model to play Diplomacy, as a data pipeline that you can watch, query and repeat.",
        version=_version,
        version_flags=["--version"],
        suppress_keyboard_interrupt=False,
    )
    for name, (place, line) in _COMMANDS.items():
        if listing:
            app.command(place, name=name, help=line)
        else:
            app.command(place, name=name)
    return app


def _version() -> str:
    """The installed version, as its metadata has it."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("entente")
    except PackageNotFoundError:
        return "unknown: this runs from a folder that was never installed"


def main(arguments: list[str] | None = None) -> None:
    """Run one command and exit with its code."""
    words = sys.argv[1:] if arguments is None else arguments
    debug = "--debug" in words
    sys.exit(run([word for word in words if word != "--debug"], debug=debug))


def run(words: list[str], *, debug: bool = False) -> int:
    """Run one command; its exit code."""
    from cli.environment import prepare_environment

    prepare_environment(debug=debug)
    try:
        app = command_line(listing=not any(word in _COMMANDS for word in words))
        app(words, exit_on_error=False, print_error=False)
    except (CycloptsError, ValidationError, EntenteError) as error:
        return _fail(_sentence(error), error.exit_code if isinstance(error, EntenteError) else 2, debug)
    except KeyboardInterrupt:
        return _fail("interrupted", 130, debug)
    except asyncio.CancelledError:
        return _fail("told to end (SIGTERM)", 143, debug)
    except BrokenPipeError:
        return 0
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 1
    except OSError as error:
        if error.filename is None or disk_full(error):
            return _unexpected(error, debug)
        given = error.errno in _PATHS_THAT_CANNOT_BE_USED
        return _fail(f"cannot use '{error.filename}': {error.strerror}", 2 if given else 1, debug)
    except Exception as error:
        return _unexpected(error, debug)
    return 0


def _unexpected(error: Exception, debug: bool) -> int:
    if (full := disk_full(error)) is not None:
        return _fail(str(full), full.exit_code, debug)
    return _fail(f"unexpected {type(error).__name__}: {_one_line(error)}; see it whole with --debug", 1, debug)


def _sentence(error: Exception) -> str:
    """One line that says what is wrong: our own words where we raised it, else the first complaint about the settings."""
    cause: BaseException | None = None if isinstance(error, EntenteError) else error
    while cause is not None:
        if isinstance(cause, ValidationError):
            from flows.run_settings import one_sentence

            return one_sentence(cause)
        cause = cause.__cause__ or (cause.__context__ if isinstance(cause, CycloptsError) else None)
    return _one_line(error)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _fail(sentence: str, code: int, debug: bool) -> int:
    if debug:
        traceback.print_exc()
    Console(stderr=True, highlight=False, soft_wrap=True).print(f"entente: {shown(sentence)}", style="red", markup=False)
    return code


if __name__ == "__main__":
    main()
