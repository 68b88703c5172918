"""Claims about the page of a run: its figures are the run's own, it stands alone, and it says what is missing."""

import json
import os
import random
import re
import shlex
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from entente.cli.commands import command_line
from entente.evaluation.score_files import read_score, track_label, write_score
from entente.evaluation.strength import Opening
from entente.game.positions import board_of
from entente.reports.inspect_rows import Inspector
from entente.reports.page import boards, closest_preset, preset_trees
from entente.reports.read_run import read_run
from entente.reports.run_facts import FactsReader, read_facts
from entente.reports.write_page import write_page
from entente.settings.layers import settings_of
from entente.telemetry.stages import STAGES
from entente.view.live_run import run_mark
from entente.view.run_pages import SqlOfRun
from flows.score_policy import run_summary
from storage.files import file_lock
from storage.json_files import write_json
from storage.ledger import count_run, read_ledger
from storage.run_sql import connect, ready_query
from storage.runs import RunPaths
from storage.shards import publish_shard
from tests.damage import flip
from tests.made_scores import made_record, made_score
from tests.reports.conftest import Page, metric_lines
from tests.shard_rows import read_rows, shard_files
from tests.storage.make_rows import make_shard_rows

MakePage = Callable[[RunPaths], Page]


def per_cent(share: float) -> str:
    return "< 0.01 %" if share < 1e-4 else f"{100 * share:.{0 if share >= 0.1 else 1 if share >= 0.01 else 2}f} %"


def test_scores_and_counts_are_those_of_the_run_s_own_files(run_folder: RunPaths, page_of: MakePage):
    lines = [line | {"rollout/decisions": 1.0} if line.get("rollout/decisions") else line for line in metric_lines(run_folder)]
    run_folder.metrics.write_text("\n".join(map(json.dumps, lines)))  # steps may count fewer rows than there are
    page, summary = page_of(run_folder), json.loads(run_folder.summary.read_text())
    for who in ("base", "trained"):
        assert f"{summary[f'{who}_score']:+.2f}" in page.text and summary[f"{who}_ci"] is None
    assert "and an interval takes 6" in page.text, "four positions are of fewer than six games"
    assert f"a random player gains {summary['random_score']:+.2f}" in page.text
    assert f"the imitated teacher {summary['teacher_score']:+.2f}" in page.text
    assert page.count("decisions rolled out") == len(read_rows(*shard_files(run_folder)))
    assert page.count("decisions rolled out") == summary["decisions"] == read_run(run_folder).decisions
    assert page.count("decisions trained on") == len(read_rows(*run_folder.ledger.rglob("step-*.arrow")))
    assert "Complete: 2 steps" in page.text


def test_probes_are_no_decisions_of_the_report_and_have_no_returns(run_folder: RunPaths):
    before = read_facts(run_folder).rows
    decisions, phases = make_shard_rows(random.Random(0), range(2), "probe", forks=1, policy_version=9)
    publish_shard(run_folder, "probe", 0, decisions, phases, {})
    assert read_facts(run_folder).rows == before and before.decisions


def test_decisions_of_shards_that_retention_removed_are_counted(stored_run: RunPaths, page_of: MakePage):
    lines, stored = metric_lines(stored_run), count_run(stored_run).decisions
    assert stored == sum(int(line.get("rollout/decisions", 0)) for line in lines) > 0
    lines[1]["rollout/orders_rejected"] = 3
    stored_run.metrics.write_text("\n".join(map(json.dumps, lines)))
    for shard in shard_files(stored_run):
        shard.unlink()
    summary = run_summary(settings_of(stored_run), count_run(stored_run), {}, 1.0)
    write_json(stored_run.summary, summary)
    assert (summary["decisions"], summary["orders_rejected"]) == (stored, 3)
    assert read_run(stored_run).decisions == page_of(stored_run).count("decisions rolled out") == stored
    kept = [line for line in stored_run.metrics.read_text().splitlines() if json.loads(line)["step"] != 2]
    stored_run.metrics.write_text("\n".join([*kept, json.dumps({"step": 2, "train/loss": 0.5})]) + "\n")
    run = read_run(stored_run)
    assert (run.is_over, run.done, run.decisions) == (True, 2, stored), "a kill took the last step's line"


