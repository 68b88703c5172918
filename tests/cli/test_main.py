"""What becomes of errors: the user's own are exit code 2, all others 1, and each is one line unless `--debug` asks for more."""

import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from entente.cli import main
from entente.prefect_server.environment import prepare_environment
from entente.telemetry.errors import DataError, EngineError, InputError


class _Foreign(BaseModel):
    number: int


def foreign_complaint() -> ValidationError:
    """A complaint of pydantic's about something that is no setting of ours."""
    try:
        _Foreign.model_validate({"number": "none"})
    except ValidationError as error:
        return error
    raise AssertionError


@pytest.fixture
def run_into(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Run a command that ends with the given error, in this process: `run_into(error)`; its exit code."""
    monkeypatch.setattr("entente.prefect_server.environment.prepare_environment", lambda **how: None)
    for name, before_any_signal in (("_heard", 0), ("_reported", False), ("_nothing_is_open", False)):
        monkeypatch.setattr(f"entente.cli.end_by_signal.{name}", before_any_signal)

    def run(error: BaseException, **how: Any) -> int:
        def fail(*paths: object) -> None:
            raise error

        monkeypatch.setattr("entente.settings.layers.settings_of", fail)
        return main.run(["sql", "select 1", "--run", "mine"], **how)

    return run


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        pytest.param(InputError("no such run"), 2, "entente: no such run", id="user"),
        pytest.param(DataError("a shard\nis torn"), 1, "entente: a shard is torn", id="several lines"),
        pytest.param(
            caused(EngineError("vLLM could not load it"), foreign_complaint()), 1, "entente: vLLM could not load it", id="caused"
        ),
        pytest.param(
            RuntimeError("first\n  second"),
            1,
            "entente: unexpected RuntimeError: first second; see it whole with --debug",
            id="unexpected",
        ),
        pytest.param(EngineError("[red]odd[/red] words [/]"), 1, "entente: [red]odd[/red] words [/]", id="markup"),
    ],
)
def test_an_error_is_one_line_and_an_exit_code(
    run_into: Callable[..., int], capsys: pytest.CaptureFixture[str], error: Exception, code: int, line: str
):
    assert run_into(error) == code
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", line + "\n")


def test_a_complaint_about_a_setting_names_the_setting(run_into: Callable[..., int], capsys: pytest.CaptureFixture[str]):
    assert run_into(foreign_complaint()) == 2
    assert capsys.readouterr().err.startswith("entente: number: input should be a valid integer")


def test_debug_shows_where_it_happened(run_into: Callable[..., int], capsys: pytest.CaptureFixture[str]):
    assert run_into(InputError("no such run"), debug=True) == 2
    said = capsys.readouterr().err
    assert said.startswith("Traceback") and said.endswith("entente: no such run\n")


def test_an_interrupt_ends_with_130_and_no_traceback(run_into: Callable[..., int], capsys: pytest.CaptureFixture[str]):
    assert run_into(KeyboardInterrupt()) == 130
    assert capsys.readouterr().err == "entente: interrupted\n"


def test_a_lost_part_is_a_failure_although_it_shows_as_a_broken_pipe(
    run_into: Callable[..., int], capsys: pytest.CaptureFixture[str]
):
    assert run_into(BrokenPipeError(32, "Broken pipe")) == 1
    assert "unexpected BrokenPipeError" in capsys.readouterr().err


def test_a_reader_that_closes_the_output_ends_a_command_in_silence_and_not_with_0(entente: Any):
    with entente.start("settings") as process:
        process.stdout.close()
        process.stdout = None
        _, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (141, "")


def test_a_pipe_gets_utf_8_whatever_the_locale(entente: Any):
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    if not sys.prefix.isascii():  # in such a locale no Python starts from there
        ascii_only = {"PYTHONIOENCODING": "ascii"}
    done = entente.process("doctor", "--runs-root", "/proc/runs", **ascii_only)
    assert (done.returncode, done.stderr) == (1, "") and "→" in done.stdout


@pytest.mark.parametrize("words", [["sql", "select 1"], ["--debug", "sql", "select 1"], ["sql", "--debug", "select 1"]])
def test_debug_may_stand_anywhere_and_no_command_sees_it(monkeypatch: pytest.MonkeyPatch, words: list[str]):
    seen: list[tuple[list[str], bool]] = []
    monkeypatch.setattr(main, "run", lambda words, *, debug: seen.append((words, debug)) or 3)
    with pytest.raises(SystemExit) as ended:
        main.main(words)
    assert ended.value.code == 3
    assert seen == [(["sql", "select 1"], "--debug" in words)]


@pytest.fixture
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """An environment in which the user has set nothing."""
    environment: dict[str, str] = {}
    monkeypatch.setattr(os, "environ", environment)
    return environment


def test_libraries_are_quiet_and_nothing_is_sent_anywhere(bare_environment: dict[str, str]):
    with warnings.catch_warnings():
        prepare_environment(debug=False)
    assert bare_environment["PREFECT_SERVER_ANALYTICS_ENABLED"] == "false" and bare_environment["DO_NOT_TRACK"] == "1"
    assert bare_environment["HF_HUB_DISABLE_TELEMETRY"] == "1"
    assert bare_environment["PREFECT_HOME"].endswith("/.prefect")
    assert bare_environment["PREFECT_LOGGING_LEVEL"] == "WARNING"


def test_what_the_user_has_set_stands(bare_environment: dict[str, str]):
    bare_environment |= {"PREFECT_HOME": "/elsewhere", "WANDB_SILENT": "false", "PREFECT_LOGGING_LEVEL": "DEBUG"}
    set_before = dict(bare_environment)
    with warnings.catch_warnings():
        prepare_environment(debug=False)
    assert set_before.items() <= bare_environment.items()


def test_a_user_without_a_home_gets_one_that_libraries_can_use(bare_environment: dict[str, str], monkeypatch: pytest.MonkeyPatch):
    def unknown(user: object) -> None:
        raise KeyError(user)

    monkeypatch.setattr("pwd.getpwuid", unknown)
    with warnings.catch_warnings():
        prepare_environment(debug=False)
        assert str(Path.home()) == bare_environment["PREFECT_HOME"]
        bare_environment["HOME"] = "/srv/me"
        prepare_environment(debug=False)
    assert bare_environment["HOME"] == "/srv/me"
