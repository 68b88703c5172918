"""Runs side by side: where they part and why, what is claimed and what is not, and what a damaged run leaves."""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from cli import main
from evaluation.score_files import ScoreRecord, write_score
from evaluation.settings import EvaluationSettings
from evaluation.strength import POLICY, Gain, Score
from pipeline.run_settings import RunSettings, enters_rows_or_weights
from reports import compare_sentences
from reports.compare_page import html_of
from reports.compared import Compared, compare_runs
from reports.return_curve import MOST_POINTS, return_curve
from storage.ledger import ROWS_SCHEMA, ledger_path, write_ledger
from storage.lineages import open_lineage
from storage.outcome import Outcome, UpdateOutcome, outcome_path, write_outcome
from storage.runs import RunPaths
from storage.shards import publish_shard
from telemetry.errors import InputError
from tests.reports.conftest import Page
from tests.storage.make_rows import make_shard_rows

STEPS = 4


def ledger_rows(step: int, seed: int = 0, groups: int = 2) -> pa.Table:
    dice = random.Random(f"{step}/{seed}")
    made = [(group, fork) for group in range(groups) for fork in range(3)]
    columns: dict[str, list[Any]] = {
        "shard": ["local/000000.arrow"] * len(made),
        "row": list(range(len(made))),
        "decision_id": [1000 * step + place for place in range(len(made))],
        "start_group": [10 * step + group for group, _ in made],
        "fork": [fork for _, fork in made],
        "ply": [0] * len(made),
        "power": ["FRANCE"] * len(made),
        "phase": ["S1903M"] * len(made),
        "policy_version": [step - 1] * len(made),
        "policy_lag": [0] * len(made),
        "checksum": [dice.randrange(2**32) for _ in made],
        "return": [dice.gauss(0, 1) for _ in made],
        "advantage_group": [group for group, _ in made],
    }
    return pa.table({name: pa.array(columns[name], ROWS_SCHEMA.field(name).type) for name in ROWS_SCHEMA.names})


def write_step(
    paths: RunPaths, step: int, *, seed: int = 0, adapter: str = "", settings: str = "s", lineage: str = "main", **more: str
) -> None:
    """One recorded step; equal arguments give equal steps."""
    query = {"selection": json.dumps({"step": step, "max_policy_lag": 2, "lineage": lineage}), "shortage": ""}
    write_ledger(paths, lineage, step, ledger_rows(step, seed), {"settings_hash": settings, **query, **more})
    update = UpdateOutcome(loss=0.5 + step, gradient_norm=1.0, micro_batches=[0.25, 0.25 + step])
    outcome = Outcome(updates=[update], device="cpu", threads=2, torch="2.9", adapter_hash=adapter or f"hash-{step}")
    write_outcome(paths, lineage, step, outcome)


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., RunPaths]:
    """A run of recorded steps without rows: `make("a", settings={...}, 3={"seed": 1})`."""

    def run(name: str, steps: dict[int, dict[str, Any]] | None = None, count: int = STEPS, **settings: Any) -> RunPaths:
        paths = RunPaths(tmp_path / "runs" / name).create()
        paths.settings.write_text(RunSettings(run=name, **settings).model_dump_json())
        paths.environment.write_text(json.dumps({"torch": "2.9", "cpu_cores": "2"}))
        for step in range(1, count + 1):
            write_step(paths, step, **(steps or {}).get(step, {}))
        lines = [{"step": step, "time/step_s": 2.0, "train/return_mean": 0.1 * step} for step in range(1, count + 1)]
        paths.metrics.write_text("\n".join(map(json.dumps, lines)))
        return paths

    return run


def compared(*runs: RunPaths) -> Compared:
    return compare_runs(runs, enters_rows_or_weights)


def parted(*runs: RunPaths) -> tuple[str, int, str]:
    """Kind, step and sentences of the first difference of two runs."""
    (found,) = compared(*runs).first_differences
    return found.kind, found.step, compare_sentences.first_difference(found)


