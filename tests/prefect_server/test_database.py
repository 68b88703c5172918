"""A database that Prefect's server could not use is one sentence with its cure before a server starts; the doctor says it."""

import json
import os
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from entente.prefect_server import database as prefect_database
from entente.prefect_server.database import check_database, check_room, database_file
from entente.prefect_server.own_server import _start
from entente.telemetry.errors import DiskFullError, InputError


def with_revision(revision: str) -> Callable[[Path], None]:
    """Writes a database of this revision, as large as one that was used."""

    def write(file: Path) -> None:
        with closing(sqlite3.connect(file)) as database, database:
            database.execute("CREATE TABLE alembic_version (version_num VARCHAR(32))")
            database.execute("INSERT INTO alembic_version VALUES (?)", (revision,))
            database.execute("CREATE TABLE log (message TEXT)")
            database.executemany("INSERT INTO log VALUES (?)", [("x" * 200,)] * 2000)

    return write


def torn(file: Path) -> None:
    """Writes a database whose middle was lost."""
    with_revision(KNOWN)(file)
    content = bytearray(file.read_bytes())
    content[len(content) // 2 :] = bytes(len(content) - len(content) // 2)
    file.write_bytes(content)


KNOWN = "79e7a60e43d8"
CANNOT_BE_USED = [
    pytest.param(with_revision("ffffffffffff"), "newer release", id="of a newer release"),
    pytest.param(lambda file: file.write_bytes(b"no database at all" * 99), "damaged", id="something else"),
    pytest.param(torn, "damaged", id="half of it lost"),
]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in [name for name in os.environ if name.startswith("PREFECT_")]:
        monkeypatch.delenv(name)
    (tmp_path / ".prefect").mkdir()
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path / ".prefect"))
    return tmp_path / ".prefect"


@pytest.mark.parametrize(("write", "what"), CANNOT_BE_USED)
def test_a_database_that_cannot_be_used_is_named_before_a_server_starts(
    home: Path, entente, write: Callable[[Path], None], what: str
):
    write(home / "prefect.db")
    content = (home / "prefect.db").read_bytes()
    with pytest.raises(InputError, match=what):
        _start(home / "server.log", 0)
    (home.parent / "prefect.yaml").write_text("deployments: [{work_pool: {name: local}}]")
    done = entente("up", "--port", "1")
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done
    assert what in done.stderr and f"mv '{home / 'prefect.db'}'" in done.stderr and "own folders" in done.stderr
    found = json.loads(entente("doctor", "--json").stdout)
    assert {each["name"] for each in found["checks"] if each["state"] == "problem"} == {"Prefect"}
    assert (home / "prefect.db").read_bytes() == content and not (home / "server.log").exists()


@pytest.mark.parametrize("write", [with_revision(KNOWN), Path.touch, lambda file: None], ids=["sound", "empty", "absent"])
def test_a_sound_or_new_database_is_taken(home: Path, write: Callable[[Path], None]):
    write(home / "prefect.db")
    check_database()


def test_one_that_a_server_writes_to_is_taken(home: Path):
    with_revision(KNOWN)(home / "prefect.db")
    with closing(sqlite3.connect(home / "prefect.db", isolation_level=None)) as server:
        server.execute("PRAGMA journal_mode = WAL")
        server.execute("BEGIN EXCLUSIVE")
        check_database()


@pytest.mark.parametrize(
    ("url", "file"),
    [
        ("sqlite+aiosqlite:////srv/prefect.db?timeout=60", "/srv/prefect.db"),
        ("sqlite+aiosqlite:///:memory:", None),
        ("postgresql+asyncpg://prefect:secret@db/prefect", None),
    ],
)
def test_the_database_that_the_user_names_is_the_one(home: Path, monkeypatch: pytest.MonkeyPatch, url: str, file: str | None):
    for name in ("PREFECT_API_DATABASE_CONNECTION_URL", "PREFECT_SERVER_DATABASE_CONNECTION_URL"):
        with monkeypatch.context() as patch:
            patch.setenv(name, url)
            assert database_file() == (Path(file) if file else None)
    assert database_file() == home / "prefect.db"


def test_a_full_disk_is_one_that_takes_no_byte(home: Path, monkeypatch: pytest.MonkeyPatch):
    (home / "prefect.db").touch()
    monkeypatch.setattr(prefect_database, "_SCARCE", 2**80)
    check_room()  # little is free, by the figure, and still a file can be written
    with Path("/dev/full").open("wb", buffering=0) as full:
        monkeypatch.setattr(prefect_database.tempfile, "TemporaryFile", lambda **_: full)
        with pytest.raises(DiskFullError, match=r"prefect\.db.*make room"):
            check_room()


def test_an_address_without_api_is_told_from_one_where_nothing_answers(prefect_server: str, monkeypatch: pytest.MonkeyPatch):
    from entente.prefect_server.own_server import check_address

    check_address(prefect_server)
    for odd in (prefect_server.removesuffix("/api"), f"{prefect_server}/", prefect_server.replace("/api", "/dashboard")):
        with pytest.raises(InputError, match=f"set PREFECT_API_URL to {prefect_server}$"):
            check_address(odd)
    for nowhere in ("http://127.0.0.1:9/api", "127.0.0.1:4200", "localhost:4200/api", "http://127.0.0.1:port/api"):
        with pytest.raises(InputError, match="no Prefect server answers at"):
            check_address(nowhere)
