"""The generated pages of docs/ are current, and hold every command, view and public name."""

from collections.abc import Callable
from dataclasses import fields

import pytest

from deploy.site.reference import PAGES, commands_page, python_page, views_page
from entente.cli.commands import COMMANDS
from entente.cli.settings import FIRST_SETTINGS
from entente.records.rows import Decision, PlayedPhase
from entente.settings.reference import FIRST_EIGHT
from storage.run_sql import QUERIES
from storage.run_views import COLUMNS, VIEWS
from tests.cli.test_commands import LEAVES
from tests.command import ROOT


@pytest.mark.parametrize(("page", "write"), PAGES.items(), ids=PAGES)
def test_a_generated_page_is_what_the_code_says(page: str, write: Callable[[], str]):
    assert (ROOT / "docs" / page).read_text() == write(), "write it anew: make reference"


def test_every_command_has_its_options_and_an_example():
    page = commands_page()
    assert len(LEAVES) > 25 and [words for words in LEAVES if f"### `entente {words}`\n" not in page] == []
    assert [heading for heading in COMMANDS if f"## {heading}\n" not in page] == []
    assert "|`--lr-schedule`|" in page


def test_every_public_name_of_the_python_api_is_there():
    from entente import bots, losses, rewards

    page = python_page()
    names = [name for module in (bots, losses, rewards) for name in module.__all__]
    assert len(names) > 12 and [name for name in names if f"### `{name}" not in page] == []
    assert '`replay(game: str = "latest") -> Frame`' in page


def test_every_view_and_ready_question_is_there_and_no_column_is_told_that_no_view_has():
    page = views_page()
    assert [name for name in VIEWS if f"### `{name}`" not in page] + [
        name for name in QUERIES if f"|`@{name}`|" not in page
    ] == []
    assert [name for name in COLUMNS if f"|`{name}`|" not in page] == []
    files = page[page.index("## Columns of the files") :]
    names = [each.name for row in (Decision, PlayedPhase) for each in fields(row)]
    assert len(names) > 40 and [name for name in names if f"|`{name}`|" not in files] == []


def test_the_eight_settings_to_turn_first_are_among_those_of_the_help():
    assert len(FIRST_EIGHT) == 8 and set(FIRST_EIGHT) <= set(FIRST_SETTINGS)
