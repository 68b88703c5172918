"""Claims about plots: each is there where the run has something to draw, and says in words what the run's figures say."""

import re
from dataclasses import replace
from itertools import pairwise

import pyarrow as pa
import pytest

from entente.evaluation.contestants import Contestant
from entente.evaluation.match_files import MatchRecord
from entente.evaluation.match_table import MEASURES, Estimate, MatchTable, PairDifference, PlayerResult
from entente.evaluation.score_files import TrackPoint
from entente.evaluation.settings import MatchSettings
from entente.reports import plots, sentences
from entente.reports.drawing import BLUE, WIDE, Panel, plot, stand_alone
from entente.reports.write_page import page_template
from tests.reports.conftest import Page, facts

STEP = {
    "time/step_s": 10.0,
    "time/rollout_wait_s": 4.0,
    "train/update_s": 5.0,
    "train/policy_lag_0_share": 0.25,
    "train/policy_lag_1_share": 0.75,
}


def alt(svg: str | None) -> str:
    found = re.search(r'aria-label="([^"]*)"', svg or "")
    assert found is not None
    return found[1]


def point(version: int, mean: float) -> TrackPoint:
    score = Estimate(mean=mean, low=mean - 0.2, high=mean + 0.2)
    return TrackPoint(version=version, opponents="random", score=score)


def match() -> MatchRecord:
    settings = MatchSettings(players=("base", "v8", "mover"))
    shares = {"base": 0.1, "v8": 0.3, "mover": 0.2}
    players = tuple(
        PlayerResult(
            player=name,
            seats=7,
            measures=dict.fromkeys(MEASURES, Estimate(mean=share, low=share - 0.05, high=share + 0.05)),
            years=Estimate(mean=2.0, low=None, high=None),
            by_year=(Estimate(mean=3.0, low=None, high=None), Estimate(mean=10 * share, low=None, high=None)),
        )
        for name, share in shares.items()
    )
    pairs = tuple(
        PairDifference(
            player="base", other=name, difference=Estimate(mean=mean, low=mean - 0.1, high=mean + 0.1), games_to_show=n
        )
        for name, mean, n in (("v8", -0.2, 9), ("mover", -0.05, 400))
    )
    table = MatchTable(games=21, clusters=3, players=players, pairs=pairs, rejected=0)
    return MatchRecord(label="x", settings=settings, players=tuple(Contestant(name=n) for n in shares), table=table)


def test_a_match_is_drawn_year_by_year_and_one_year_alone_is_no_line():
    drawn = plots.match_by_year(match())
    assert drawn is not None and "Centres by year, at last base 1.00; v8 3.00; mover 2.00." in drawn
    once = match()
    short = tuple(replace(player, by_year=player.by_year[:1]) for player in once.table.players)
    assert plots.match_by_year(replace(once, table=replace(once.table, players=short))) is None


def test_every_player_of_a_match_is_drawn_with_a_line_of_its_own():
    played = match()
    players = tuple(replace(played.table.players[0], player=f"v{number}") for number in range(10))
    drawn = plots.match_by_year(replace(played, table=replace(played.table, players=players))) or ""
    assert [each.player for each in players if f">{each.player}<" not in drawn] == []
    strokes = re.findall(r'stroke="(#\w+)" stroke-width="1.8"( stroke-dasharray)?', drawn)
    assert len(strokes) == len(set(strokes)) == 10


def test_games_from_held_out_positions_of_many_years_are_not_drawn_from_1901():
    played = match()
    assert ">1901<" in plots.match_by_year(played) and ">1902<" in plots.match_by_year(played)
    drawn = plots.match_by_year(replace(played, settings=played.settings.model_copy(update={"start": "held-out"})))
    assert "1901" not in drawn and ">year since the start<" in drawn and ">2<" in drawn


def test_long_names_in_a_legend_stay_inside_the_picture():
    panel = Panel(label="centres")
    for seat, name in enumerate(
        ("models/whole-192+1", "models/whole-192+2", "models/whole-192+3", "models/whole-192+4", 90 * "x")
    ):
        panel.line([1, 2], [seat, seat + 1], BLUE, name)
    drawn = plot([panel], "step", "")
    texts = re.findall(r'<text x="([\d.]+)" y="([\d.]+)" text-anchor="start"[^>]*>([^<]*)<', drawn)
    assert len(texts) == 5 and len({y for _, y, _ in texts}) == 3, "two rows of two names, then the longest, cut"
    assert all(float(x) + 6.5 * len(text) <= WIDE for x, _, text in texts)


@pytest.mark.parametrize("value", [1.5e-6, 0.25, 1234567.0, 98765432.1])
def test_numbers_on_an_axis_meet_neither_its_label_nor_each_other(value: float):
    panel = Panel(label="nats")
    panel.line([0, 1e6 * (1 + value)], [0.0, value], BLUE)
    texts = re.findall(r'<text x="([\d.]+)" y="([\d.]+)" text-anchor="(end|middle)"[^>]*>([^<]*)<', plot([panel], "step", ""))
    widest_digit = 7.95  # of DejaVu Sans
    assert all(float(x) - widest_digit * len(text) > 17 for x, _, anchor, text in texts if anchor == "end")
    below = [(float(x), len(text)) for x, _, anchor, text in texts if anchor == "middle" and text != "step"]
    assert len(below) > 2
    assert all(x - left > widest_digit * (long + other) / 2 for (left, long), (x, other) in pairwise(below))


def test_a_sketch_of_one_value_is_a_dot():
    sketch = page_template("parts.html.jinja").module.sketch
    assert 'class="point"' in sketch([1.5]) and 'class="point"' not in sketch([1.5, 1.5])


