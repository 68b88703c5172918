"""Claims about `import entente`: it is light and lazy, what it shows is what `entente sql` and the files hold, an error is one
sentence, and the notebook of the docs runs.
"""

import json
import locale
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import entente
from entente.evaluation.score_files import read_score, track_label, write_score
from entente.reports.inspect_rows import Inspector
from entente.reports.replay_page import replay_html
from entente.reports.replayed import read_game
from entente.settings.layers import settings_of
from entente.telemetry.errors import DataError, EntenteError, InputError
from storage.run_sql import connect
from storage.runs import MODEL_FOLDER, RunPaths
from tests.reports.conftest import Page
from tests.test_project import HEAVY, ROOT

NOTEBOOK = ROOT / "docs" / "notebook.ipynb"


def test_a_run_is_found_without_loading_what_reads_or_trains_it(stored_run: RunPaths):
    program = f"""
import sys, entente
rooms = {{"entente.cli", "entente.settings", "entente.game", "storage", "duckdb"}}
assert not rooms & set(sys.modules), rooms & set(sys.modules)
import entente.bots
assert entente.API_VERSION == 1 and "run" in dir(entente)
run = entente.run("before", runs_root={str(stored_run.root.parent)!r})
print(run, *entente.runs({str(stored_run.root.parent)!r}))
assert not {HEAVY | {"duckdb"}!r} & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("<run 'before' in ") == 2


def test_no_shard_is_opened_before_rows_are_asked(stored_run: RunPaths, capsys: pytest.CaptureFixture[str]):
    for file in stored_run.shards.rglob("*.arrow"):
        file.write_bytes(b"damaged")
    run = entente.run("before", runs_root=stored_run.root.parent)
    assert run.settings.steps == 2 and run.scores.fetchall()
    with pytest.raises(DataError, match="has no game that can be read"):
        run.replay("0/0")
    assert run.rejected_files.fetchall() and not run.decisions.fetchall()
    assert capsys.readouterr().err.count("the answer lacks rows of") == 1


def test_rows_are_those_of_the_command_s_views_also_after_the_run_is_let_go(stored_run: RunPaths):
    root = stored_run.root.parent
    settings = entente.run("before", runs_root=root).settings
    with connect(stored_run.root, settings.storage) as asked:
        for view in ("decisions", "batches", "phases", "group_eligibility"):
            rows = getattr(entente.run("before", runs_root=root), view)
            wanted = asked.sql(f"FROM {view} ORDER BY ALL").fetchall()
            assert wanted and rows.order("ALL").fetchall() == wanted
    run = entente.run("before", runs_root=root)
    assert run.sql("SELECT count(*) FROM tokens WHERE text IS NULL").fetchall() == [(0,)]
    assert run.sql("@return_by_version_and_power").fetchall()


def test_steps_and_scores_are_those_of_the_files(stored_run: RunPaths):
    run = entente.run("before", runs_root=stored_run.root.parent)
    figures: dict[int, dict[str, Any]] = {}
    for line in stored_run.metrics.read_text().splitlines():
        record = json.loads(line)
        figures.setdefault(record.pop("step"), {}).update(record)
    shown = {row["step"]: row for row in run.steps.to_arrow_table().to_pylist()}
    assert list(shown) == sorted(figures)
    for step, values in figures.items():
        given = {name: value for name, value in shown[step].items() if value is not None and name != "step"}
        assert given == {name: value for name, value in values.items() if isinstance(value, int | float)}
    between = read_score(stored_run, "trained")
    assert between is not None
    write_score(stored_run, replace(between, label=track_label(1), policy_version=1))
    files = {each["label"]: each for file in stored_run.scores.rglob("*.json") for each in [json.loads(file.read_text())]}
    scores = {row["label"]: row for row in run.scores.to_arrow_table().to_pylist()}
    measured = {label: file["score"]["mean"] for label, file in files.items()}
    assert {label: row["mean"] for label, row in scores.items()} == measured and "track/v000001" in scores
    assert all(row["low"] is None for row in scores.values()), "from two source games there is no interval"


@pytest.fixture
def ascii_locale() -> Iterator[None]:
    before = locale.setlocale(locale.LC_CTYPE)
    locale.setlocale(locale.LC_CTYPE, "C")
    yield
    locale.setlocale(locale.LC_CTYPE, before)


@pytest.mark.usefixtures("ascii_locale")
def test_report_and_replay_are_the_pages_of_the_commands_as_frames(stored_run: RunPaths):
    run, root = entente.run("before", runs_root=stored_run.root.parent), stored_run.root.parent
    (model,) = (root / MODEL_FOLDER).glob("tiny-*")
    assert run.replay("1/2").page == replay_html(read_game(Inspector(stored_run, model, settings_of(stored_run)), "1/2"), root)
    shown = run.report()
    assert shown.page == (stored_run.root / "report.html").read_text(encoding="utf-8")
    (frame,) = (each for kind, each in Page(shown._repr_html_()).elements if kind == "iframe")
    assert frame["sandbox"] == "allow-scripts" and Page(frame["srcdoc"]).count  # its own tags nest


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        pytest.param(lambda root: entente.run("../before", runs_root=root / "x"), "cannot name a folder", id="another folder"),
        pytest.param(lambda root: entente.run("never", runs_root=root), "runs there: before", id="no such run"),
        pytest.param(lambda root: entente.run("before", runs_root=root).sql("DROP VIEW tokens"), "SELECT", id="a change"),
        pytest.param(lambda root: entente.run("before", runs_root=root).sql("FROM decision"), 'mean "decisions"', id="misspelt"),
        pytest.param(lambda root: entente.train(runs_root=root, wrong=1), "no setting 'wrong'", id="no such setting"),
    ],
)
def test_what_cannot_be_done_is_one_sentence_in_a_notebook_too(stored_run: RunPaths, ask: Callable, said: str):
    with pytest.raises(InputError, match=said) as refused:
        ask(stored_run.root.parent)
    assert refused.value._render_traceback_() == [f"InputError: {refused.value}"]
    assert "\n" not in str(refused.value)
    assert refused.value.__cause__ is None and refused.value.__suppress_context__, "a script shows one traceback"


def test_settings_that_are_damaged_are_named_when_they_are_asked(stored_run: RunPaths):
    stored_run.settings.write_text('{"steps": ')
    run = entente.run("before", runs_root=stored_run.root.parent)
    with pytest.raises(EntenteError, match=r"settings\.json' cannot be used"):
        _ = run.decisions
    with pytest.raises(AttributeError, match="a run has no 'decision'"):
        _ = run.decision


def test_the_notebook_is_stored_without_outputs():
    cells = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    assert len(cells) > 5 and [cell for cell in cells if cell["outputs"] or cell["execution_count"]] == []


@pytest.mark.in_turn
@pytest.mark.system
def test_the_notebook_runs_and_shows_what_it_tells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prefect_server: str):
    """In a kernel of its own."""
    import nbclient
    import nbformat

    given = {
        "PYTHONPATH": ROOT,
        "IPYTHONDIR": tmp_path / "ipython",
        "JUPYTER_PLATFORM_DIRS": 1,
        "PREFECT_API_URL": prefect_server,
    }
    for name, value in given.items():
        monkeypatch.setenv(name, str(value))
    book = nbformat.read(NOTEBOOK, as_version=4)
    book.cells.append(nbformat.v4.new_code_cell('entente.run("never")', metadata={"tags": ["raises-exception"]}))
    nbclient.NotebookClient(book, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    code = [cell for cell in book.cells if cell.cell_type == "code"]
    shown = {cell.source: [each.data for each in cell.outputs if "data" in each] for cell in code}
    refused = code[-1].outputs[0]
    assert refused.traceback == ["InputError: there is no run in 'runs/never': it has no settings.json; runs there: notebook"]
    for page in ('run.replay("best")', "run.report()"):
        assert "<iframe" in shown[page][0]["text/html"]
    assert "trained" in shown["run.scores"][0]["text/plain"]
    said = "".join(each.text for cell in code for each in cell.outputs if each.output_type == "stream")
    assert "step 2/2" in said
