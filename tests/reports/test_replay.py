"""Claims about `entente replay`: what it shows is what the run's files hold, its odds add up, and a browser steps through it."""

import json
import math
import re
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from diplomacy.utils.order_results import BOUNCE, CUT, DISBAND, DISLODGED, DISRUPTED, NO_CONVOY, VOID

from entente.cli.replay_game import replay
from entente.cli.what_if import _position
from entente.game.board import Board
from entente.game.snapshot import POWERS
from entente.reports.games import GameName
from entente.reports.inspect_rows import Inspector, phases_of
from entente.reports.order_odds import OrderOdds, odds_by_line
from entente.reports.replay_page import as_data, replay_html
from entente.reports.replayed import ReplayedGame, _orders, read_game
from entente.settings.layers import settings_of
from entente.telemetry.errors import DataError, InputError
from storage.arrow_files import COMPONENTS, PHASE_SCHEMA, metadata_of
from storage.runs import MODEL_FOLDER, RunPaths
from storage.shards import open_phases, open_shard, publish_shard
from tests.conftest import Entente, overheard
from tests.damage import flip
from tests.reports.conftest import Page
from tests.shard_rows import read_rows, shard_files
from tests.thought_rows import add_thoughts

LINE, END = 1, 2


def test_each_of_several_waived_builds_has_its_own_odds():
    odds = [OrderOdds(logprob=logprob, choices=1) for logprob in (-2.0, -0.5, -0.1)]
    decision = {"orders": ["A PAR B", "WAIVE", "WAIVE"], "odds": odds}
    shown = _orders(["A PAR B", "WAIVE", "WAIVE"], {}, decision)
    assert [order.probability for order in shown] == [each.probability for each in odds]


def test_the_map_has_a_word_and_a_cross_for_every_result_of_an_order_that_failed():
    script = files("entente.reports").joinpath("board.js").read_text()
    (failed,) = re.findall(r"const FAILED = \{(.*)\};", script)
    for result in (BOUNCE, CUT, DISBAND, DISLODGED, DISRUPTED, NO_CONVOY, VOID):
        assert re.search(rf'"?{result}"?: "', failed), result


def test_an_order_s_odds_are_those_of_its_tokens_and_forced_ones_count_as_certain():
    completion, logprobs = [7, 8, LINE, 9, LINE, 7, END], [-0.5, -9.0, -0.25, -1.0, -9.0, -9.0, -9.0]
    legal = [3, 1, 2, 4, 1, 1, 1]
    offsets = [sum(legal[:place]) for place in range(len(legal) + 1)]
    found = odds_by_line(completion, logprobs, offsets, {LINE, END})
    assert [odds.logprob for odds in found] == [-0.75, -1.0, 0.0]
    assert [odds.choices for odds in found] == [2, 1, 0]
    assert found[2].probability == 1


@pytest.fixture
def model(trained: tuple[dict[str, Any], RunPaths, object]) -> Path:
    (folder,) = (trained[1].root.parent / MODEL_FOLDER).glob("tiny-*")
    return folder


def read(paths: RunPaths, name: str, model: Path | None) -> ReplayedGame:
    return read_game(Inspector(paths, model, settings_of(paths)), name)


@pytest.fixture
def replayed(trained: tuple[dict[str, Any], RunPaths, object], model: Path) -> Callable[[str], ReplayedGame]:
    return lambda name: read(trained[1], name, model)


def test_what_is_shown_of_every_decision_of_a_game_is_its_row(trained, replayed: Callable[[str], ReplayedGame]):
    paths = trained[1]
    rows = [row for row in read_rows(*shard_files(paths)) if (row["start_group"], row["fork"]) == (1, 2)]
    game = replayed("1/2")
    shown = {
        (phase_row.number, power): (phase_row, decision)
        for phase_row in game.phases
        for power, decision in phase_row.decisions.items()
    }
    assert rows and set(shown) == {(row["phase_index"], row["power"]) for row in rows}
    for row in rows:
        phase_row, decision = shown[row["phase_index"], row["power"]]
        orders = phase_row.orders[row["power"]]
        assert [given.order for given in orders] == row["orders"]
        probabilities = [given.probability for given in orders if given.probability is not None]
        assert len(probabilities) == len(orders) and all(0 < value <= 1 for value in probabilities)
        assert sum(map(math.log, probabilities)) == pytest.approx(sum(row["behaviour_logprobs"]), abs=1e-5)
        assert decision["logprob"] == pytest.approx(sum(row["behaviour_logprobs"]))
        assert (decision["decision_id"], decision["policy_version"]) == (row["decision_id"], row["policy_version"])
        assert decision["components"] == {name: row[name] for name in COMPONENTS if row[name]}


