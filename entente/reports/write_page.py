"""Builds every page: one HTML file without network access or other files, from a template over `base.html.jinja`."""

import shlex
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template

from entente.telemetry.errors import InputError
from storage.files import durable_write

_HERE = Path(__file__).parent


def page_template(name: str, folder: Path = _HERE) -> Template:
    loader = FileSystemLoader([folder, _HERE])
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.get_template(name)


def write_page(file: Path, html: str, what: str = "page") -> None:
    if not file.parent.is_dir():
        raise InputError(f"there is no folder '{file.parent}' to write the {what} to: make it, or name another with --output")
    durable_write(file, html.encode())


def root_flag(runs_root: Path) -> str:
    return "" if runs_root == Path("runs") else f" --runs-root {shlex.quote(str(runs_root))}"


def of_run(name: str, runs_root: Path) -> str:
    return f"--run {shlex.quote(name)}{root_flag(runs_root)}"
