"""Writes the pages of docs/ that are made from code: `python -m deploy.site.reference docs`.

Commands come from docstrings and parameters, settings from their classes, the Python API from its modules, views from DuckDB.
tests/test_reference.py fails where a page is not current.
"""

import ast
import inspect
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

from cyclopts import App, Parameter
from pydantic import BaseModel

from deploy.site.views_picture import views_picture
from entente.cli.commands import COMMANDS, command_line
from entente.cli.options import SettingsFlags
from entente.records.rows import Decision, PlayedPhase
from entente.settings.reference import reference
from storage.runs import RunPaths


def commands_page() -> str:
    app = command_line()
    parts = [_head("Commands", "Every command; its `--help` shows the same. `--debug` after any command shows tracebacks.")]
    for heading, names in COMMANDS.items():
        parts.append(f"## {heading}")
        for name in names:
            parts += [_command(words, function) for words, function in leaves(app[name], (name,))]
    return "\n\n".join(parts) + "\n"


def leaves(app: App, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Callable[..., object]]]:
    """Every command that can be run, by its words."""
    if app.default_command is not None and path:
        yield " ".join(path), app.default_command
    for name in app:
        if not name.startswith("-"):
            yield from leaves(app[name], (*path, name))


def _command(words: str, function: Callable[..., object]) -> str:
    about, _, examples = (inspect.getdoc(function) or "").partition("\n\nExample")
    shown = "\n".join(line.strip() for line in examples.splitlines()[1:] if line.strip())
    rows = [row for name, each in inspect.signature(function).parameters.items() for row in _parameters(name, each)]
    table = _table(("", "default", ""), rows)
    return "\n\n".join(part for part in (f"### `entente {words}`", about, table, f"```sh\n{shown}\n```") if part)


def _parameters(name: str, each: inspect.Parameter) -> Iterator[tuple[str, ...]]:
    if each.annotation is SettingsFlags:
        yield "any [setting](settings.md)", "", "As a flag: `--training.learning-rate 1e-3`."
        return
    kinds = get_args(each.annotation)
    rules = [part for part in kinds if isinstance(part, Parameter)]
    names = next((rule.name for rule in rules if rule.name), None) or (f"--{name.replace('_', '-')}",)
    if names == ("*",):  # each field of a model is a flag of its own
        (model,) = (kind for kind in (kinds[0], *get_args(kinds[0])) if inspect.isclass(kind) and issubclass(kind, BaseModel))
        for field, info in model.model_fields.items():
            default = info.get_default(call_default_factory=True)
            yield f"`--{field.replace('_', '-')}`", _default(default), " ".join((info.description or "").split())
        return
    is_flag = each.kind is inspect.Parameter.KEYWORD_ONLY
    shown = ", ".join(f"`{word}`" for word in (names if is_flag else [name.upper()]))
    yield shown, _default(each.default), next((rule.help for rule in rules if rule.help), "")


def _default(value: object) -> str:
    return "" if value in (None, False, "", (), inspect.Parameter.empty) or isinstance(value, BaseModel) else f"`{_shown(value)}`"


def _shown(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple | list) else str(getattr(value, "value", value))


def python_page() -> str:
    import entente
    from entente import bots, losses, notebook, rewards

    about = (
        "What notebooks and packages of your own may import; other modules change without notice. Examples: "
        "[notebook.ipynb](notebook.ipynb), [extending](extending.md). "
        f"`entente.API_VERSION` is {entente.API_VERSION}; it goes up when an older package would no longer work."
    )
    parts = [_head("Python API", about)]
    for module in (notebook, bots, losses, rewards):
        name = "entente" if module is notebook else module.__name__
        public = ["runs", "run", "train", "Run", "Frame"] if module is notebook else module.__all__
        parts += [f"## `{name}`", inspect.getdoc(entente if module is notebook else module) or ""]
        parts += [_object(each, getattr(module, each), module) for each in public]
    return "\n\n".join(parts) + "\n"


def _object(name: str, value: Any, module: ModuleType) -> str:
    if inspect.isclass(value) and issubclass(value, BaseModel):
        return f"### `{name}`\n\n{value.__doc__} Its fields are the [settings `training`](settings.md#training)."
    if inspect.isclass(value):
        rows = [*_fields(value), *_members(value)]
        parts = (f"### `{name}`", _own_doc(value), _table(("", "type", ""), rows))
        return "\n\n".join(part for part in parts if part)
    if inspect.isfunction(value):
        about = re.sub(r"^Args:\n((?:    .*\n?)+)", _arguments, inspect.getdoc(value) or "", flags=re.MULTILINE)
        return f"### `{name}{_signature(value)}`\n\n{about}".strip()
    declared, about = _declaration(name, module)
    return "\n\n".join(part for part in (f"### `{name}`", f"`{declared}`", about) if part)


def _own_doc(cls: type) -> str:
    about = vars(cls).get("__doc__") or ""  # a dataclass without a docstring gets its signature as one
    return "" if about.startswith(f"{cls.__name__}(") else inspect.cleandoc(about)


def _arguments(match: re.Match[str]) -> str:
    return re.sub(r"^    (\w+):", r"- `\1`:", match[1], flags=re.MULTILINE)