def test_a_game_s_boards_follow_from_one_another_by_its_orders(trained, replayed: Callable[[str], ReplayedGame]):
    phases = read_rows(*trained[1].shards.rglob("*.phases.arrow"))
    stored = [row for row in phases if (row["start_group"], row["fork"]) == (0, 0)]
    game = replayed("0/0")
    assert [phase_row.number for phase_row in game.phases] == sorted(row["phase_index"] for row in stored)
    for phase_row, following in zip(game.phases, game.phases[1:], strict=False):
        board: Board = phase_row.board.fork()
        played = board.step({power: [given.order for given in orders] for power, orders in phase_row.orders.items()})
        assert (board.phase, board.units(), board.centres()) == (
            following.phase,
            following.board.units(),
            following.board.centres(),
        )
        results = {given.order[:5]: given.results for orders in phase_row.orders.values() for given in orders}
        assert all(set(results[unit[:5]]) == set(found) for unit, found in played.results.items() if unit[:5] in results)
    assert game.phases[-1].orders == {}


def test_the_lag_of_a_decision_is_that_of_the_step_that_trained_on_it(trained, replayed: Callable[[str], ReplayedGame]):
    used: dict[int, list[tuple[int, int]]] = {}
    for file in sorted(trained[1].ledger.rglob("step-*.arrow")):
        for row in read_rows(file):
            used.setdefault(row["decision_id"], []).append((int(file.stem[5:]), row["policy_lag"]))
    games = [replayed(f"{group}/{fork}") for group in range(2) for fork in range(4)]
    decisions = [decision for game in games for phase_row in game.phases for decision in phase_row.decisions.values()]
    assert any(decision["used"] for decision in decisions)
    assert all(decision["used"] == used.get(decision["decision_id"], []) for decision in decisions)


def test_games_go_by_several_names(trained, replayed: Callable[[str], ReplayedGame]):
    rows = read_rows(*shard_files(trained[1]))
    gains: dict[tuple[int, int], float] = {}
    for row in rows:
        key = (row["start_group"], row["fork"])
        gains[key] = gains.get(key, 0) + row["centres_gained"]
    best, worst = (replayed(name).game for name in ("best", "worst"))
    assert gains[best.start_group, best.fork] == max(gains.values())
    assert gains[worst.start_group, worst.fork] == min(gains.values())
    assert replayed("latest").game.start_group == max(group for group, _ in gains)
    row = rows[-1]
    assert replayed(str(row["decision_id"])).game.name == f"{row['start_group']}/{row['fork']}"
    assert replayed(f"{replayed('0/1').game.producer}/0/1").game.name == "0/1"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        pytest.param("0", "start group 0 was played several times: name the fork; there are 4: 0/0, 0/1", id="start group"),
        pytest.param("9" * 30, "neither a start group nor a decision", id="beyond every id"),
        pytest.param("../0", "'../0' names no game", id="nonsense"),
    ],
)
def test_a_game_that_is_not_there_is_one_sentence_with_those_there_are(trained, replayed, name: str, said: str):
    with pytest.raises(InputError, match=said.replace("/", "\\/").replace(".", "\\.")):
        replayed(name)


def test_a_game_in_a_damaged_shard_is_told_by_that_shard(run_folder: RunPaths, model: Path, capsys: pytest.CaptureFixture[str]):
    file = run_folder.shards / read(run_folder, "latest", model).game.shard
    name = read(run_folder, "latest", model).game.name
    flip(file)
    with pytest.raises(DataError, match=rf"game {name} cannot be replayed: .*{file.name} has damaged rows"):
        read(run_folder, name, model)
    chosen = read(run_folder, "latest", model)
    assert chosen.game.name != name and "1 damaged or missing files" in replay_html(chosen, run_folder.root.parent)
    _position("latest", "", run_folder.root.name, run_folder.root.parent)
    assert "1 damaged or missing files" in capsys.readouterr().err