def test_boards_are_of_the_first_positions_and_show_each_order_with_its_stored_probability(
    run_folder: RunPaths, page_of: MakePage
):
    page = page_of(run_folder)
    stored = {
        who: json.loads((run_folder.scores / f"{who}.json").read_text())["score"]["openings"] for who in ("base", "trained")
    }
    shown = [row for row in page.rows if len(row) == 2 and row[1].endswith("%") and row[0] not in STAGES]
    expected = []
    for openings in zip(stored["base"][:3], stored["trained"][:3], strict=True):
        assert len({(opening["snapshot"]["snapshot_id"], opening["power"]) for opening in openings}) == 1
        for opening in openings:
            joint = 1.0
            for order, probability in zip(opening["orders"], opening["probabilities"], strict=True):
                expected.append([order, per_cent(probability)])
                joint *= probability
            expected.append(["all of them together", per_cent(joint)])
    assert shown == expected
    pictures = [attributes for tag, attributes in page.elements if tag == "img"]
    assert len(pictures) == 2 * len(stored["base"][:3])
    first = stored["base"][0]
    assert all(order in pictures[0]["alt"] for order in first["orders"]) and first["power"].title() in pictures[0]["alt"]


def test_each_build_that_a_power_waives_has_its_own_probability():
    board = board_of("W1905A", {"FRANCE": ["A MUN"]}, {}, {"FRANCE": ["BRE", "MAR", "PAR", "MUN"]})
    opening = Opening(
        snapshot=board.snapshot(game_id="", seed=0, source=""),
        power="FRANCE",
        orders=("A PAR B", "WAIVE", "WAIVE"),
        probabilities=(0.5, 0.25, 1.0),
    )
    record = made_record("base", made_score(openings=(opening,)))
    ((view,),) = (position["views"] for position in boards({"base": record}))
    assert view["orders"] == [("A PAR B", 0.5), ("WAIVE", 0.25), ("WAIVE", 1.0)]
    assert "WAIVE with probability 25%, WAIVE with probability 100%" in view["alt"]


def test_the_page_stands_alone(run_folder: RunPaths, page_of: MakePage):
    page = page_of(run_folder)
    assert len(page.elements) > 100
    for tag, attributes in page.elements:
        assert tag not in ("script", "link", "iframe", "object", "base", "form")
        for name, value in attributes.items():
            assert not name.startswith("on")
            if name in ("src", "href", "xlink:href", "action", "srcset", "poster"):
                assert value.startswith(("#", "data:")), value
            if not name.startswith("xmlns"):
                assert "://" not in value, f"{name}={value}"
            assert all(target.startswith("#") for target in re.findall(r"url\(([^)]*)\)", value))


def test_a_run_cut_in_the_middle_of_a_step_says_so_and_shows_what_there_is(run_folder: RunPaths, page_of: MakePage):
    run_folder.summary.unlink()
    for file in run_folder.scores.glob("*.json"):
        if file.stem != "base":
            file.unlink()
    lines = run_folder.metrics.read_text().splitlines(keepends=True)
    run_folder.metrics.write_text(lines[0] + lines[1] + lines[2][:200])
    page = page_of(run_folder)
    assert "Cut at step 2 of 2: its batch was chosen, 1 step done" in page.text
    assert "its last line is no complete record" in page.text
    assert "the trained policy has not been scored" in page.text
    assert "entente train --run first" in page.text and "--resume" in page.text
    assert [a["alt"] for tag, a in page.elements if tag == "img"], "the base's boards are there"
    assert len([tag for tag, its in page.elements if tag == "svg" and its.get("role") == "img"]) == 10


def test_a_run_without_any_step_has_sentences_in_place_of_empty_plots(run_folder: RunPaths, page_of: MakePage):
    for path in (run_folder.summary, run_folder.metrics):
        path.unlink()
    for folder in (run_folder.scores, run_folder.ledger, run_folder.shards):
        shutil.rmtree(folder)
    page = page_of(run_folder)
    assert "Stopped before the first of 2 steps" in page.text and "Nothing has been scored yet" in page.text
    assert "No step is done yet, so there is no learning curve" in page.text
    assert [tag for tag, _ in page.elements if tag in ("svg", "img")] == []


def test_a_run_whose_process_lives_is_running_and_one_whose_process_died_is_not(run_folder: RunPaths, page_of: MakePage):
    run_folder.summary.unlink()
    with file_lock(run_folder.lock) as free:
        assert free
        assert "Running: 2 of 2 steps done" in page_of(run_folder).text
    assert "the run stopped before its last scores" in page_of(run_folder).text
    with file_lock(run_folder.lock) as free:
        assert free, "a report keeps no lock"