def test_equal_runs_have_no_first_difference(make):
    kind, step, said = parted(make("a"), make("b", count=STEPS + 2))
    assert (kind, step) == ("nothing", STEPS)
    assert said == "a and b: Their first 4 steps are the same bit for bit: rows, order and weights. a has 4 steps and b 6."


def test_other_rows_after_equal_weights_are_named_with_what_may_explain_them(make):
    first, second = make("a"), make("b", {3: {"seed": 1}, 4: {"seed": 1, "adapter": "x"}})
    kind, step, said = parted(first, second)
    assert (kind, step) == ("rows", 3)
    assert "The rows of step 3 differ: of 6 and 6, 0 are the same." in said
    assert "The weights after step 2 are the same and no setting that enters rows differs." in said
    assert "Without pipeline.deterministic, time decides" in said
    hotter = make("c", {3: {"seed": 1}}, rollouts={"start_groups": 5})
    assert "so what was played or chosen differs. Settings that differ there: rollouts.start_groups" in parted(first, hotter)[2]


def test_the_same_rows_and_other_weights_are_named_with_versions_and_the_way_to_find_out(make):
    first, second = make("a"), make("b", {2: {"adapter": "other"}, 3: {"adapter": "more"}})
    stored = json.loads(outcome_path(second, "main", 2).read_bytes())
    stored["torch"], stored["updates"][0]["micro_batches"][1] = "2.10", 2.5
    outcome_path(second, "main", 2).write_text(json.dumps(stored))
    kind, step, said = parted(first, second)
    assert (kind, step) == ("weights", 2)
    assert "Step 2 has the same rows and other weights: the loss of micro-batch 2 of update 1 is 2.25 and 2.5." in said
    assert "other versions of torch: 2.9 and 2.10." in said
    commands = [line for _, line in compare_sentences.next_commands(compared(first, second), Path("runs"))]
    assert commands == [f"entente runs replay-step --run {name} --step 2" for name in "ab"]


def test_a_fork_with_other_settings_parts_at_its_first_step(make):
    first, second = make("a"), make("b", count=2)
    old = json.loads(second.settings.read_bytes())
    (second.ledger / "main" / "settings.json").write_text(json.dumps(old))
    old["training"]["learning_rate"] = 0.5
    second.settings.write_text(json.dumps(old))
    open_lineage(second, "hot", parent="main", after_step=2, settings_hash="x")
    for step in (3, 4):
        write_step(second, step, settings="other", lineage="hot", adapter=f"hot-{step}")
    kind, step, said = parted(first, second)
    assert (kind, step) == ("settings", 3)
    assert "From step 3 on they have other settings. Settings that differ there: training.learning_rate 5e-06 and 0.5." in said


def test_a_lineage_s_name_and_a_shortage_are_no_settings(make):
    """A query may differ because too few rows were fresh."""
    first, second = make("a"), make("b", count=1)
    short = {"selection": json.dumps({"step": 2, "max_policy_lag": 4, "lineage": "main"}), "shortage": "too few rows were fresh"}
    write_ledger(second, "main", 2, ledger_rows(2, 9), {"settings_hash": "s", **short})
    kind, step, said = parted(first, second)
    assert (kind, step) == ("rows", 2) and "b: too few rows were fresh." in said


def test_a_step_in_progress_is_no_difference(make):
    first, second = make("a"), make("b")
    outcome_path(second, "main", STEPS).unlink()
    assert parted(first, second)[:2] == ("nothing", STEPS - 1)


def test_a_damaged_ledger_is_said_and_the_rest_is_compared(make, capsys):
    first, second = make("a"), make("b")
    file = ledger_path(second, "main", 2)
    file.write_bytes(file.read_bytes()[:-40])
    found = compared(first, second)
    assert found.first_differences[0].kind == "unknown" and "step-000002.arrow" in found.first_differences[0].sentence
    (said,) = found.runs[1].troubles
    assert said.startswith("The curve is left out: ") and found.runs[0].curve and not found.runs[0].troubles
    assert main.run(["compare", "a", "b", "--runs-root", str(first.root.parent)]) == 0
    assert "The curve is left out" in capsys.readouterr().out


