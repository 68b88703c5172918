"""The key of the server on this machine: made once, read by its owner alone, sent to this machine alone."""

import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from entente.cli.server_key import key_file, send_key, want_key
from entente.telemetry.errors import InputError

SENT, WANTED = "PREFECT_API_AUTH_STRING", "PREFECT_SERVER_API_AUTH_STRING"


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path / "home"))
    for name in (SENT, WANTED):
        monkeypatch.setenv(name, "")  # so that it is put back after the test
        monkeypatch.delenv(name)
    return tmp_path / "home"


def test_a_key_is_made_once_for_its_owner_alone_from_its_first_byte_on(home: Path, monkeypatch: pytest.MonkeyPatch):
    seen: list[int] = []
    real = Path.write_text

    def written(file: Path, text: str) -> int:
        seen.append(stat.S_IMODE(file.stat().st_mode))
        return real(file, text)

    monkeypatch.setattr(Path, "write_text", written)
    before = os.umask(0)
    try:
        key = want_key()
    finally:
        os.umask(before)
    assert seen == [0o600] and stat.S_IMODE(key_file().stat().st_mode) == 0o600
    user, secret = key.split(":")
    assert user == "entente" and len(secret) >= 32
    assert os.environ[SENT] == os.environ[WANTED] == key == key_file().read_text().strip()
    assert [path.name for path in home.iterdir()] == ["key"]
    for name in (SENT, WANTED):
        monkeypatch.delenv(name)
    assert want_key() == key


def test_commands_that_begin_at_once_agree_on_one_key(monkeypatch: pytest.MonkeyPatch):
    with ThreadPoolExecutor(8) as pool:
        keys = set(pool.map(lambda _: want_key(), range(8)))
    assert keys == {key_file().read_text().strip()}
    assert [path.name for path in key_file().parent.iterdir()] == ["key"]


def test_the_key_goes_to_this_machine_alone(monkeypatch: pytest.MonkeyPatch):
    key = want_key()
    for address, sent in [
        ("http://server.internal:4200/api", None),
        ("https://127.0.0.1.example.org/api", None),
        ("http://127.0.0.1:4200/api", key),
        ("http://localhost:4300/api", key),
        ("http://[::1]:4300/api", key),
    ]:
        monkeypatch.delenv(SENT, raising=False)
        monkeypatch.delenv(WANTED, raising=False)
        send_key(address)
        assert os.environ.get(SENT) == sent, address


def test_what_the_user_set_stands(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(WANTED, "me:mine")
    assert want_key() == "me:mine" and os.environ[SENT] == "me:mine"
    assert not key_file().exists()


def test_a_key_that_others_can_read_is_refused():
    want_key()
    key_file().chmod(0o640)
    for name in (SENT, WANTED):
        os.environ.pop(name)
    with pytest.raises(InputError, match="others can read the server's key"):
        send_key("http://127.0.0.1:4200/api")
