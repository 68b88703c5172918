"""Claims about what is written for people: it names what exists, and what it tells to type works.

README.md, docs/, the help of the commands and prefect.yaml are read as data and held against the code: a file, a
setting, a command or a flow that is renamed leaves none of them behind.
"""

import ast
import importlib
import re
import shlex
import subprocess
import tomllib
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

from entente.cli.commands import command_line
from entente.settings.layers import layered_settings
from entente.settings.run_settings import RunSettings
from entente.telemetry.metrics import METRICS
from storage.run_sql import ask, connect, ready_query
from storage.runs import RunPaths
from tests.cli.test_commands import LEAVES

ROOT = Path(__file__).resolve().parent.parent
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text()
OPERATIONS = (ROOT / "docs" / "operations.md").read_text()
DATA_FORMAT = (ROOT / "docs" / "data-format.md").read_text()
PAGES = {
    str(file.relative_to(ROOT)): file.read_text()
    for file in [*map(ROOT.joinpath, ("README.md", "CONTRIBUTING.md", "SECURITY.md")), *sorted((ROOT / "docs").glob("*.md"))]
}
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES = PYPROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
DEPLOYMENTS = yaml.safe_load((ROOT / "prefect.yaml").read_text())["deployments"]

# Top-level names that a newcomer need not be told of.
UNTOLD = {".dockerignore", ".gitattributes", ".gitignore", ".pre-commit-config.yaml"}


def blocks(page: str, language: str) -> list[str]:
    """Fenced blocks of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)


def between(page: str, mark: str) -> str:
    """What stands between `<!-- mark -->` and `<!-- /mark -->`, without its fence."""
    (inner,) = re.findall(rf"<!-- {mark} -->\n(.*?)<!-- /{mark} -->", page, re.DOTALL)
    return re.sub(r"^```\n|^```$", "", inner, flags=re.MULTILINE)


def spans(page: str) -> list[str]:
    """Inline code outside of fenced blocks."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```$", "", page, flags=re.DOTALL | re.MULTILINE))


def help_lines() -> Iterator[str]:
    """Every line of every docstring of the commands."""
    for file in sorted((ROOT / "entente" / "cli").glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef):
                yield from (ast.get_docstring(node) or "").splitlines()


def whole_lines(block: str) -> Iterator[str]:
    """Lines of a shell block. One that ends with an opening quote goes on until the line that ends with the closing one."""
    begun = ""
    for line in block.splitlines():
        begun = f"{begun} {line.strip()}" if begun else line
        if not begun.endswith(" '") and (begun == line or line.endswith("'")):
            yield begun
            begun = ""
    assert not begun, f"an open quote: {begun}"


def entente_commands() -> list[list[str]]:
    """All `entente ...` lines that someone may type, as words, each once: of the pages' shell blocks, and of the help."""
    found: dict[tuple[str, ...], None] = {}
    for line in [
        *(line for page in PAGES.values() for block in blocks(page, "sh") for line in whole_lines(block)),
        *help_lines(),
    ]:
        nested = re.findall(r"\$\((entente [^)]*)\)", line)
        # What follows a wide gap or a # is a remark.
        for command in [re.split(r"\s+# |\s{3,}", line.strip())[0], *nested]:
            if typed := re.fullmatch(r"(?:[A-Z_]+=\S+ )*entente (.*)", command):
                words = shlex.split(typed[1])
                found[tuple(words[: words.index(">")] if ">" in words else words)] = None
    return list(map(list, found))


COMMANDS = entente_commands()


