"""`entente view` in a real browser, served by the command: a run watched to its end, a group explained by looking."""

import json
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from storage.files import file_lock
from storage.runs import RunPaths
from tests.conftest import Entente, overheard
from tests.http_here import address_of
from tests.live_games.test_page import LIMIT_MS, end
from tests.thought_rows import add_thoughts

WICKED = "Take BER.\n</script><img src=x onerror=alert(1)> & hold \x1b[2J" + 40 * "verylongword"
pytestmark = [pytest.mark.browser, pytest.mark.system]


@pytest.fixture
def opened(entente: Entente, browser: Any, stored_run: RunPaths) -> Callable[..., Any]:
    """Opens a page of the command in a window; fails at its end if the page complained or asked elsewhere."""

    @contextmanager
    def at(*words: str, width: int = 1400, scheme: str = "light") -> Iterator[Any]:
        process = entente.start("view", *words, "--runs-root", str(stored_run.root.parent), "--no-browser")
        page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        told, asked = overheard(page)
        try:
            place = address_of(process)
            page.goto(place)
            yield page
            assert told == []
            assert [url for url in asked if not url.startswith((place.split("/?")[0].split("/run")[0], "data:image/"))] == []
        finally:
            page.close()
            end(process)

    return at


def test_a_run_is_watched_from_its_first_step_to_its_end_without_a_reload(opened, stored_run: RunPaths):
    from playwright.sync_api import expect

    whole = shutil.copytree(stored_run.root, stored_run.root.with_name("_whole"))
    lines = (whole / "metrics.jsonl").read_text().splitlines(keepends=True)
    for name in ("summary.json", "metrics.jsonl"):
        (stored_run.root / name).unlink()
    for name in ("ledger", "shards", "scores", "adapters", "checkpoints"):
        shutil.rmtree(stored_run.root / name)
        (stored_run.root / name).mkdir()

    def came(*names: str) -> None:
        for name in names:
            (stored_run.root / name).parent.mkdir(parents=True, exist_ok=True)
            if (whole / name).is_dir():
                shutil.copytree(whole / name, stored_run.root / name, dirs_exist_ok=True)
            else:
                shutil.copyfile(whole / name, stored_run.root / name)

    with file_lock(stored_run.lock) as mine, opened("before", width=400, scheme="dark") as page:
        assert mine
        expect(page.locator("main")).to_contain_text("Running: no step of 2 done yet", timeout=LIMIT_MS)
        page.evaluate("window.sameDocument = true")
        expect(page.locator("main")).to_contain_text("waits for its rollouts", timeout=LIMIT_MS)
        came("shards/local", "ledger/step-000001.arrow")
        expect(page.locator("main")).to_contain_text("Step 1 has its rows", timeout=LIMIT_MS)
        came("checkpoints/step_000001", "adapters/v000001")
        for step in (0, 1):
            with stored_run.metrics.open("a") as file:
                file.writelines(line for line in lines if json.loads(line)["step"] == step)
        expect(page.locator("main")).to_contain_text("1 of 2 steps done", timeout=LIMIT_MS)
        expect(page.locator("[data-part=time] svg[role=img]")).to_have_count(2, timeout=LIMIT_MS)
        page.get_by_role("link", name="step 1", exact=True).focus()
        came("ledger/step-000002.arrow", "checkpoints/step_000002", "adapters/v000002", "scores")
        with stored_run.metrics.open("a") as file:
            file.writelines(line for line in lines if json.loads(line)["step"] >= 2)
        came("summary.json")
        expect(page.locator("main")).to_contain_text("Complete: 2 steps", timeout=LIMIT_MS)
        expect(page.locator("[data-part=ordered] img")).not_to_have_count(0, timeout=LIMIT_MS)
        expect(page.locator("main")).to_contain_text("Score the newest version", timeout=LIMIT_MS)
        assert page.evaluate("window.sameDocument") and page.evaluate("document.scrollingElement.scrollWidth") <= 400
        assert page.evaluate("document.activeElement.textContent") == "step 1", "an update leaves the focus where it is"