def _signature(function: Callable[..., object]) -> str:
    words = str(inspect.signature(function)).replace("(self, ", "(").replace("(self)", "()")
    words = re.sub(r"-> '(\w+)'", r"-> \1", words).replace("'", '"')
    return re.sub(r"\b(?:[a-z_]+\.)+(?=[A-Z])|\bpathlib\._local\.", "", words)


def _declaration(name: str, module: ModuleType) -> tuple[str, str]:
    """The value of a name as it is written where it is defined, and the docstring below it."""
    for each in ast.parse(inspect.getsource(module)).body:
        if isinstance(each, ast.ImportFrom):
            for alias in each.names:
                if (alias.asname or alias.name) == name:
                    module, name = sys.modules[str(each.module)], alias.name
    body = ast.parse(inspect.getsource(module)).body
    for each, below in zip(body, [*body[1:], None], strict=True):
        if isinstance(each, ast.Assign) and isinstance(each.targets[0], ast.Name) and each.targets[0].id == name:
            value = vars(module)[name]
            return repr(value) if isinstance(value, tuple | str) else ast.unparse(each.value), _below(below)
        if isinstance(each, ast.ClassDef) and each.name == name:
            return f"class {name}", ast.get_docstring(each) or ""
    raise LookupError(f"{module.__name__} does not define {name}")


def _below(node: ast.stmt | None) -> str:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return " ".join(str(node.value.value).split())
    return ""


def _fields(cls: type) -> Iterator[tuple[str, ...]]:
    """Annotated fields of a class with the docstring below each; members of an enumeration with their value."""
    (tree,) = ast.parse(inspect.getsource(cls)).body
    body = tree.body if isinstance(tree, ast.ClassDef) else []
    for each, below in zip(body, [*body[1:], None], strict=True):
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name) and not each.target.id.startswith("_"):
            yield f"`{each.target.id}`", f"`{ast.unparse(each.annotation)}`", _below(below)
        elif isinstance(each, ast.Assign) and isinstance(each.targets[0], ast.Name) and each.targets[0].id.isupper():
            yield f"`{each.targets[0].id}`", f"`{ast.unparse(each.value)}`", _below(below)


def _members(cls: type) -> Iterator[tuple[str, ...]]:
    for name, member in vars(cls).items():
        function = member.fget if isinstance(member, property) else member
        if not name.startswith("_") and inspect.isfunction(function):
            call = "" if isinstance(member, property) else _signature(function)
            yield f"`{name}{call}`", "", " ".join((inspect.getdoc(function) or "").split())


def views_page() -> str:
    from storage.run_sql import QUERIES
    from storage.run_views import COLUMNS, VIEWS

    about = "What `entente sql` and `entente.run` query; [DuckDB](duckdb.md) has examples, [data format](data-format.md) files."
    parts = [_head("Views and ready questions", about), "![Views, their columns and join keys](pictures/views.svg)", "## Views"]
    meaning = {name.strip("`"): text for name, _, text in _fields(Decision)} | COLUMNS
    for view, columns in _views().items():
        own = meaning | ({name.strip("`"): text for name, _, text in _fields(PlayedPhase) if text} if view == "phases" else {})
        rows = [(f"`{name}`", f"`{kind}`", own.get(name, "")) for name, kind in columns.items()]
        parts += [f"### `{view}`", f"A row is {VIEWS[view]}.", _table(("column", "type", ""), rows)]
    parts += ["## Ready questions", "`entente sql @NAME` asks one; `entente sql @` lists them."]
    answers = [(f"`@{name}`", text.splitlines()[0].removeprefix("-- ")) for name, text in QUERIES.items()]
    parts += [_table(("name", "answers"), answers), "## Columns of the files"]
    files = {"a shard": Decision, "its phases": PlayedPhase}
    for holder, row in files.items():
        parts += [f"### Of {holder}", _table(("column", "type", ""), [*_fields(row)])]
    return "\n\n".join(parts) + "\n"


def _views() -> dict[str, dict[str, str]]:
    """View -> its columns with their types, as DuckDB says them of a run without rows."""
    from storage.run_sql import connect
    from storage.run_views import VIEWS

    with tempfile.TemporaryDirectory() as folder:
        paths = RunPaths(Path(folder) / "run").create()
        with connect(paths.root) as connection:
            described = {view: connection.sql(f'DESCRIBE "{view}"').fetchall() for view in VIEWS}
    return {view: {name: kind for name, kind, *_ in rows} for view, rows in described.items()}


def picture() -> str:
    return views_picture({view: list(columns) for view, columns in _views().items()})


def _head(title: str, about: str) -> str:
    return f"# {title}\n\n{about} `make reference` writes this page."


def _table(heads: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    if not rows:
        return ""
    used = [place for place in range(len(heads)) if any(row[place] for row in rows)]
    lines = [
        [heads[place] for place in used],
        ["---"] * len(used),
        *([row[place].replace("|", r"\|") for place in used] for row in rows),
    ]
    return "\n".join(f"|{'|'.join(line)}|" for line in lines)


PAGES = {
    "commands.md": commands_page,
    "settings.md": reference,
    "python.md": python_page,
    "views.md": views_page,
    "pictures/views.svg": picture,
}


if __name__ == "__main__":
    for file, page in PAGES.items():
        (Path(sys.argv[1]) / file).write_text(page())