def project_files() -> list[str]:
    """What git keeps, or would keep, relative to the root."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("this copy of the project is no git checkout")
    return [name for name in listed.stdout.splitlines() if (ROOT / name).is_file()]


def test_the_tree_that_contributors_are_told_is_the_tree_on_disk():
    told = [line.split()[0] for line in between(PAGES["CONTRIBUTING.md"], "tree").splitlines() if line.strip()]
    files = [Path(name) for name in project_files()]
    on_disk = {path.parts[0] + "/" * (len(path.parts) > 1) for path in files} - UNTOLD
    assert len(told) > 20 and sorted(told) == sorted(on_disk)


def test_the_site_has_every_page():
    site = (ROOT / "mkdocs.yml").read_text()
    nav = re.findall(r"^ +- (\S+\.md)$", site[site.index("\nnav:") :], re.MULTILINE)
    pages = {file.name for file in (ROOT / "docs").glob("*.md")}
    assert len(pages) > 15 and len(nav) == len(set(nav)) and pages - set(nav) == set()
    assert [page for page in nav if page not in pages and page not in (ROOT / "deploy" / "site" / "hooks.py").read_text()] == []


def test_every_picture_is_shown_and_small():
    shown = {Path(link).name for page in PAGES.values() for link in re.findall(r"!\[[^\]]+\]\(([^)]+)\)", page)}
    sizes = {file.name: file.stat().st_size for file in (ROOT / "docs" / "pictures").iterdir()}
    assert len(sizes) > 10 and sorted(shown) == sorted(sizes) and [name for name in sizes if sizes[name] > 150_000] == []


def test_the_floors_of_the_architecture_page_are_those_that_the_tool_holds():
    (layers,) = [contract["layers"] for contract in PYPROJECT["tool"]["importlinter"]["contracts"] if contract["id"] == "layers"]
    held = [{package.strip().removeprefix("entente.") for package in layer.split("|")} for layer in layers[1:]]
    shown = [re.split(r"\s{2,}", line)[0].split(" | ") for line in blocks(ARCHITECTURE, "")[0].splitlines()[1:]]
    assert [{package.removesuffix("/") for package in layer} for layer in shown] == held


def test_a_command_that_is_shown_can_be_typed_and_one_that_is_named_exists():
    named = [span.split()[1:] for page in PAGES.values() for span in spans(page) if re.match(r"entente \w", span)]
    assert len(COMMANDS) > 60 and len(named) > 30
    for words in COMMANDS:
        command, _, _ = command_line().parse_args(words, exit_on_error=False, print_error=False)
        assert command in LEAVES.values(), words
    for words in named:
        chain, _, rest = command_line().parse_commands(words)
        assert chain, f"entente {' '.join(words)}"
        if rest and not rest[0].startswith("-"):  # an argument of the command, or a command that does not exist
            command_line().parse_args(words, exit_on_error=False, print_error=False)


def test_sql_that_is_shown_fits_the_views(tmp_path: Path):
    RunPaths(tmp_path).create()
    queries = [words for words in COMMANDS if words[0] == "sql"]
    assert len(queries) > 5
    for words in queries:
        query = next(word for word in words[1:] if " " in word or word.startswith("@"))
        with connect(tmp_path) as connection:
            if query.startswith("@"):
                query = ready_query(query[1:])
            assert ask(connection, query).num_rows == 0, words


@pytest.mark.parametrize("block", [block for page in PAGES.values() for block in blocks(page, "toml")])
def test_settings_that_are_shown_are_accepted(block: str, tmp_path: Path):
    file = tmp_path / "mine.toml"
    file.write_text(block)
    assert layered_settings("laptop", [file]) != layered_settings("laptop")


def test_settings_that_are_named_exist():
    rooms = {name: field.annotation for name, field in RunSettings.model_fields.items()}
    found = [match for page in PAGES.values() for span in spans(page) if (match := re.fullmatch(r"(\w+)\.(\w+)", span))]
    named = [
        (match[0], room.model_fields, match[2])
        for match in found
        if isinstance(room := rooms.get(match[1]), type) and issubclass(room, BaseModel) and match[2] not in ("py", "jsonl")
    ]
    assert len(named) > 40 and [name for name, fields, field in named if field not in fields] == []


def test_make_targets_that_are_named_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {name for page in PAGES.values() for name in re.findall(r"`(?:[A-Z]+=\S+ )?make ([\w-]+)", page)}
    assert len(named) > 5 and named <= targets


def test_files_and_metrics_that_are_named_exist():
    named = [span for page in PAGES.values() for span in spans(page)]
    files = [span for span in named if re.fullmatch(r"[\w.*-]+/[\w./*-]+\.(py|sql|md|toml|yaml|lock)", span)]
    assert len(files) > 100 and [file for file in files if not list(ROOT.glob(file))] == []
    links = [(page, link) for page, text in PAGES.items() for link in re.findall(r"\]\(([^)#]+)", text) if "://" not in link]
    assert len(links) > 50 and [(page, link) for page, link in links if not ((ROOT / page).parent / link).exists()] == []
    rooms = {name.split("/")[0] for name in METRICS}
    metrics = {span for span in named if re.fullmatch(rf"({'|'.join(rooms)})/\w+", span)}
    assert len(metrics) > 10 and metrics - set(METRICS) == set()


def other_commands() -> list[str]:
    """Lines of the operations page's shell blocks that are no `entente`, without the variables before them."""
    shown = [line for block in blocks(OPERATIONS, "sh") for line in block.splitlines()]
    lines = [line for line in shown if not re.match(r"([A-Z_]+=\S+ )*entente ", line)]
    return [re.sub(r'^([A-Z_]+=("[^"]*"|\S+) )+', "", line) for line in lines]