def test_a_group_is_explained_and_a_decision_recomputed_by_clicks_and_keys_alone(opened, stored_run: RunPaths):
    from playwright.sync_api import expect

    add_thoughts(stored_run, [(WICKED, True), ("Hold.", False)])
    with opened("before", "--step", "1") as page:
        page.get_by_role("link", name=re.compile("^group ")).first.focus()
        page.keyboard.press("Enter")
        expect(page.locator(".verdict")).to_contain_text(re.compile("returned .* more than fork|same return"), timeout=LIMIT_MS)
        assert page.locator("section.card h3").count() >= 2 and page.locator("figure img").count() == 2
        assert all(page.eval_on_selector_all("figure img", "all => all.map(image => image.naturalWidth > 60)"))
        page.get_by_role("link", name="its tokens").first.click()
        expect(page.locator(".tokens mark")).not_to_have_count(0, timeout=LIMIT_MS)
        assert page.locator("main img[src=x]").count() == 0 and "\x1b" not in page.content()
        page.get_by_role("link", name="legal", exact=True).click()
        expect(page.locator(".tokens mark.heat9")).not_to_have_count(0, timeout=LIMIT_MS)
        page.get_by_role("button", name="Recompute").click()
        expect(page.locator("[data-part=job]")).to_contain_text(re.compile("Recomputed under|At work"), timeout=LIMIT_MS)
        expect(page.locator("[data-part=job]")).to_contain_text("Recomputed under", timeout=4 * LIMIT_MS)
        expect(page.locator("#tokens thead")).to_contain_text("entropy ↻", timeout=LIMIT_MS)
        page.get_by_role("link", name="its game").or_(page.get_by_role("link", name="Games")).first.click()
        page.wait_for_selector("a")


def test_what_is_typed_into_a_field_arrives_there_and_stays_while_the_answer_comes(opened, stored_run: RunPaths):
    from playwright.sync_api import expect

    with opened("before") as page:
        page.get_by_role("link", name="Games").click()
        page.locator("td a").first.click()
        orders, typed = page.locator("[name=orders]"), "A PAR - BUR"
        orders.click()
        page.keyboard.type(typed)
        assert (orders.input_value(), page.locator("#play").inner_text()) == (typed, "▶ play")
        orders.fill("")
        page.locator("[name=forks]").fill("2")
        page.locator("[name=years]").fill("1")
        page.get_by_role("button", name="Play them").click()
        expect(page.locator("#what-if")).to_contain_text("At work", timeout=LIMIT_MS)
        orders.click()
        page.keyboard.type(typed)
        expect(page.locator("#what-if .verdict")).to_contain_text("Nothing changes for", timeout=4 * LIMIT_MS)
        page.locator("h1").click()
        expect(page.get_by_role("button", name="Play them")).to_be_enabled(timeout=LIMIT_MS)
        assert orders.input_value() == typed


def test_an_open_page_keeps_what_is_ticked_and_says_when_it_is_no_longer_updated(opened, browser: Any, stored_run: RunPaths):
    from playwright.sync_api import expect

    with opened() as page:
        tick = page.get_by_role("checkbox")
        tick.check()
        with file_lock(stored_run.lock) as mine:
            assert mine
            expect(page.locator("tbody")).to_contain_text("training", timeout=LIMIT_MS)
            expect(tick).to_be_checked()
        old = browser.new_context(storage_state=page.context.storage_state()).new_page()  # with its cookie
        old.goto(page.url)
        old.route("**/*", lambda route: route.fulfill(status=403, json={"error": "the key of this address is missing or old"}))
        expect(old.locator("#lost")).to_be_visible(timeout=LIMIT_MS)
        old.context.close()


def test_a_foreign_page_in_the_same_browser_reads_and_starts_nothing(opened, browser: Any):
    with opened("before") as page:
        own = page.url
        foreign = browser.new_page()
        foreign.route("http://evil.example/", lambda route: route.fulfill(body="<p>evil</p>", content_type="text/html"))
        foreign.goto("http://evil.example/")
        read = "place => fetch(place).then(answer => answer.text()).catch(error => 'refused')"
        assert foreign.evaluate(read, own) == "refused"
        post = "place => fetch(place, {method: 'POST', mode: 'no-cors', body: 'a=b'}).then(a => a.type).catch(() => 'refused')"
        posted = foreign.evaluate(post, own.replace("/before?", "/before/what-if?game=local/0/0&shard=&"))
        assert posted in ("opaque", "refused")
        foreign.close()
        page.reload()
        assert "At work" not in page.locator("main").inner_text()
