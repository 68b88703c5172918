"""Runs side by side: what is claimed and what is not, and what a damaged run leaves."""

import json
import math
import random
import shlex
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from entente.cli.commands import command_line
from entente.evaluation.score_files import ScoreRecord, write_score
from entente.evaluation.settings import EvaluationSettings
from entente.evaluation.strength import Gain
from entente.reports import sentences
from entente.reports.compare_page import html_of
from entente.reports.compared import TOTALS, Compared, compare_runs
from entente.reports.return_curve import MOST_POINTS, return_curve
from entente.settings.run_settings import RunSettings
from storage.ledger import ROWS_SCHEMA, ledger_path, write_ledger
from storage.runs import RunPaths
from tests.command import Entente
from tests.made_scores import made_record, made_score
from tests.reports.conftest import Page

STEPS = 4


def ledger_rows(step: int, noise: int = 0, groups: int = 2) -> pa.Table:
    rng = random.Random(f"{step}/{noise}")
    made = [(group, fork) for group in range(groups) for fork in range(3)]
    columns: dict[str, list[Any]] = {
        "shard": ["local/000000.arrow"] * len(made),
        "row": list(range(len(made))),
        "decision_id": [1000 * step + place for place in range(len(made))],
        "start_group": [10 * step + group for group, _ in made],
        "fork": [fork for _, fork in made],
        "phase_index": [0] * len(made),
        "power": ["FRANCE"] * len(made),
        "phase": ["S1903M"] * len(made),
        "policy_version": [step - 1] * len(made),
        "policy_lag": [0] * len(made),
        "checksum": [rng.randrange(2**32) for _ in made],
        "return": [rng.gauss(0, 1) for _ in made],
        "advantage_group": [group for group, _ in made],
    }
    return pa.table({name: pa.array(columns[name], ROWS_SCHEMA.field(name).type) for name in ROWS_SCHEMA.names})


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., RunPaths]:
    """A run of recorded steps without rows: `make("a", training={...})`."""

    def run(name: str, count: int = STEPS, noise: int = 0, **settings: Any) -> RunPaths:
        paths = RunPaths(tmp_path / "runs" / name).create()
        paths.settings.write_text(RunSettings(run=name, **settings).model_dump_json())
        paths.environment.write_text(json.dumps({"torch": "2.9", "cpu_cores": "2"}))
        for step in range(1, count + 1):
            write_ledger(paths, step, ledger_rows(step, noise), {"settings_hash": "s", "selection": "{}"})
        lines = [{"step": step, "time/step_s": 2.0, "train/reward": 0.1 * step} for step in range(1, count + 1)]
        paths.metrics.write_text("\n".join(map(json.dumps, lines)))
        return paths

    return run


def compared(*runs: RunPaths) -> Compared:
    return compare_runs(runs)


def test_a_damaged_ledger_is_said_and_the_rest_is_compared(make, entente: Entente):
    first, second = make("a"), make("b")
    file = ledger_path(second, 2)
    file.write_bytes(file.read_bytes()[:-40])
    found = compared(first, second)
    (said,) = found.runs[1].troubles
    assert said.startswith("The curve is left out: ") and found.runs[0].curve and not found.runs[0].troubles
    done = entente("compare", "a", "b")
    assert done.returncode == 0 and "The curve is left out" in done.stdout, done.stderr


def test_runs_of_other_base_models_under_one_name_are_told_apart(make):
    """A run that is resumed on a replaced base is refused, while two runs showed no difference at all."""
    runs = [make(name) for name in ("a", "b", "c")]
    for paths, weights in zip(runs, ("1f", "1f", "2e"), strict=True):
        paths.base.write_text(json.dumps({"model.safetensors": weights, "tokenizer_config.json": paths.root.name}))
    assert not compared(*runs[:2]).settings, "transformers may write the tokenizer's config in another way"
    ((name, (first, second, third)),) = compared(*runs).settings
    assert name == "base model" and first == second != third


def score(gains: list[float], **changes: Any) -> ScoreRecord:
    kept = tuple(Gain(snapshot_id=str(n), game_id=f"g{n}", power="FRANCE", centres=gain) for n, gain in enumerate(gains))
    counts = dict.fromkeys(("forks", "positions", "source_games"), len(gains))
    found = made_score(sum(gains) / len(gains), 1, gains=kept, **counts)
    return made_record(score=found, opponents="mover", policy_version=4, **changes)


