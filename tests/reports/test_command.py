"""Claims about `entente report`: where the page goes, what it says of what cannot be, and that a browser shows it all."""

import re
from pathlib import Path
from typing import Any

import pytest

from storage.runs import RunPaths
from tests.conftest import Entente, overheard


def test_the_page_lies_in_the_run_s_folder_and_pictures_where_they_are_wanted(
    workplace: Entente, trained: tuple[dict[str, Any], RunPaths, object], tmp_path: Path
):
    done = workplace("report", "--run", "first", "--pictures", str(tmp_path))
    page = trained[1].root / "report.html"
    assert done.returncode == 0, done.stderr
    pictures = [tmp_path / name for name in ("curve.svg", "board.svg")]
    assert done.stdout.splitlines() == ["runs/first/report.html", *map(str, pictures)]
    assert page.stat().st_size < 3e6
    assert all(picture.stat().st_size < 150e3 for picture in pictures)
    elsewhere = workplace("report", "--run", "first", "--output", str(tmp_path / "mine.html"))
    assert elsewhere.returncode == 0 and (tmp_path / "mine.html").read_text() == page.read_text()


_CONTRAST = """() => {
    const parts = colour => colour.match(/[\\d.]+/g).slice(0, 3).map(Number);
    const light = colour => parts(colour).map(v => v / 255).map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
        .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
    const style = getComputedStyle(document.body);
    const [a, b] = [light(style.color), light(style.backgroundColor)].sort((x, y) => y - x);
    return (a + 0.05) / (b + 0.05);
}"""
_SIZES = """() => [...document.querySelectorAll('img, figure svg')].map(e => {
    const box = e.getBoundingClientRect();
    return [box.width, box.height, e.tagName === 'IMG' ? e.naturalWidth : box.width];
})"""


@pytest.mark.browser
@pytest.mark.system
@pytest.mark.parametrize(("scheme", "width"), [("light", 1200), ("dark", 320)])
def test_a_browser_shows_every_picture_without_network_or_complaint(
    browser: Any, workplace: Entente, trained: tuple[dict[str, Any], RunPaths, object], scheme: str, width: int
):
    file = trained[1].root / "report.html"
    if not file.exists():
        assert workplace("report", "--run", "first").returncode == 0
    page = browser.new_page(color_scheme=scheme, viewport={"width": width, "height": 900})
    complaints, requests = overheard(page)
    page.goto(file.resolve().as_uri(), wait_until="load")
    sizes, contrast = page.evaluate(_SIZES), page.evaluate(_CONTRAST)
    overflow = page.evaluate("document.scrollingElement.scrollWidth")
    page.emulate_media(media="print")
    printed = page.evaluate("getComputedStyle(document.body).backgroundColor"), page.evaluate(_CONTRAST)
    page.close()
    assert [url for url in requests if not re.match(r"data:image/svg\+xml;base64,", url)] == [file.resolve().as_uri()]
    assert complaints == []
    assert len(sizes) >= 14 and all(min(size) > 40 for size in sizes), "a picture that cannot be drawn has about 20"
    assert contrast > 7
    assert overflow <= width
    assert printed[0] == "rgb(255, 255, 255)" and printed[1] > 7