def test_a_game_that_failed_before_its_first_position_is_told_in_a_sentence():
    game = GameName(
        producer="local",
        start_group=0,
        fork=1,
        shard="local/000000.arrow",
        phases=0,
        first="",
        last="",
        powers=("FRANCE",),
        version=0,
        status="failed",
        gain=0.0,
    )
    with pytest.raises(InputError, match=r"no position of game 0/1 was recorded, .*: it failed at its start"):
        phases_of(PHASE_SCHEMA.empty_table(), game)


def test_without_the_tokenizer_boards_are_shown_and_single_orders_have_no_odds(trained, model: Path):
    with_odds, without = (read(trained[1], "0/0", folder) for folder in (model, None))
    assert with_odds.has_odds and not without.has_odds
    assert all(
        given.probability is None for phase_row in without.phases for orders in phase_row.orders.values() for given in orders
    )
    assert [phase_row.decisions for phase_row in without.phases] == [phase_row.decisions for phase_row in with_odds.phases]


def test_the_page_stands_alone_and_a_position_costs_few_bytes(replayed: Callable[[str], ReplayedGame]):
    game = replayed("0/0")
    html = replay_html(game, Path("runs"))
    page = Page(html)
    assert len(page.elements) > 10
    for tag, attributes in page.elements:
        assert tag not in ("link", "iframe", "img", "object", "base", "form") and "src" not in attributes
    assert "://" not in html.replace("http://www.w3.org/2000/svg", "")
    assert [tag for tag, _ in page.elements].count("svg") == 1
    data = json.dumps(as_data(game, Path("runs"))["phases"])
    assert len(html) < 120e3 and len(data) / len(game.phases) < 6e3


def test_a_name_that_looks_like_markup_stays_a_name(run_folder: RunPaths, model: Path):
    strange = RunPaths(run_folder.root.rename(run_folder.root.with_name("a<b>&</script>".replace("/", ""))))
    html = replay_html(read(strange, "0/0", model), strange.root.parent)
    assert Page(html).elements and "<b>" not in html


def test_the_command_lists_games_and_writes_the_page_of_one(workplace: Entente, trained, tmp_path: Path):
    listed = workplace("replay", "--run", "first")
    assert listed.returncode == 0 and "0/0" in listed.stdout and "entente replay " in listed.stdout
    done = workplace("replay", "0/0", "--run", "first", "--output", str(tmp_path / "game.html"))
    assert done.returncode == 0 and done.stdout.strip() == str(tmp_path / "game.html")
    for words, said in [
        (("0/0", "--run", "never"), "there is no run in 'runs/never'"),
        (("0/0", "--run", "first", "--output", "no/such.html"), "there is no folder 'no'"),
    ]:
        refused = workplace("replay", *words)
        assert refused.returncode == 2 and said in refused.stderr and len(refused.stderr.splitlines()) == 1


def test_a_game_of_two_producers_is_listed_by_a_name_that_works_and_each_has_a_page_of_its_own(stored_run: RunPaths):
    newest = sorted(stored_run.shards.rglob("[0-9]?????.arrow"))[-1]
    decisions = open_shard(newest)
    own = {name: metadata_of(decisions)[name] for name in ("run", "base_model", "tokenizer", "settings")}
    publish_shard(stored_run, "probe", int(newest.stem), decisions, open_phases(newest, decisions), own)
    entente, words = Entente(stored_run.root.parent), ("--run", "before", "--runs-root", ".")
    suggested, *its_run = entente("replay", *words, "--last", "1").stdout.partition("entente replay ")[2].split()
    assert its_run == list(words)
    producer, _, name = suggested.partition("/")
    names = [f"{producer}/{name}", f"{'local' if producer == 'probe' else 'probe'}/{name}"]
    for ambiguous in (("replay", name), ("replay", name.partition("/")[0]), ("runs", "what-if", "--game", name)):
        refused = entente(*ambiguous, *words)
        assert refused.returncode == 2 and all(each in refused.stderr for each in names), refused.stderr
    pages = [entente("replay", each, *words).stdout.strip() for each in names]
    assert pages == [f"before/replay-{each.replace('/', '-')}.html" for each in names]