def test_the_operations_page_shows_no_command_that_is_not_there():
    from prefect.cli._app import _app

    assert len(other_commands()) > 10
    for line in other_commands():
        tool, *words = shlex.split(line)
        if tool == "make":
            assert re.search(rf"^{words[0]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), line
        elif tool == "python":
            assert (ROOT / words[0]).is_file(), line
        elif tool == "torchrun":
            from torch.distributed.run import get_args_parser

            given = get_args_parser().parse_args(words)
            assert given.module and given.training_script == "entente.training.process", line
        elif tool == "buildah":
            assert words[-1] == "." and (ROOT / "Containerfile").is_file(), line
        elif tool == "kubectl":
            files = [word for before, word in pairwise(words) if before == "--filename"]
            assert [file for file in files if not (ROOT / file).exists()] == [], line
        elif tool == "dask":
            importlib.import_module(f"distributed.cli.dask_{words[0]}").main.make_context(line, words[1:])
        else:
            assert tool == "prefect", line
            _app.parse_args(words, exit_on_error=False, print_error=False)


def pinning_tests(page: str) -> set[tuple[str, str]]:
    """File and name of every test that a page says pins something."""
    return set(re.findall(r"(tests/[\w/]+\.py)::(\w+)", page))


@pytest.mark.parametrize("page", ["docs/training.md", "SECURITY.md"])
def test_every_test_that_is_said_to_pin_a_formula_or_a_boundary_is_there(page: str):
    named = pinning_tests(PAGES[page])
    defined = {
        (str(file.relative_to(ROOT)), node.name)
        for file in (ROOT / "tests").rglob("test_*.py")
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.FunctionDef)
    }
    assert len(named) > 15 and sorted(named - defined) == []


