"""Entry point of `entente`: runs a command and turns an error into one sentence on stderr and an exit code.

The code is 2 for unusable user input, else 1; 130 or 143 after a signal (`entente/cli/end_by_signal.py`); 141, without output,
if the reader closed the pipe. Only `--debug` shows a traceback. Few modules are imported before signals are handled.
"""

import errno
import os
import select
import signal
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from io import TextIOWrapper
from typing import TYPE_CHECKING

from entente.cli import end_by_signal
from entente.cli.commands import command_line, overview
from entente.telemetry.errors import EntenteError, InputError, disk_full, one_line

if TYPE_CHECKING:
    from cyclopts import App, UnknownCommandError, UnknownOptionError, UnusedCliTokensError

_HELP_FLAGS = {"--help", "-h"}
_YES = ("true", "t", "yes", "y", "1")
"""What cyclopts takes for a flag that is set, in any case."""
_PATHS_THAT_CANNOT_BE_USED = (errno.ENAMETOOLONG, errno.ENOTDIR, errno.EISDIR, errno.EACCES, errno.EROFS)
"""Path errors that are the user's mistake; a full disk, for example, is not."""


def main(arguments: list[str] | None = None) -> None:
    """Run one command and exit with its code. Without `arguments`, use those of this process and handle its signals."""
    if arguments is None:
        end_by_signal.install()
        _write_any_text()
    words = sys.argv[1:] if arguments is None else arguments
    debug = "--debug" in words
    sys.exit(run([word for word in words if word != "--debug"], debug=debug))


def _write_any_text() -> None:
    """Texts and paths also hold what a terminal's encoding lacks; a file or pipe gets UTF-8, as all our files have it."""
    if isinstance(sys.stdout, TextIOWrapper):  # None: the caller closed it
        if sys.stdout.isatty():
            sys.stdout.reconfigure(errors="backslashreplace")
        else:
            sys.stdout.reconfigure(encoding="utf-8", errors="surrogateescape")


def run(words: list[str], *, debug: bool = False) -> int:
    error: BaseException | None = None
    try:
        try:
            _call(words, debug=debug)
        finally:
            end_by_signal.nothing_is_open()
    except BaseException as raised:
        error = raised
    if number := end_by_signal.heard() or (signal.SIGINT if isinstance(error, KeyboardInterrupt) else 0):
        # A later error is a consequence of the signal. Written without rich, whose import may have been interrupted.
        _show_traceback(error, debug)
        sys.stderr.write(end_by_signal.sentence(number))
        return 128 + number
    if error is None:
        return 0
    sentence, code = _outcome(error)
    if sentence:
        _show_traceback(error, debug)
        _say(sentence)
    error = None  # pydantic's errors are unknown to the collector: this one and the frames that it holds would never be freed
    return code


def _call(words: list[str], *, debug: bool) -> None:
    if set(words) <= _HELP_FLAGS:
        print(overview(), end="")
    else:
        from entente.prefect_server.environment import prepare_environment

        prepare_environment(debug=debug)
        app = command_line()
        if _HELP_FLAGS & set(words):
            _show_help(app, words)
        else:
            with _json_alone(words):
                _run_command(app, words)
    if sys.stdout is not None:  # None: the caller closed it
        sys.stdout.flush()


def _run_command(app: "App", words: list[str]) -> None:
    from entente.telemetry.setting_marks import one_layer

    for flag, equals, value in (word.partition("=") for word in words):
        if flag.startswith("--") and equals and (value == "~" or value.startswith("~/")):
            raise InputError(f"a shell leaves '~' as it is after '=': write {flag} {value}")  # else a folder of that name is made
    with one_layer():
        command, arguments, _ = app.parse_args(words, exit_on_error=False, print_error=False)
    command(*arguments.args, **arguments.kwargs)


def _json_alone(words: list[str]) -> AbstractContextManager[None]:
    if not {"--json", *(f"--json={yes}" for yes in _YES)} & {word.lower() for word in words}:
        return nullcontext()
    from entente.cli.terminal import json_alone

    return json_alone()


def _show_help(app: "App", words: list[str]) -> None:
    from entente.cli.settings import show_settings_help

    if not show_settings_help(app, words):
        _, apps, _ = app.parse_commands([word for word in words if word not in _HELP_FLAGS])
        apps[-1].resolved_commands()  # imported, so that each has its line in the list of the group
        app(words, exit_on_error=False, print_error=False, result_action="return_value")