def test_a_picture_says_names_as_text_and_its_size_does_not_grow_with_the_steps():
    panel = Panel(label="</svg><script>alert(1)</script>")
    panel.line(range(5000), [step % 7 for step in range(5000)], BLUE, '"><img src=x onerror=alert(1)>\x1b')
    drawn = plot([panel], "step", "<b>" + 2_000_000 * "x")
    assert Page(drawn).elements and "<script" not in drawn and "<img" not in drawn and "\x1b" not in drawn and len(drawn) < 20_000
    assert Page(stand_alone(drawn)).elements[1][0] == "rect"


def test_a_peak_between_many_steps_is_drawn():
    panel, flat = Panel(label="norm"), [1.0] * 3000
    panel.line(range(3000), [*flat[:1500], 9.0, *flat[1501:]], BLUE)
    drawn = plot([panel], "step", "")
    heights = [
        float(y)
        for y in re.findall(r"[ML][\d.]+ ([\d.]+)", re.findall(r'<path d="(M[^"]+)" fill="none" stroke="#3d85c6"', drawn)[0])
    ]
    assert max(heights) - min(heights) > 120, "the whole height of the panel, as the highest value is"


@pytest.mark.parametrize(("steps", "dots"), [(100, 2), (3000, 2), (40, 4)])
def test_values_of_a_few_steps_among_many_without_are_drawn(steps: int, dots: int):
    """As the difference of trainer and engine, where nearly all rows are one version old."""
    values = [float("nan")] * steps
    values[0] = values[2 * steps // 5] = 0.1
    values[3 * steps // 5 : 3 * steps // 5 + 2] = 0.2, 0.3
    panel = Panel(label="nats")
    panel.line(range(1, steps + 1), values, BLUE)
    assert plot([panel], "step", "").count("<circle") == dots


def test_what_a_run_does_not_have_is_not_drawn():
    assert plots.lags(facts(steps={1: {"time/step_s": 1.0, "train/policy_lag_0_share": 1.0}})) is None
    assert plots.times(facts()) is None and plots.lags(facts()) is None
    assert plots.ladder([]) is None and plots.ladder([point(0, 0.1), point(8, 0.2)]) is None
    assert plots.scores([]) is None


def test_the_plot_of_lags_says_the_run_s_figures():
    run = facts(steps={1: STEP, 2: STEP | {"train/policy_lag_1_share": 0.25, "train/policy_lag_2_share": 0.5}})
    says = "its own 25%, 1 behind 50%, 2 behind 25%, more 0%"
    assert says in alt(plots.lags(run))
    assert says in alt(plots.lags(facts(steps={**run.steps, 3: {"time/step_s": 1.0}}))), "a step without rows has no lags"


@pytest.mark.parametrize("most", [0.012, 0.4])
def test_the_ticks_of_a_share_tell_their_true_values(most: float):
    """Equal distances between ticks are equal differences between what they say, which rounded ones are not."""
    found = dict(plots.health(facts(steps={1: {"train/clip_ratio_high": 0.0}, 2: {"train/clip_ratio_high": most}})))
    (svg,) = [svg for svg in found if "clipping" in alt(svg)]
    shown = sorted({float(each) for each in re.findall(r">([\d.]+)%<", svg)})
    steps = [round(after - before, 6) for before, after in pairwise(shown)]
    assert len(shown) >= 3 and len(set(steps)) == 1 and shown[-1] <= 110 * most


@pytest.mark.parametrize("losses", [(0.35, 0.2), (0.9, 0.3), (0.29, 0.21), (3.0, 0.02)])
def test_a_log_axis_has_two_numbers_or_more_at_their_places(losses: tuple[float, ...]):
    panel = Panel(label="nats a token", log=True)
    panel.line(range(len(losses)), losses, BLUE)
    (low, high), ticks = panel.ticks()
    assert len(ticks) >= 2 and all(low <= place <= high for place, _ in ticks)
    assert [10**place for place, _ in ticks] == pytest.approx([float(text) for _, text in ticks])


@pytest.mark.parametrize(("last", "shown"), [(1908, "1904"), (40_000, "20,000")])
def test_long_numbers_have_commas_and_years_have_none(last: int, shown: str):
    panel = Panel(label="centres")
    panel.line([last - 8 if last < 10_000 else 0, last], [1.0, 2.0], BLUE)
    assert f">{shown}<" in plot([panel], "x", "alt")


@pytest.mark.parametrize("lines", [8, 9])
def test_a_table_is_drawn_with_all_its_columns_or_not_at_all(lines: int):
    table = pa.table({"step": [1, 2]} | {f"c{column}": [0.0, 1.0] for column in range(lines)})
    drawn = plots.of_table(table) or ""
    assert drawn.count('<path d="M') >= lines and ">c7<" in drawn if lines == 8 else not drawn


def test_a_table_of_two_texts_a_row_is_not_drawn_as_lines_through_both():
    table = pa.table(
        {"version": [0, 0, 1, 1], "power": ["FRANCE"] * 4, "phase": ["S1901M", "F1901M"] * 2, "mean": [1.0, 5.0, 1.5, 5.5]}
    )
    assert plots.of_table(table) is None
    assert plots.of_table(table.take([0, 2])) and plots.of_table(table.drop(["power"]))


def test_a_match_lists_its_players_best_first_and_claims_only_what_is_shown():
    assert "21 games: v8 0.300; mover 0.200; base 0.100" in alt(plots.match(match()))
    said = sentences.describe_match(match())
    assert "base plays worse than v8: by -0.200 (sos), 95 % interval [-0.300, -0.100]." in said
    assert "no difference between base and mover is shown: by -0.050 (sos), 95 % interval [-0.150, +0.050]; about 400" in said
