"""The page of a smoke test says what failed and what to try, and needs no other file."""

import re

from smoke.job import STAGES, StageResult
from smoke.page import html_of, rates_plot, verdict

ENGINE = StageResult(
    stage="engine", state="passed", sentence="it draws", figures={"decisions_per_s.1": 30.0, "decisions_per_s.8": 110.0}
)
BROKEN = StageResult(
    stage="jump",
    state="failed",
    sentence="<odd> \x1b[1m",
    attempt="inference.jump_forced = 'off'",
    log="one\ntwo <b>",
    notes=("n",),
)
LEFT = StageResult(stage="steps", state="not run", sentence="it needs the stage 'jump'")


def page(*results: StageResult) -> str:
    return html_of("Some Card", results, '[inference]\nadapters = "slots"\n', "entente train --config a.toml", {"torch": "2"})


def test_a_failed_stage_shows_its_sentence_what_to_try_and_its_log():
    text = page(ENGINE, BROKEN, LEFT)
    assert "&lt;odd&gt; \\x1b[1m" in text and "inference.jump_forced = &#39;off&#39;" in text
    assert "one\ntwo &lt;b&gt;" in text
    assert "1 stages passed, 1 failed, 1 could not run because of that; the first to fail is &#39;jump&#39;." in text
    assert "adapters = &#34;slots&#34;" in text and "entente train --config a.toml" in text


def test_the_page_loads_nothing():
    text = page(ENGINE, BROKEN)
    assert "<script" not in text
    assert re.findall(r'(?:src|href)="(?!#)[^"]*"', text) == []


def test_the_verdict_of_a_whole_test_is_one_sentence():
    passed = [StageResult(stage=stage.name, state="passed", sentence="") for stage in STAGES]
    assert verdict(passed) == f"All {len(STAGES)} stages passed."


def test_rates_are_drawn_where_there_are_any():
    jump = StageResult(stage="jump", state="passed", sentence="", figures={"on.decisions_per_s": 130.0})
    assert "jump on" in rates_plot({"engine": ENGINE, "jump": jump})
    assert rates_plot({"jump": jump}) == ""