def test_a_damaged_shard_is_counted_and_named_with_its_reason(run_folder: RunPaths, page_of: MakePage):
    shard, *others = shard_files(run_folder)
    left = len(read_rows(*others))
    flip(shard)
    page = page_of(run_folder)
    assert page.count("shards set aside") == 1
    assert "1 shard was set aside as damaged" in page.text
    assert f"{shard.parent.name}/{shard.name}" in page.text
    assert read_facts(run_folder).rows.decisions == left


def test_versions_that_another_program_scored_are_named_even_if_no_curve_is_left(run_folder: RunPaths, page_of: MakePage):
    base = read_score(run_folder, "base")
    assert base is not None
    for version in (3, 4):
        write_score(run_folder, replace(base, label=track_label(version), policy_version=version, code={"another": str(version)}))
    assert "Not drawn, because another program or other settings measured them: v0, v2, v3." in page_of(run_folder).text


def test_a_page_that_stays_open_has_each_version_that_is_scored_during_training(run_folder: RunPaths):
    reader, base = FactsReader(run_folder), read_score(run_folder, "base")
    assert base is not None
    for version in (8, 9):
        mark = run_mark(run_folder)
        write_score(run_folder, replace(base, label=track_label(version), policy_version=version))
        assert version in [point.version for point in reader.quick().track] and run_mark(run_folder) != mark


def test_a_page_that_stays_open_has_no_rows_of_a_run_that_was_removed_and_begun_anew(stored_run: RunPaths):
    reader = FactsReader(stored_run)
    facts = reader.whole()
    assert facts.rows and facts.rows.decisions and facts.curve
    for folder in (stored_run.shards, stored_run.ledger):
        shutil.rmtree(folder)
    facts = reader.whole()
    assert facts.rows and not facts.rows.decisions and not facts.curve


def test_a_page_that_stays_open_has_no_figures_of_metrics_whose_file_another_one_replaced(stored_run: RunPaths):
    reader, lines = FactsReader(stored_run), metric_lines(stored_run)
    reader.quick()
    others = [line | {"time": line["time"] + 1, "train/reward": 9.0} for line in lines]
    last = {**others[-1], "step": others[-1]["step"] + 1}
    stored_run.metrics.write_text("".join(json.dumps(line) + "\n" for line in (*others, last)))  # keeps the inode
    assert reader.quick().steps == read_run(stored_run).steps