@pytest.mark.parametrize("more", [0.75, 0.0], ids=["a difference", "none"])
def test_a_difference_is_claimed_only_where_its_interval_excludes_0(make, more: float):
    """The two intervals overlap by far, as the positions are of very different worth; the paired one says what is the case."""
    first, second, rng = make("a"), make("b"), random.Random(3)
    worth = [rng.choice([-3.0, 0.0, 3.0]) for _ in range(16)]
    write_score(first, score([value + rng.choice([0.25, -0.25]) for value in worth]))
    write_score(second, score([value + rng.choice([0.25, -0.25]) + more for value in worth]))
    found = compared(first, second)
    (verdict,) = sentences.verdicts(found)
    page = Page(html_of(found, Path("runs")))
    assert verdict in page.text
    if more:
        assert (
            verdict.startswith("b (version 4) gains 0.") and "centres more than a (version 4) from the same 16 starts" in verdict
        )
    else:
        assert "do not differ significantly" in verdict and "contains 0" in verdict and " more than " not in verdict


def test_scores_that_cannot_be_paired_name_the_match_that_can(make):
    first, second = make("a"), make("b")
    record = replace(score([1.0, 2.0]), settings=EvaluationSettings(horizon_years=3))
    write_score(first, record)
    assert sentences.verdicts(compared(first, second)) == ["b has no score of a last version yet, so none is compared."]
    old = json.loads((first.scores / "trained.json").read_bytes())
    del old["score"]["gains"]
    (second.scores / "trained.json").write_text(json.dumps(old))
    (said,) = sentences.verdicts(compared(first, second))
    assert "no gains of single positions" in said
    ((_, line),) = sentences.next_commands(compared(first, second), first.root.parent)
    match = f"--players newest,a:newest --start held-out --opponents {record.opponents} --years 3 "
    assert line.startswith(f"entente evaluate --run b {match}")
    assert line.endswith(f" --runs-root {first.root.parent}")
    command_line().parse_args(shlex.split(line)[1:], exit_on_error=False, print_error=False)


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


def test_the_table_and_the_page_of_a_real_run_and_its_copy(trained, tmp_path: Path, entente: Entente):
    _, paths, _ = trained
    root = tmp_path / "runs"
    for name in ("first", "again"):
        shutil.copytree(paths.root, root / name, ignore=shutil.ignore_patterns("wandb"))
    done = entente("compare", "first", "again")
    assert done.returncode == 0 and "finished steps" in done.stdout, done.stderr
    facts = compared(*(RunPaths(root / name) for name in ("first", "again")))
    assert not facts.settings
    for _, count in TOTALS.values():
        ours, theirs = map(count, facts.runs)
        assert ours == theirs or (math.isnan(ours) and math.isnan(theirs))
    (trained_pair,) = (pair.comparison for pair in facts.paired if pair.label == "trained")
    assert not isinstance(trained_pair, str) and trained_pair.forks == 4
    assert trained_pair.difference.mean == 0 and not trained_pair.difference.excludes_zero
    page = Page((root / "first" / "compare-again.html").read_text())
    assert "All settings are the same." in page.text and not [tag for tag, _ in page.elements if tag == "script"]
    sources = [attributes.get("src", "") + attributes.get("href", "") for _, attributes in page.elements]
    assert not [source for source in sources if source.startswith(("http", "/", "file"))]


def test_a_pattern_names_several_runs_and_each_is_compared_with_the_first(make, entente: Entente):
    make("base")
    for name in ("sweep-1", "sweep-2"):
        make(name, seed=3)
    out = entente("compare", "base", "sweep-*").stdout
    assert "runs/base/compare-sweep-1-and-1-more.html" in out and "  seed" in out


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        pytest.param(["a", "a"], "run 'a' is named 2 times: name another run", id="twice the same"),
        pytest.param(["a"], "a comparison takes 2 to 8 runs, and 1 is given", id="one"),
        pytest.param(["a", "x-*"], "no run in '", id="a pattern without runs"),
        pytest.param(["a", "b"], "is no complete record of settings", id="damaged settings"),
    ],
)
def test_what_cannot_be_compared_is_one_sentence_and_exit_code_2(make, entente: Entente, words: list[str], sentence: str):
    make("a")
    make("b").settings.write_text("{")
    make("c")
    done = entente("compare", *words)
    assert (done.returncode, done.stdout) == (2, "") and len(done.stderr.splitlines()) == 1 and sentence in done.stderr
