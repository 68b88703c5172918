"""docs/data-format.md tells every column and every view as they are, and its snippet reads a shard without Entente."""

import ast
import random
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from storage import schema
from storage.asking import VIEWS
from storage.runs import RunPaths
from storage.shards import publish_shard
from tests.storage.make_rows import make_decision

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "data-format.md").read_text()


def told(mark: str) -> list[tuple[str, str]]:
    """Column and what it holds, of the table between two marks."""
    (inner,) = re.findall(rf"<!-- {mark} -->\n(.*?)<!-- /{mark} -->", PAGE, re.DOTALL)
    cells = [line.strip()[2:-2].split(" | ", 2) for line in inner.strip().splitlines()[2:]]
    return [(column.strip("`"), holds.replace(r"\|", "|")) for column, _, holds in cells]


@pytest.mark.parametrize(("mark", "row"), [("decisions", "Decision"), ("plies", "Ply")])
def test_every_column_is_told_with_the_words_of_its_class(mark: str, row: str):
    tree = ast.parse(Path(schema.__file__).read_text())
    (body,) = [node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == row]
    said = [
        (field.target.id, ast.literal_eval(words.value))
        for field, words in pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(words, ast.Expr)
    ]
    assert told(mark) == said


def test_every_view_is_told():
    views = PAGE[PAGE.index("## Views") :]
    assert sorted(re.findall(r"^\| `(\w+)` \|", views, re.MULTILINE)) == sorted(VIEWS)


def test_the_snippet_reads_a_shard_with_arrow_alone(tmp_path: Path):
    paths = RunPaths(tmp_path / "runs" / "mine").create()
    publish_shard(paths, "local", 0, [make_decision(random.Random(0), start_group=0)], [], {}, next_start_group=1)
    (snippet,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    done = subprocess.run([sys.executable, "-P", "-c", snippet], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"b'{schema.SCHEMA_VERSION}' 1 ")