def test_the_refusals_under_troubleshooting_are_sentences_of_the_code():
    rows = re.findall(r"^\| (`.+?) \|", PAGES["docs/troubleshooting.md"], re.MULTILINE)
    fragments = [part.strip() for row in rows for span in spans(row) for part in span.split("…")]
    texts = [(ROOT / "deploy" / "setup-environment").read_text()]
    for package in PACKAGES:
        for file in (ROOT / package).rglob("*.py"):
            nodes = ast.walk(ast.parse(file.read_text()))
            texts += [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    assert len(rows) == 15 and [part for part in fragments if not any(part in text for text in texts)] == []


def test_the_prompt_that_is_shown_is_the_one_that_the_code_writes():
    from entente.game.board import Board
    from entente.game.prompts import board_text, power_text, rules_text

    board = Board.start()
    france = board.legal_orders()["FRANCE"]
    assert between(ARCHITECTURE, "prompt") == rules_text() + board_text(board, "FRANCE") + power_text(france, board)
    assert f"({france.count()} sets above)" in ARCHITECTURE


def test_the_data_format_page_lists_every_folder_and_file_of_a_run():
    run = RunPaths(Path("runs/mine"))
    paths = [value.name for name in dir(run) if isinstance(value := getattr(run, name), Path) and value != run.root]
    assert len(paths) > 20 and [path for path in paths if not re.search(rf"`{re.escape(path)}[`/]", DATA_FORMAT)] == []


def resolved(deployment: dict[str, Any]) -> dict[str, Any]:
    """A deployment as `prefect deploy` makes it: its build steps are run, and their outputs stand in its values."""
    from prefect.utilities.templating import apply_values

    outputs: dict[str, Any] = {}
    for step in deployment.get("build", []):
        ((name, inputs),) = step.items()
        module, _, function = name.rpartition(".")
        outputs |= getattr(importlib.import_module(module), function)(**inputs)
    return apply_values(deployment, outputs)


@pytest.mark.parametrize("deployment", DEPLOYMENTS, ids=lambda deployment: deployment["entrypoint"])
def test_a_deployment_starts_a_flow_of_that_name_with_parameters_it_takes(deployment: dict[str, Any]):
    from prefect import Flow
    from prefect.cli.deploy._models import DeploymentConfig

    file, function = deployment["entrypoint"].split(":")
    flow = getattr(importlib.import_module(file.removesuffix(".py").replace("/", ".")), function)
    assert isinstance(flow, Flow)
    stem = Path(file).stem
    assert flow.name == stem.replace("_", "-")
    assert set(deployment) <= set(DeploymentConfig.model_fields), "Prefect drops what it does not know without a word"
    whoever_starts_it_gives = {"run": "mine"} if "run" in flow.parameters.required else {}
    assert flow.validate_parameters(resolved(deployment)["parameters"] | whoever_starts_it_gives)
    assert deployment["work_pool"]["name"] == "local"
    assert deployment["description"] and deployment["tags"]


def test_each_flow_is_deployed_once_under_the_name_that_prefect_yaml_tells():
    flows = {file.stem for file in (ROOT / "flows").glob("*.py") if "@flow(" in file.read_text()}
    assert sorted(Path(deployment["entrypoint"].split(":")[0]).stem for deployment in DEPLOYMENTS) == sorted(flows)
    stems = ((Path(d["entrypoint"].split(":")[0]).stem.replace("_", "-"), d["name"]) for d in DEPLOYMENTS)
    names = {f"{stem}/{name}" for stem, name in stems}
    flow = "|".join(name.split("/")[0] for name in names)
    files = [ROOT / "prefect.yaml", *(ROOT / page for page in PAGES)]
    assert {name for file in files for name in re.findall(rf"\b(?:{flow})/[a-z][a-z-]*", file.read_text())} == names
    assert len({deployment["name"] for deployment in DEPLOYMENTS}) == len(DEPLOYMENTS), "each is told from the others by its name"


def test_no_file_names_a_folder_of_somebody_s_machine():
    homes = re.compile(r"(?<![\w.])/(work|root|home|Users|mnt)/")
    found, read = [], 0
    for name in project_files():
        try:
            lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError:
            continue
        read += len(lines)
        found += [f"{name}:{number}: {line.strip()[:80]}" for number, line in enumerate(lines, start=1) if homes.search(line)]
    assert read > 10_000 and found == []


def test_every_metric_that_the_code_names_is_registered():
    groups = "|".join(sorted({name.split("/")[0] for name in METRICS}))
    named = {
        node.value: f"{file.relative_to(ROOT)}:{node.lineno}"
        for package in PACKAGES
        for file in (ROOT / package).rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch(rf"({groups})/\w*[a-z0-9]", node.value)
    }
    assert len(named) > 80, "the metrics are no longer written as literals, so this test sees nothing"
    assert {name: where for name, where in named.items() if name not in METRICS} == {}
