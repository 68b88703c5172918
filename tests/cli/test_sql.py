"""Claims about `entente sql` as a person meets it: signals, files, the terminal, and the text of tokens."""

import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from entente.cli import main
from entente.reports.run_text import RunText
from entente.settings.run_settings import RunSettings
from storage.run_sql import THREAD
from storage.runs import RunPaths
from storage.shards import publish_shard
from tests.command import cells
from tests.damage import flip
from tests.storage.make_rows import make_shard_rows

ENDLESS = "select count(*) from range(10000000000000)"
Ask = Callable[..., tuple[int, str, str]]


@pytest.fixture
def ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Ask:
    """`entente sql WORDS` in this process, of a run with a few rows: exit code, standard output and error."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("entente.prefect_server.environment.prepare_environment", lambda **how: None)
    paths = RunPaths(Path("runs/mine")).create()
    paths.settings.write_text(RunSettings(run="mine").model_dump_json())
    decisions, phases = make_shard_rows(random.Random(0), range(1), "local")
    publish_shard(paths, "local", 0, decisions, phases, {}, next_start_group=1)

    def run(*words: str) -> tuple[int, str, str]:
        code = main.run(["sql", "--run", "mine", *words])
        told = capsys.readouterr()
        return code, told.out, told.err

    return run


def test_ctrl_c_ends_a_question_with_its_code(ask: Ask):
    def send() -> None:
        while not any(thread.name.startswith(THREAD) for thread in threading.enumerate()):
            time.sleep(0.01)
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGINT)

    former = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests run in the background
    try:
        threading.Thread(target=send, daemon=True).start()
        code, shown, _ = ask("--max-seconds", "60", ENDLESS)  # the sentence is written once a process
    finally:
        signal.signal(signal.SIGINT, former)
    assert (code, shown) == (130, "")


def test_limits_can_be_set(ask: Ask):
    assert "--max-seconds" in ask(ENDLESS, "--max-seconds", "0.3")[2]
    assert "--memory-gib" in ask("select range from range(100000000) order by hash(range)", "--memory-gib", "0.05")[2]


def test_nothing_in_a_value_or_a_name_reaches_the_terminal_as_a_command(ask: Ask):
    _, shown, _ = ask("""select '[red]x[/red]' || chr(27) || '[2J' || chr(155) || chr(10) as "[bold]h\x1b[31m" """)
    assert cells(shown) == [["[bold]h\\x1b[31m"], ["[red]x[/red]\\x1b[2J\\x9b\\n"]]
    code, _, said = ask('select "\x1b[31m" from decisions')
    assert code == 2 and "\x1b[31m" not in said
    _, plan, _ = ask("explain select 1")
    assert len(plan.splitlines()) > 5


def test_a_table_ends_after_ten_thousand_rows_and_says_so(ask: Ask):
    code, shown, said = ask("from range(20000)")
    assert (code, len(cells(shown))) == (0, 10_001)
    assert said.startswith("only the first 10,000 rows are shown")


def test_a_terminal_shows_a_hundred_rows(ask: Ask, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert ask("from range(101)")[2].startswith("only the first 100 rows are shown")
    assert ask("from range(100)")[2] == ""


@pytest.mark.parametrize("name", ["a.csv", "a.jsonl", "a.parquet"])
def test_the_suffix_of_the_file_decides(ask: Ask, name: str):
    assert ask("select 1 as a, 2 as a", "--output", name) == (0, "", f"rows written to {name}: 1\n")
    file = Path(name)
    if file.suffix == ".parquet":
        assert pq.read_table(file).to_pylist() == [{"a": 1, "a_1": 2}]
    elif file.suffix.lower() == ".csv":
        assert file.read_text().splitlines() == ['"a","a_1"', "1,2"]
    else:
        assert json.loads(file.read_text()) == {"a": 1, "a_1": 2}


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["select 1", "--format", "json", "--output", "a.csv"], "--format conflicts with --output"),
        (["select 1", "--output", "a.txt"], "--output writes csv, json or parquet"),
        (["select interval 1 day as wait", "--output", "a.parquet"], "parquet cannot hold a column of the answer"),
        (["select 1", "--max-seconds", "0"], "--max-seconds"),
        (["select 1", "--max-seconds", "inf"], "--max-seconds"),
        (["select 1", "--max-seconds", "nan"], "--max-seconds"),
        (["select 1", "--memory-gib", "1e300"], "--memory-gib"),
    ],
)
def test_what_cannot_be_answered_so_is_a_sentence_and_leaves_no_file(ask: Ask, words: list[str], sentence: str):
    code, shown, said = ask(*words)
    assert (code, shown) == (2, "") and said.startswith("entente: ") and sentence in said
    assert not any(Path().glob("a.*"))


def test_a_file_keeps_its_content_where_another_answer_cannot_be_written(ask: Ask):
    assert ask("select 1 as a", "--output", "a.parquet")[0] == 0
    Path("a.parquet").chmod(0o600)
    assert ask("select 1 as a", "--output", "a.parquet")[0] == 0 and Path("a.parquet").stat().st_mode & 0o777 == 0o600
    assert ask("select interval 1 day as wait", "--output", "a.parquet")[0] == 2
    assert pq.read_table("a.parquet").to_pylist() == [{"a": 1}]
    assert [file.name for file in Path().iterdir() if file.is_file()] == ["a.parquet"]


def test_a_pipe_that_is_named_as_output_is_written_to_and_stays(ask: Ask):
    os.mkfifo("pipe.csv")
    reader = os.open("pipe.csv", os.O_RDONLY | os.O_NONBLOCK)
    assert ask("select 1 as a", "--output", "pipe.csv")[0] == 0
    assert os.read(reader, 100) == b'"a"\n1\n' and Path("pipe.csv").is_fifo()
    os.close(reader)


def test_what_the_answer_lacks_is_said_on_standard_error(ask: Ask):
    flip(Path("runs/mine/shards/local/000000.arrow"))
    Path("runs/mine/metrics.jsonl").write_text('{"step": 1, "train/loss": 0.5}\n{"step": 2, "tra\n{"step": 3')
    code, shown, said = ask("--format", "csv", "select count(*) from decisions")
    assert code == 0 and shown.splitlines()[1] == "0"
    assert "the answer lacks rows of 2 damaged or missing files, first local/000000.arrow" in said


def test_without_its_tokenizer_tokens_have_no_text_and_one_sentence_says_so(ask: Ask):
    code, shown, said = ask("select token, text from tokens limit 1")
    assert (code, cells(shown)[0], cells(shown)[1][1]) == (0, ["token", "text"], "")
    assert said.count("\n") == 1 and "of run 'mine' is gone" in said and 'the column "text" is empty' in said
    assert ask("select count(token) as n from tokens", "--format", "csv")[2] == ""


def test_tokens_have_their_text(ask: Ask, model: Path):
    settings = RunSettings(run="mine").model_dump(mode="json")
    settings["inference"]["model"] = str(model)
    Path("runs/mine/settings.json").write_text(json.dumps(settings))
    code, shown, said = ask("select token, text from tokens", "--format", "json")
    rows = [json.loads(line) for line in shown.splitlines()]
    from entente.decoding.codec import Codec

    assert (code, said) == (0, "") and rows
    assert all(row["text"] == Codec(model).decode([row["token"]]) for row in rows[:20])


def test_the_list_of_ready_questions_needs_no_run(ask: Ask, capsys: pytest.CaptureFixture[str]):
    assert main.run(["sql", "@", "--runs-root", "nowhere"]) == 0
    assert "@lag_histogram" in capsys.readouterr().out


def test_threads_of_one_query_load_the_tokenizer_once(monkeypatch: pytest.MonkeyPatch, model: Path):
    loads: list[int] = []

    def slowly(*which: object) -> Path:
        loads.append(threading.get_ident())
        time.sleep(0.05)
        return model

    monkeypatch.setattr("entente.reports.run_text.model_of", slowly)
    text = RunText(RunSettings(), Path("runs/mine"))
    with ThreadPoolExecutor(4) as pool:
        assert None not in list(pool.map(text.of_token, [40, 41, 42, 43]))
    assert len(loads) == 1
