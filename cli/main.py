"""Entry point of `entente`: the commands, and what becomes of errors.

An expected failure is one sentence on standard error: exit code 2 where the user's input cannot be used, 1 for everything else. A
traceback appears with `--debug` only. A signal ends a command with 130 or 143 (`cli/end_by_signal.py`). A reader that closes the
command's own output ends it with 141 and in silence, as it ends other programs. `entente --help` loads no torch, vllm, prefect or
wandb; what is loaded before signals are handled is little.
"""

import errno
import os
import select
import signal
import sys
from typing import TYPE_CHECKING

from cli import end_by_signal

if TYPE_CHECKING:
    from cyclopts import App, UnknownOptionError
    from rich.console import Console

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


def command_line(*, listing: bool = False) -> "App":
    """The commands; `listing` gives each its line for `entente --help`, which would hide its own longer help."""
    from cyclopts import App

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
    """Run one command and exit with its code; without `arguments` those of this process, whose signals are then handled."""
    if arguments is None:
        end_by_signal.install()
    words = sys.argv[1:] if arguments is None else arguments
    debug = "--debug" in words
    sys.exit(run([word for word in words if word != "--debug"], debug=debug))


def run(words: list[str], *, debug: bool = False) -> int:
    """Run one command; its exit code."""
    error: BaseException | None = None
    try:
        try:
            _call(words, debug=debug)
        finally:
            end_by_signal.nothing_is_open()
    except BaseException as raised:
        error = raised
    if number := end_by_signal.heard() or (signal.SIGINT if isinstance(error, KeyboardInterrupt) else 0):
        # Whatever else went wrong then is a consequence. Without rich, whose import may be what was interrupted.
        _show_traceback(error, debug)
        sys.stderr.write(end_by_signal.sentence(number))
        return 128 + number
    if error is None:
        return 0
    sentence, code = _outcome(error)
    if sentence:
        _show_traceback(error, debug)
        _say(sentence)
    return code


def _call(words: list[str], *, debug: bool) -> None:
    from cli.environment import prepare_environment

    prepare_environment(debug=debug)
    from rich.console import Console

    Console.on_broken_pipe = _raise_again
    app = command_line(listing=not any(word in _COMMANDS for word in words))
    asked = _with_help(app, words)
    if asked is not None:
        app(asked, exit_on_error=False, print_error=False)
    if sys.stdout is not None:  # closed by whoever started this
        sys.stdout.flush()


def _with_help(app: "App", words: list[str]) -> list[str] | None:
    """The words with cyclopts's own help flag; None where a command's help is already shown, since it takes run settings."""
    if not {"--help", "-h", "--help-all"} & set(words):
        return words
    from cli.settings_help import show_settings_help

    if any(word in _COMMANDS for word in words) and show_settings_help(app, words):
        return None
    return ["--help" if word == "--help-all" else word for word in words]


def _outcome(error: BaseException) -> tuple[str, int]:
    """What to say of `error`, nothing if it is quiet, and the exit code."""
    from cyclopts import CycloptsError
    from pydantic import ValidationError

    if isinstance(error, EntenteError):
        return _sentence(error), error.exit_code
    if isinstance(error, CycloptsError | ValidationError):
        return _sentence(error), 2
    if isinstance(error, SystemExit):
        return "", error.code if isinstance(error.code, int) else 1
    if isinstance(error, BrokenPipeError) and _output_is_closed():
        return "", 128 + signal.SIGPIPE
    if (full := disk_full(error)) is not None:
        return str(full), full.exit_code
    if isinstance(error, OSError) and error.filename is not None:
        code = 2 if error.errno in _PATHS_THAT_CANNOT_BE_USED else 1
        return f"cannot use '{error.filename}': {error.strerror}", code
    return f"unexpected {type(error).__name__}: {_one_line(error)}; see it whole with --debug", 1


def _raise_again(self: "Console") -> None:
    """In place of what rich does when an output is closed, which is to exit with 1."""
    raise


def _output_is_closed() -> bool:
    """Whether nobody reads the standard output or error any more; what is left in their buffers then goes nowhere."""
    outputs = select.poll()
    for descriptor in (1, 2):
        outputs.register(descriptor, 0)
    closed = [descriptor for descriptor, event in outputs.poll(0) if event & (select.POLLERR | select.POLLHUP)]
    for descriptor in closed:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, descriptor)
        os.close(nowhere)
    return bool(closed)


def _sentence(error: Exception) -> str:
    """One line that says what is wrong: our own words where we raised it, else the first complaint about the settings."""
    from cyclopts import CycloptsError, UnknownOptionError
    from pydantic import ValidationError

    if isinstance(error, UnknownOptionError):
        return _unknown_option(error)
    cause: BaseException | None = None if isinstance(error, EntenteError) else error
    while cause is not None:
        if isinstance(cause, ValidationError):
            from pipeline.run_settings import one_sentence

            return one_sentence(cause)
        cause = cause.__cause__ or (cause.__context__ if isinstance(cause, CycloptsError) else None)
    return _one_line(error)


def _unknown_option(error: "UnknownOptionError") -> str:
    """The option, and the one that was probably meant, which may have the same name in another section."""
    from pipeline.setting_names import similar_names

    given = (error.token.keyword or error.token.value).split("=")[0]
    known = {
        name.removeprefix("--") for each in error.argument_collection if each.parse for name in each.names if name[:2] == "--"
    }
    meant = " or ".join(f"--{name}" for name in similar_names(given.lstrip("-"), known) if name in known)
    return f"Unknown option: {given}." + (f" Did you mean {meant}?" if meant else "")


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


def _show_traceback(error: BaseException | None, debug: bool) -> None:
    if debug and error is not None:
        import traceback

        traceback.print_exception(error)


def _say(sentence: str) -> None:
    from rich.console import Console

    from cli.plain_text import shown

    Console(stderr=True, highlight=False, soft_wrap=True).print(f"entente: {shown(sentence)}", style="red", markup=False)


if __name__ == "__main__":
    main()
