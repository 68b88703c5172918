"""Makes two_steps.tar.xz, the run of the fixture `stored_run`, again: where the schema of rows changed.

.venv/bin/python -m tests.stored_runs.make
"""

import io
import json
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

from tests.conftest import STORED_SETTINGS

_LEFT_OUT = {"_state_cache", "before/base.json", "before/settings.json", "trainer.log", "devices.jsonl", ".lock", ".trainer.lock"}
"""The fixture writes the settings; the others say where and when the run was made."""


def _toml(settings: dict[str, Any]) -> str:
    tables = {name: value for name, value in settings.items() if isinstance(value, dict)}
    lines = [f"{name} = {json.dumps(value)}" for name, value in settings.items() if name not in tables]
    return "\n".join([*lines, *(f"[{name}]\n{_toml(table)}" for name, table in tables.items())])


def _content(file: Path, root: Path) -> bytes:
    """Of a file, without the machine's kernel and the place of the runs."""
    if file.name == "environment.json":
        return json.dumps(json.loads(file.read_text()) | {"platform": "Linux-x86_64"}, indent=1).encode()
    return file.read_bytes().replace(str(root).encode(), b"runs") if file.suffix == ".json" else file.read_bytes()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        root, config = Path(folder) / "stored", Path(folder) / "settings.toml"
        config.write_text(_toml(STORED_SETTINGS))
        command = ["train", "--config", str(config), "--runs-root", str(root)]
        subprocess.run([sys.executable, "-m", "entente.cli.main", *command], check=True)
        with tarfile.open(Path(__file__).with_name("two_steps.tar.xz"), "w:xz") as archive:
            for file in sorted(root.rglob("*")):
                place = file.relative_to(root)
                ledger_copy = "checkpoints" in place.parts and file.suffix == ".arrow"
                if file.is_file() and not ledger_copy and not {place.as_posix(), *place.parts} & _LEFT_OUT:
                    content = _content(file, root)
                    entry = tarfile.TarInfo(place.as_posix())
                    entry.size = len(content)
                    archive.addfile(entry, io.BytesIO(content))


if __name__ == "__main__":
    main()