def test_a_run_of_another_schema_and_one_of_another_base_are_said_in_a_sentence(make, monkeypatch: pytest.MonkeyPatch):
    first = make("a")
    monkeypatch.setattr("storage.arrow_files.SCHEMA_VERSION", 2)
    older = make("b")
    monkeypatch.undo()
    found = compared(first, older)
    assert "has schema version 2, this program reads 3" in found.first_differences[0].sentence
    assert "has schema version 2" in found.runs[1].troubles[0]
    others = make("c"), make("d")
    for run, base in zip(others, ("one", "two"), strict=True):
        publish_shard(run, "local", 0, *make_shard_rows(random.Random(0), range(1), "local"), {"base_model": base})
    assert parted(*others)[:2] == ("base", 0) and "They train other base models" in parted(*others)[2]


def score(gains: list[float], **changes: Any) -> ScoreRecord:
    kept = tuple(Gain(snapshot_id=str(n), game_id=f"g{n}", power="FRANCE", centres=gain) for n, gain in enumerate(gains))
    mean = sum(gains) / len(gains)
    found = Score(
        mean=mean,
        low=mean - 1,
        high=mean + 1,
        forks=len(gains),
        positions=len(gains),
        source_games=len(gains),
        orders_rejected=0,
        gains=kept,
    )
    settings = EvaluationSettings(bootstrap=400)
    return ScoreRecord(
        label="trained", player=POLICY, opponents="mover", policy_version=4, settings=settings, score=found, **changes
    )


@pytest.mark.parametrize("more", [0.75, 0.0], ids=["a difference", "none"])
def test_a_difference_is_claimed_only_where_its_interval_excludes_0(make, more: float):
    """The two intervals overlap by far, as the positions are of very different worth; the paired one says what is the case."""
    first, second, dice = make("a"), make("b"), random.Random(3)
    worth = [dice.choice([-3.0, 0.0, 3.0]) for _ in range(16)]
    write_score(first, score([value + dice.choice([0.25, -0.25]) for value in worth]))
    write_score(second, score([value + dice.choice([0.25, -0.25]) + more for value in worth]))
    found = compared(first, second)
    (verdict,) = compare_sentences.verdicts(found)
    page = Page(html_of(found, Path("runs")))
    assert verdict in page.text
    if more:
        assert (
            verdict.startswith("b (version 4) gains 0.") and "centres more than a (version 4) from the same 16 starts" in verdict
        )
    else:
        assert "are not told apart" in verdict and "holds 0" in verdict and " more than " not in verdict


def test_scores_that_cannot_be_paired_name_the_match_that_can(make):
    first, second = make("a"), make("b")
    write_score(first, score([1.0, 2.0]))
    assert compare_sentences.verdicts(compared(first, second)) == ["b has no score of a last version yet, so none is compared."]
    record = score([1.0, 2.0])
    old = json.loads((first.scores / "trained.json").read_bytes())
    del old["score"]["gains"]  # as an earlier release wrote it
    (second.scores / "trained.json").write_text(json.dumps(old))
    (said,) = compare_sentences.verdicts(compared(first, second))
    assert "an earlier release" in said
    ((_, line),) = compare_sentences.next_commands(compared(first, second), first.root.parent)
    assert line.startswith(f"entente evaluate --run b --players newest,a:newest --start held-out --opponents {record.opponents}")
    assert line.endswith(f" --runs-root {first.root.parent}")


