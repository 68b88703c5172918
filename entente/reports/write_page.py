"""Builds every page from a template over `base.html.jinja`: one HTML file without network access or other files, or a live one.

Whatever comes from a file of a run is text: templates escape it, and `text` shortens it and shows control characters."""

import shlex
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template

from entente.telemetry.errors import InputError
from entente.telemetry.progress import shorten
from storage.files import durable_write, write_output

_HERE = Path(__file__).parent
LONGEST_CELL, LONGEST_TEXT = 300, 20_000
"""Characters of a table's cell, and of a prompt or thought."""
Link = Callable[..., str]
"""Address of a live page by its kind and arguments."""


@lru_cache
def _environment(folder: Path) -> Environment:
    loader = FileSystemLoader([folder, _HERE])
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["cell"] = lambda text: shorten(str(text), LONGEST_CELL)
    environment.filters["text"] = lambda text: shorten(str(text), LONGEST_TEXT, keep="\n\t")
    environment.filters["per_cent"] = per_cent
    return environment


def page_template(name: str, folder: Path = _HERE) -> Template:
    return _environment(folder).get_template(name)


def part(name: str, values: Any) -> str:
    """A part of a run's page, by its macro."""
    return str(getattr(page_template("run_parts.html.jinja").module, name)(values))


def per_cent(share: float) -> str:
    if share < 1e-4:
        return "< 0.01 %"
    digits = 0 if share >= 0.1 else 1 if share >= 0.01 else 2
    return f"{100 * share:.{digits}f} %"


def write_page(output: Path | None, default: Path, html: str, what: str = "page") -> Path:
    """Write to the file that a user names, else to `default` in a run's folder; returns which."""
    file = output or default
    if not file.parent.is_dir():
        raise InputError(f"there is no folder '{file.parent}' to write the {what} to: make it, or name another with --output")
    # In the folder of a copied run a link may name any file, and a pipe would wait for a reader.
    (write_output if output else durable_write)(file, html.encode())
    return file


def root_flag(runs_root: Path) -> str:
    return "" if runs_root == Path("runs") else f" --runs-root {shlex.quote(str(runs_root))}"


def of_run(name: str, runs_root: Path) -> str:
    return f"--run {shlex.quote(name)}{root_flag(runs_root)}"
