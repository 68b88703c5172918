"""Whatever is given, the command ends with a code and at most one sentence: never a traceback, never a file.

Hypothesis makes settings files of any bytes, and command lines from every command's own flags. All commands that do long work
run dry; where one would begin to work all the same, the test fails.
"""

import contextlib
import io
import os
import re
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from cyclopts import App
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from entente.cli.commands import command_line
from entente.cli.main import run
from entente.settings.layers import layered_settings
from storage.runs import RunPaths
from tests.command import content

READS = {("cache", "show"), ("model", "show"), ("sql",), ("doctor",)}
"""Commands that only look, and so have no dry run."""
MANY = settings(
    max_examples=int(os.environ.get("ENTENTE_FUZZ_EXAMPLES", "30")),
    derandomize="ENTENTE_FUZZ_EXAMPLES" not in os.environ,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)


def begins(*_: object, **__: object) -> None:
    """What stands where work would begin."""
    raise AssertionError("work has begun")


@pytest.fixture(scope="module", autouse=True)
def no_work() -> Iterator[None]:
    """Nothing starts, and this process keeps its environment."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("entente.prefect_server.environment.prepare_environment", lambda **how: None)
        patch.setattr("entente.cli.run_flow.show_progress", begins)
        patch.setattr("entente.inference.torch_engine.TorchEngine", begins)
        patch.setenv("HF_HUB_OFFLINE", "1")
        yield


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder: a run called `taken`, and a model folder called `bare` without a tokenizer."""
    taken = RunPaths(tmp_path / "runs" / "taken").create()
    taken.settings.write_text(layered_settings("laptop").model_dump_json())
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def ends_well(folder: Path, words: list[str]) -> int:
    """Run the words; every promise about how a command ends is checked here."""
    before = content(folder)
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), warnings.catch_warnings():
        code = run(words)
    notes = re.compile(r"run \S+, the latest in \S+\n")
    said = notes.sub("", err.getvalue(), count=1)
    assert code in (0, 1, 2), (code, words)
    lines = said.splitlines()
    assert len(lines) <= 1, said
    if words[:1] != ["doctor"]:  # its findings are its answer, and its code their verdict
        assert (code == 0) == (said == ""), (code, said)
    assert not said or said.startswith("entente: "), said
    assert "entente: unexpected" not in said and "Traceback" not in said + out.getvalue(), said
    assert content(folder) == before, "something was written"
    return code


ODD = [
    "", "tiny", "random", "..", "/", "a/b", "bare", "taken", "x" * 300, "\x00", "[red]", "ＡＢＣ", "🂡", "mover", "float32", "all",
]  # fmt: skip
TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\r"), max_size=20) | st.sampled_from(ODD)
NUMBERS = (
    st.integers(-3, 70)
    | st.sampled_from([10**9, 10**18, 2**63, 10**30, -(10**30), 10**400])
    | st.floats()
    | st.sampled_from([1e308, 5e-324, 0.5])
)


@MANY
@given(junk=st.binary(max_size=200))
@example(junk=b"steps = " + b"9" * 5000)
@example(junk=b"steps = " + b"[" * 5000)
@example(junk=b"[inference]\nkv_cache_gib = 1" + b"0" * 400)
@example(junk=b"[tiny_model]\nhidden = 32000000000000000000000000000000\nlayers = 1000000000")
@example(junk=b'runs_root = "a\\u0000b"')
@example(junk=b"run = ['taken']")
def test_any_file_given_as_settings_ends_in_a_plan_or_a_sentence(folder: Path, junk: bytes):
    (folder / "given.toml").write_bytes(junk)
    ends_well(folder, ["train", "--dry-run", "--config", "given.toml"])


def commands(app: App, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], list[str]]]:
    """Every command that only looks or can run dry, with the words that are safe to run and its flags."""
    for name in app:
        if name.startswith("-"):
            continue
        here, whole = app[name], (*path, name)
        yield from commands(here, whole)
        if here.default_command is None:
            continue
        flags = sorted({flag for argument in here.assemble_argument_collection() for flag in argument.names} - {"*"})
        if whole in READS or "--dry-run" in flags:
            yield whole, [flag for flag in flags if flag != "--dry-run"]


FLAGS = dict(commands(command_line()))
NEEDED: dict[tuple[str, ...], list[str]] = {
    ("sql",): ["select 1", "--run", "taken"],
}
WORDS = (
    TEXT
    | NUMBERS.map(str)
    | st.sampled_from(["-", "--", "--help", "-1", "=", "taken", "bare", "select 1", "--nothing", "{}", "[]", "laptop"])
)


@st.composite
def command_lines(draw: st.DrawFn) -> list[str]:
    """A command, and after it known flags with some value or none, and loose words."""
    name = draw(st.sampled_from(sorted(FLAGS)))
    flag = st.sampled_from([*FLAGS[name], "--unknown"])
    pair = st.tuples(flag, WORDS).map(list) | st.tuples(flag, WORDS).map(lambda both: ["=".join(both)])
    pieces = draw(st.lists(pair | pair | pair | flag.map(lambda word: [word]) | WORDS.map(lambda word: [word]), max_size=5))
    first = NEEDED.get(name, []) if draw(st.booleans()) else []
    dry = [] if name in READS else ["--dry-run"]
    return [*name, *dry, *first, *(word for piece in pieces for word in piece)]


@MANY
@given(words=command_lines())
@example(words=["train", "--dry-run", "--run"])
@example(words=["train", "--dry-run", "--run", "a", "--run", "b"])
@example(words=["train", "--dry-run", "--run", "\ud800"])
@example(words=["train", "--dry-run", "--run", "x" * 10_000])
@example(words=["train", "--dry-run", "--runs-root", "x" * 10_000])
@example(words=["train", "--dry-run", "--runs-root", "a\0b"])
@example(words=["model", "show", "a\0b"])
@example(words=["train", "--dry-run", "--steps", "9" * 5000])
@example(words=["sql", "select 1", "--run", "taken", "--runs-root", "bare/config.json"])
@example(words=["train", "--dry-run", "--config", "runs"])
@example(words=["cache"])
@example(words=["\n"])
@example(words=[""])
def test_any_words_end_in_an_answer_or_a_sentence(folder: Path, words: list[str]):
    ends_well(folder, words)
