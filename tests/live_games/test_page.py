"""The page of a game in a real browser, served by the command: a year of clicks, a second window, and the game continued."""

import json
import signal
import subprocess
from pathlib import Path

import pytest

from entente.live_games.game import PlayedGame
from entente.live_games.page import as_data, page_html
from tests.http_here import address_of

LIMIT_MS = 60_000
PLACE = """name => {
  const [x, y] = JSON.parse(document.getElementById('page').textContent).places[name];
  const at = document.getElementById('map').getScreenCTM();
  return [x * at.a + at.e, y * at.d + at.f];
}"""


def end(process: "subprocess.Popen[str]") -> None:
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 0


@pytest.mark.in_turn
@pytest.mark.browser
@pytest.mark.system
def test_a_year_is_played_by_clicks_and_continued_after_a_kill(entente, browser):
    from playwright.sync_api import expect

    process = entente.start("play", "--no-browser", "--game", "mine", "--against", "dumbbot")
    told: list[str] = []
    try:
        page = browser.new_page(viewport={"width": 1400, "height": 950}, reduced_motion="reduce")
        page.on("console", lambda message: told.append(message.text))
        page.on("pageerror", lambda error: told.append(str(error)))
        page.goto(address_of(process))
        page.wait_for_selector("#own select")

        def click(name: str) -> None:
            page.mouse.click(*page.evaluate(PLACE, name))

        for name in ("PAR", "BUR", "MAR", "PAR"):
            click(name)
        page.locator("#choice button", has_text="support A PAR").click()
        click("BUR")
        for name in ("BRE", "MAO"):
            click(name)
        given = [page.locator("#own select").nth(place).input_value() for place in range(3)]
        assert given == ["F BRE - MAO", "A MAR S A PAR - BUR", "A PAR - BUR"]
        page.locator("#own select").first.focus()
        for _ in range(2):  # an order by keyboard leaves the focus where it is
            page.keyboard.press("ArrowDown")
        focused = page.locator("#own select:focus")
        assert focused.get_attribute("aria-label") == "Order of F BRE" and focused.input_value() not in ("", given[0])
        other = browser.new_page()  # its clock stands still: both turns come while it shows the first one pass by
        other.clock.install(time="2026-01-01")
        other.goto(page.url)
        other.clock.pause_at("2026-01-02")
        page.get_by_text("send the orders").click()
        expect(page.locator("#phase")).to_have_text("Fall 1901 Movement", timeout=LIMIT_MS)
        assert "A MAR S A PAR - BUR" in page.locator("#orders").inner_text()
        page.get_by_text("hint by").click()
        expect(page.locator("#marks .mark")).not_to_have_count(0, timeout=LIMIT_MS)
        page.get_by_text("send the orders").click()
        expect(other.locator("#phases a")).not_to_have_count(2, timeout=LIMIT_MS)
        assert other.locator("#phase").inner_text() == "Spring 1901 Movement"
        other.clock.run_for(LIMIT_MS)
        expect(other.locator("#phase")).to_have_text(page.locator("#phase").inner_text(), timeout=LIMIT_MS)
        narrow = browser.new_page(viewport={"width": 390, "height": 800}, color_scheme="dark")
        narrow.goto(page.url)
        narrow.wait_for_selector("#orders .power")
        assert narrow.evaluate("document.documentElement.scrollWidth") <= 390
        page.locator("#phases a").first.click()
        page.get_by_text("play on from here").click()
        expect(page.locator("#phase")).to_have_text("Spring 1901 Movement", timeout=LIMIT_MS)
        page.get_by_text("send the orders").click()
        expect(page.locator("#phase")).to_have_text("Fall 1901 Movement", timeout=LIMIT_MS)
        assert told == []
    finally:
        process.kill()
        process.communicate()
    file: Path = entente.folder / "runs" / "_games" / "mine.json"
    assert [turn["phase"] for turn in json.loads(file.read_text())["turns"]] == ["S1901M"]
    again = entente.start("play", "--no-browser", "--game", "mine")
    try:
        page = browser.new_page()
        page.goto(address_of(again))
        assert page.locator("#phase").inner_text() == "Fall 1901 Movement"
        page.close()
    finally:
        end(again)


@pytest.mark.in_turn
@pytest.mark.browser
@pytest.mark.system
def test_a_watched_game_plays_on_by_itself_to_its_end_and_its_page_asks_for_no_orders(entente, browser):
    from playwright.sync_api import expect

    process = entente.start("play", "--no-browser", "--watch", "--against", "mover", "--years", "1")
    try:
        page = browser.new_page(viewport={"width": 390, "height": 800}, reduced_motion="reduce")
        errors: list[str] = []
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(address_of(process))
        expect(page.locator("#status")).to_contain_text("You watch")
        assert "Click a unit" not in page.locator(".legend").inner_text()
        page.get_by_role("button", name="play the next phase").click()
        expect(page.locator("#phases a")).to_have_count(2, timeout=LIMIT_MS)
        page.get_by_role("button", name="play on by itself").click()
        expect(page.locator("#status")).to_contain_text("The game is over", timeout=LIMIT_MS)
        expect(page.locator("#own button")).to_have_count(0)
        assert "Click a unit" not in page.locator(".legend").inner_text()
        page.locator("#phases a").nth(1).click()
        page.get_by_text("play on from here").click()
        expect(page.locator("#phases a")).to_have_count(2, timeout=LIMIT_MS)
        page.wait_for_timeout(1000)  # the game waits again for a click
        assert page.get_by_role("button", name="play on by itself").is_enabled()
        assert page.locator("#phases a").count() == 2 and errors == []
    finally:
        end(process)


@pytest.mark.browser
@pytest.mark.system
def test_a_window_that_slept_shows_a_position_that_was_played_again_meanwhile(browser, new_game):
    def played(order: str) -> PlayedGame:
        game = new_game("FRANCE")
        game.revision = 2 if "BUR" in order else 5  # undone and played again: as many phases
        legal = game.board.legal_orders()
        game.replay({power: each.completed([order] if power == "FRANCE" else []) for power, each in legal.items()}, {}, {})
        return game

    def units() -> list[str]:
        return page.evaluate("[...document.querySelectorAll('#units .unit')].map(each => each.style.transform).sort()")

    first, now = played("A PAR - BUR"), played("A PAR - PIC")
    page = browser.new_page(reduced_motion="reduce")
    shown = []
    for game in (now, first):
        page.goto("about:blank")
        page.evaluate(
            "() => { fetch = () => new Promise(done => { answer = data => done({ ok: true, json: () => JSON.parse(data) }); }); }"
        )
        page.set_content(page_html(game, ["random"], "key", "nonce"))
        page.locator("#own select").first.select_option(index=1)
        shown.append(units())
    page.evaluate("data => answer(data)", json.dumps(as_data(now)))
    page.wait_for_function("document.querySelector('#own select').selectedIndex === 0")  # no order is kept of another position
    assert units() == shown[0] != shown[1]
    page.close()