def test_the_list_of_games_says_which_files_it_lacks(stored_run: RunPaths, capsys: pytest.CaptureFixture[str]):
    for each, file in enumerate(sorted(stored_run.shards.rglob("[0-9]?????.arrow"))):
        file.write_bytes(b"damaged")
        if each == 0:
            replay(run="before", runs_root=stored_run.root.parent)
            assert "the answer lacks rows of 1 damaged" in capsys.readouterr().err
    with pytest.raises(DataError, match="has no game that can be read"):
        replay(run="before", runs_root=stored_run.root.parent)


_SHOWN = """() => ({
    phase: document.getElementById('phase').textContent,
    units: [...document.querySelectorAll('#units .unit')].map(unit => unit.style.transform).sort().join(' '),
    marks: document.querySelectorAll('#marks .mark').length,
    chances: [...document.querySelectorAll('.track')].map(track => track.textContent),
    wide: document.scrollingElement.scrollWidth,
})"""


@pytest.mark.browser
@pytest.mark.system
@pytest.mark.parametrize(("scheme", "width"), [("light", 1300), ("dark", 390)])
def test_a_browser_steps_through_a_game_without_network_or_complaint(
    browser: Any, replayed: Callable[[str], ReplayedGame], tmp_path: Path, scheme: str, width: int
):
    game = replayed("best")
    file = tmp_path / "game.html"
    file.write_text(replay_html(game, Path("runs")))
    page = browser.new_page(color_scheme=scheme, viewport={"width": width, "height": 900}, reduced_motion="reduce")
    complaints, requests = overheard(page)
    page.goto(file.resolve().as_uri(), wait_until="load")
    seen = [page.evaluate(_SHOWN)]
    for _ in game.phases[1:]:
        page.keyboard.press("ArrowRight")
        seen.append(page.evaluate(_SHOWN))
    page.keyboard.press("ArrowRight")
    stays = page.evaluate(_SHOWN)
    page.click("#phases a:first-child")
    page.wait_for_function("document.getElementById('slider').value === '0'")
    again = page.evaluate(_SHOWN)
    page.close()
    assert [shown["phase"].removesuffix(": the end") for shown in seen] == [
        phase_row.board.long_phase.title() for phase_row in game.phases
    ]
    assert stays == seen[-1] and again == seen[0]
    for shown, phase_row in zip(seen, game.phases, strict=True):
        assert len(shown["units"].split("translate")) - 1 == sum(
            len(own[power]) for own in (phase_row.board.units(), phase_row.board.dislodged()) for power in POWERS
        )
        assert shown["marks"] == sum(len(given.order.split()) > 2 for orders in phase_row.orders.values() for given in orders)
        assert len(shown["chances"]) == sum(len(phase_row.orders[power]) for power in phase_row.decisions)
        assert all("%" in chance for chance in shown["chances"]) and shown["wide"] <= width
    assert len({shown["units"] for shown in seen}) > 1 and any(shown["chances"] for shown in seen)
    assert complaints == [] and requests == [file.resolve().as_uri()]


@pytest.mark.browser
@pytest.mark.system
def test_a_browser_shows_thoughts_as_text(browser: Any, stored_run: RunPaths, tmp_path: Path):
    wicked = "Take BER.\n</script><img src=x onerror=alert(1)> & hold \x1b[2J" + 40 * "verylongword"
    add_thoughts(stored_run, [("", False), (wicked, True), ("Hold.", False)])
    (model,) = (stored_run.root.parent / MODEL_FOLDER).glob("tiny-*")
    game, file = read(stored_run, "0/1", model), tmp_path / "game.html"
    file.write_text(replay_html(game, Path("runs")))
    page = browser.new_page(viewport={"width": 390, "height": 900})
    complaints, _ = overheard(page)
    page.goto(file.resolve().as_uri(), wait_until="load")
    seen = []
    for _ in game.phases:
        texts = page.eval_on_selector_all("blockquote", "all => all.map(quote => quote.textContent)")
        about = page.eval_on_selector_all("figcaption", "all => all.map(caption => caption.textContent)")
        seen.append((texts, [words.split(", ")[1] for words in about]))
        assert page.evaluate("document.scrollingElement.scrollWidth") <= 390 and page.locator("aside img").count() == 0
        page.keyboard.press("ArrowRight")
    page.close()
    by_itself, shown = ["ended by itself"], wicked.replace("\x1b", "\\x1b")
    assert seen == [(["Hold."], by_itself), ([shown], ["ended by force"]), ([], [])]
    assert complaints == []