def _outcome(error: BaseException) -> tuple[str, int]:
    from cyclopts import CycloptsError
    from pydantic import ValidationError

    if isinstance(error, EntenteError):
        return sentence_of(error), error.exit_code
    if isinstance(error, CycloptsError | ValidationError):
        return sentence_of(error), 2
    if isinstance(error, BrokenPipeError) and _output_is_closed():
        return "", 128 + signal.SIGPIPE
    if isinstance(error, SystemExit):
        # Where its output is closed, rich raises this while it handles the BrokenPipeError, and opens the null device instead.
        if isinstance(error.__context__, BrokenPipeError):
            return "", 128 + signal.SIGPIPE
        return "", error.code if isinstance(error.code, int) else 1
    if (full := disk_full(error)) is not None:
        return str(full), full.exit_code
    if isinstance(error, OSError) and error.filename is not None:
        code = 2 if error.errno in _PATHS_THAT_CANNOT_BE_USED else 1
        return f"cannot use '{error.filename}': {error.strerror}", code
    return f"unexpected {type(error).__name__}: {one_line(error)}; see it whole with --debug", 1


def _output_is_closed() -> bool:
    """True if the reader of stdout or stderr closed it; their buffers then go to the null device."""
    outputs = select.poll()
    for descriptor in (1, 2):
        outputs.register(descriptor, 0)
    closed = [descriptor for descriptor, event in outputs.poll(0) if event & (select.POLLERR | select.POLLHUP)]
    for descriptor in closed:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, descriptor)
        os.close(nowhere)
    return bool(closed)


def sentence_of(error: Exception) -> str:
    """One line for the user: our own message, else the first error in the settings."""
    from cyclopts import CycloptsError, UnknownCommandError, UnknownOptionError, UnusedCliTokensError
    from pydantic import ValidationError

    if isinstance(error, UnknownOptionError):
        return _unknown_option(error)
    # A group that is a command too, such as `runs`, takes an unknown word for an argument that it has no place for.
    if isinstance(error, UnknownCommandError | UnusedCliTokensError) and error.unused_tokens:
        return _unknown_command(error, error.unused_tokens[0])
    cause: BaseException | None = None if isinstance(error, EntenteError) else error
    while cause is not None:
        if isinstance(cause, ValidationError):
            from entente.settings.layers import one_sentence

            return one_sentence(cause)
        cause = cause.__cause__ or (cause.__context__ if isinstance(cause, CycloptsError) else None)
    return one_line(error)


def _unknown_option(error: "UnknownOptionError") -> str:
    from entente.telemetry.setting_marks import similar_names

    option = (error.token.keyword or error.token.value).split("=")[0]
    known = {
        name.removeprefix("--") for each in error.argument_collection if each.parse for name in each.names if name[:2] == "--"
    }
    meant = " or ".join(f"--{name}" for name in similar_names(option.lstrip("-"), known) if name in known)
    return f"Unknown option: {option}." + (f" Did you mean {meant}?" if meant else "")


def _unknown_command(error: "UnknownCommandError | UnusedCliTokensError", word: str) -> str:
    from difflib import get_close_matches

    chain = " ".join(error.command_chain or ())
    typed, known = f"{chain} {word}".strip(), [name for name in _commands(command_line()) if name != chain]
    if chain and not any(name.startswith(f"{chain} ") for name in known):
        return f"'{word}' belongs to no option of `entente {chain}`; repeat an option for each of its values"
    of_a_word = [name for name in known if set(word.split("-")) & set(name.split())]
    meant = [name for name in known if name.split()[-1] == word] or get_close_matches(typed, known, 1, 0.7) or of_a_word
    return f'Unknown command "{typed}". ' + (
        f"Did you mean {meant[0]}?" if meant else f"`{' '.join(filter(None, ('entente', chain)))} --help` lists all."
    )


def _commands(app: "App", path: str = "") -> Iterator[str]:
    for name in app:
        if not name.startswith("-"):
            yield from [path + name] * (app[name].default_command is not None)
            yield from _commands(app[name], f"{path}{name} ")


def _show_traceback(error: BaseException | None, debug: bool) -> None:
    if debug and error is not None:
        import traceback

        traceback.print_exception(error)


def _say(sentence: str) -> None:
    from rich.console import Console

    from entente.telemetry.progress import shown

    Console(stderr=True, highlight=False, soft_wrap=True).print(f"entente: {shown(sentence)}", style="red", markup=False)


if __name__ == "__main__":
    main()
