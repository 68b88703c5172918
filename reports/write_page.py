"""Begins every page of this program: one HTML file without network access or other files, from a template beside its code."""

from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template

from telemetry.errors import InputError

_HERE = Path(__file__).parent
"""Styles, and what pages have in common."""


def page_template(name: str, folder: Path = _HERE) -> Template:
    """The template of a page; what it includes may also be in this folder."""
    loader = FileSystemLoader([folder, _HERE])
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.get_template(name)


def check_folder(file: Path, what: str = "page") -> None:
    """Check that there is a folder for the page, before it is made.

    Raises:
        InputError: there is none.
    """
    if not file.parent.is_dir():
        raise InputError(f"there is no folder '{file.parent}' to write the {what} to: make it, or name another with --output")