def test_a_point_of_the_curve_has_enough_groups_for_an_interval_and_a_long_run_few_points():
    rows = {step: ledger_rows(step) for step in range(1, 21)}
    curve = return_curve(sorted(rows), rows.get)
    assert [(point.first, point.last) for point in curve] == [(1, 7), (8, 13), (14, 20)]
    assert all(point.mean_return.interval for point in curve) and sum(point.rows for point in curve) == 18 * 6
    mean = pa.concat_tables([rows[step] for step in (1, 2, 3, 5, 6, 7)])["return"].to_numpy().mean()
    assert curve[0].mean_return.mean == pytest.approx(mean)
    read: list[int] = []
    long = return_curve(range(1, 2001), lambda step: read.append(step) or ledger_rows(step))
    assert len(long) == MOST_POINTS and len(read) < 400 and (long[0].first, long[-1].last) == (1, 2000)
    assert return_curve([], rows.get) == [] and return_curve([1], lambda step: None) == []


def test_the_table_the_page_and_the_json_of_a_real_run_and_its_copy(trained, tmp_path: Path, capsys, monkeypatch):
    _, paths, _ = trained
    root = tmp_path / "runs"
    for name in ("first", "again"):
        shutil.copytree(paths.root, root / name, ignore=shutil.ignore_patterns("wandb"))
    monkeypatch.setattr("cli.environment.prepare_environment", lambda **how: None)
    assert main.run(["compare", "first", "again", "--runs-root", str(root), "--json"]) == 0
    out = capsys.readouterr().out
    facts = json.loads(out.splitlines()[-1])
    assert facts["settings"] == {} and [each["kind"] for each in facts["first_differences"]] == ["nothing"]
    assert facts["runs"][0]["cost"] == facts["runs"][1]["cost"] and facts["runs"][0]["cost"]["steps"] == 2
    paired = {each["score"]: each for each in facts["differences"]}
    assert paired["trained"]["mean"] == 0 and not paired["trained"]["shown"] and paired["trained"]["starts"] == 4
    assert "Their first 2 steps are the same bit for bit" in out
    page = Page((root / "first" / "compare-again.html").read_text())
    assert "All settings are the same." in page.text and not [tag for tag, _ in page.elements if tag == "script"]
    sources = [attributes.get("src", "") + attributes.get("href", "") for _, attributes in page.elements]
    assert not [source for source in sources if source.startswith(("http", "/", "file"))]


def test_a_pattern_names_several_runs_and_each_is_compared_with_the_first(make, capsys):
    root = make("base").root.parent
    for name in ("sweep-1", "sweep-2"):
        make(name, {2: {"seed": 5}}, seed=3)
    assert main.run(["compare", "base", "sweep-*", "--runs-root", str(root)]) == 0
    out = capsys.readouterr().out
    assert str(root / "base" / "compare-sweep-1-and-1-more.html") in out
    assert "base and sweep-1:" in out and "base and sweep-2:" in out and "sweep-1 and sweep-2" not in out
    assert "  seed" in out


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        pytest.param(["a"], "a comparison takes 2 to 8 runs, and 1 is given", id="one"),
        pytest.param(["a", "a"], "a comparison takes 2 to 8 runs, and 1 is given", id="twice the same"),
        pytest.param(["a", "x-*"], "no run in '", id="a pattern without runs"),
        pytest.param(["a", "../a"], "no run in '", id="a path"),
        pytest.param(["a", "b"], "is no whole record of settings", id="damaged settings"),
        pytest.param(["a", "c", "--output", "none/page.html"], "there is no folder 'none'", id="no folder for the page"),
    ],
)
def test_what_cannot_be_compared_is_one_sentence_and_exit_code_2(make, capsys, words: list[str], sentence: str):
    root = make("a").root.parent
    make("b").settings.write_text("{")
    make("c")
    assert main.run(["compare", *words, "--runs-root", str(root)]) == 2
    said = capsys.readouterr()
    assert said.out == "" and len(said.err.splitlines()) == 1 and sentence in said.err


def test_more_runs_than_colours_are_refused(make):
    with pytest.raises(InputError, match="2 to 8 runs, and 9 are given"):
        compared(*(make(f"r{number}", count=1) for number in range(9)))