def test_a_page_that_stays_open_says_that_a_reward_was_edited(
    stored_run: RunPaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    package = tmp_path / "odd_open_page.py"
    package.write_text("def mine(components):\n    return components['survival']\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    settings = json.loads(stored_run.settings.read_text())
    settings["storage"]["reward_weights"] = {"odd_open_page:mine": 0.5, "final_odd_open_page:mine": 1.0}
    stored_run.settings.write_text(json.dumps(settings))
    reader, queries = FactsReader(stored_run), SqlOfRun(settings_of(stored_run), stored_run)
    facts = reader.whole()
    assert facts.rows and facts.rows.decisions and not facts.troubles and not queries.lacking()
    package.write_text("def mine(components):\n    return components['balance']\n")
    said = "Returns are those of odd_open_page before an edit; start this program again for the others."
    assert reader.whole().troubles == [said] and queries.lacking() == said
    queries.close()


def test_a_run_of_another_version_is_named_as_one(run_folder: RunPaths, page_of: MakePage):
    assert "another version of Entente" not in page_of(run_folder).text
    settings = json.loads(run_folder.settings.read_text())
    settings["inference"]["gpu_memory_share"] = settings["inference"].pop("gpu_memory_utilization")
    run_folder.settings.write_text(json.dumps(settings))
    assert (
        "another version of Entente, whose settings inference.gpu_memory_share this one does not have" in page_of(run_folder).text
    )


def test_settings_are_told_against_the_closest_preset(run_folder: RunPaths, page_of: MakePage):
    preset, found = closest_preset(json.loads(run_folder.settings.read_text()), preset_trees())
    differences = {name: tuple(values) for name, values in found}
    assert preset == "laptop"
    assert differences["rollouts.forks_per_group"] == (4, 8)
    assert differences["cache.train_snapshots"] == (8, 240)
    assert not {"run", "runs_root", "rollouts.horizon_years", "inference.model"} & set(differences)
    assert ["rollouts.forks_per_group", "4", "8"] in page_of(run_folder).rows


def test_every_line_under_ask_further_can_be_typed_and_its_sql_answers(run_folder: RunPaths, page_of: MakePage):
    lines = re.findall(r"entente .*?(?= [A-Z][a-z]+ |$)", page_of(run_folder).text.split("Ask further")[1])
    queries = 0
    for words in map(shlex.split, lines):
        command, bound, _ = command_line().parse_args(words[1:], exit_on_error=False, print_error=False)
        assert command.__module__.startswith("entente.cli.") and bound.arguments["run"] == "first"
        if words[1] == "sql":
            queries += 1
            query = ready_query(words[-1][1:]) if words[-1].startswith("@") else words[-1]
            with connect(run_folder.root) as connection:
                assert connection.sql(query).fetchall()
    assert queries == 3 and len(lines) == 6


def test_an_open_page_counts_a_damaged_shard_that_was_played_again(stored_run: RunPaths):
    rows, shard = read_facts(stored_run).rows, sorted(stored_run.shards.rglob("000000.arrow"))[0]
    content, reader = shard.read_bytes(), FactsReader(stored_run)
    flip(shard)
    damaged = reader.whole().rows
    assert rows and damaged and len(damaged.refused) == 1 and damaged.decisions < rows.decisions
    shard.unlink()
    assert reader.whole().rows is not None
    shard.write_bytes(content)
    again = reader.whole().rows
    assert again and not again.refused and again.decisions == rows.decisions and again.return_of_all == rows.return_of_all


def test_what_came_beside_a_run_is_shown_and_what_of_it_is_damaged_is_named(run_folder: RunPaths, page_of: MakePage):
    base = read_score(run_folder, "base")
    assert base is not None
    write_score(run_folder, replace(base, label=track_label(1), policy_version=1))
    alert = b'{"name": "zero_std", "sentence": "first, step 1: all returns are equal"}'
    run_folder.alerts.write_bytes(b"\xff\n" + alert + b'\n{"cut')
    page = page_of(run_folder)
    assert [point.version for point in read_facts(run_folder).track] == [0, 1, 2]
    assert "Strength by policy version" in page.text and "alert (zero_std): first, step 1: all returns are equal" in page.text
    (run_folder.scores / "track" / "v000001.json").write_text("{")
    (run_folder.scores / "matches").mkdir()
    (run_folder.scores / "matches" / "some.json").write_text("{}")
    page = page_of(run_folder)
    for trouble in ("The track of strength is left out", "Matches are left out"):
        assert trouble in page.text
    assert "Strength by policy version" not in page.text and "+0." in page.text


def beside_a_pipe(pipe: Path, read: Callable[[], Any]) -> Any:
    """What `read` gives within five seconds."""
    os.mkfifo(pipe)
    with ThreadPoolExecutor(1) as thread:
        reading = thread.submit(read)
        try:
            return reading.result(5)
        finally:
            with suppress(OSError):  # nobody reads
                os.close(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))


def test_a_pipe_in_place_of_a_league_file_is_not_waited_for(stored_run: RunPaths):
    """`entente view` reads the file in its drawing thread."""
    (stored_run.league / "local").mkdir(parents=True)
    (trouble,) = beside_a_pipe(stored_run.league / "local" / "000001.json", FactsReader(stored_run).quick).troubles
    assert trouble.startswith("The league is left out: ") and trouble.endswith("it is not a regular file")


def test_the_search_for_a_decision_passes_a_pipe_among_the_shards(stored_run: RunPaths):
    ledger = read_ledger(stored_run, 1)
    assert ledger is not None
    number, rows = ledger["decision_id"][0].as_py(), Inspector(stored_run, None, settings_of(stored_run))
    found = beside_a_pipe(stored_run.shards / "local" / "999999.arrow", lambda: rows.decision(number))
    assert found.facts["decision_id"] == number


def test_a_page_in_a_run_s_folder_replaces_a_link_or_pipe_there_and_a_link_that_a_user_names_stays(tmp_path: Path):
    pipe, link, named = (tmp_path / name for name in ("pipe.html", "link.html", "named.html"))
    os.mkfifo(pipe)
    os.mkfifo(tmp_path / "target")
    link.symlink_to("target")
    for default in (pipe, link):
        assert write_page(None, default, "page") == default and default.is_file() and not default.is_symlink()
    named.symlink_to("other")
    assert write_page(named, pipe, "mine") == named and named.is_symlink()
    assert ((tmp_path / "other").read_text(), pipe.read_text()) == ("mine", "page")
