"""Requests to an object store: what a lost answer, a cut body and a store that is away come to."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from storage import objects as module
from storage.objects import Objects
from telemetry.errors import InputError, StoreAwayError
from tests.storage.object_store import BUCKET, Proxy, environment


@pytest.fixture
def proxy(object_store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    with Proxy(upstream=object_store).serving() as made:
        for name, value in environment(made.address, tmp_path / "cache").items():
            monkeypatch.setenv(name, value)
        monkeypatch.delenv("AWS_ENDPOINT_URL_S3", raising=False)
        yield made


@pytest.fixture
def objects(proxy: Proxy) -> Objects:
    return Objects(BUCKET, answered=True)


def content(objects: Objects, key: str) -> bytes:
    found = objects.read(key)
    assert found is not None
    return found[0]


def test_a_key_is_created_once(objects: Objects) -> None:
    assert objects.create("once/a", b"first") and objects.create("once/a", b"first") is None
    assert content(objects, "once/a") == b"first"


def test_a_create_whose_answer_was_lost_is_our_own(proxy: Proxy, objects: Objects) -> None:
    proxy.fault("PUT", "lost/a", drop=True)
    etag = objects.create("lost/a", b"mine")
    found = objects.head("lost/a")
    assert found is not None and etag == found.etag
    assert [method for method, _ in proxy.requests] == ["PUT", "PUT", "HEAD", "HEAD"]


def test_a_create_that_another_won_while_its_answer_was_lost_is_not_our_own(proxy: Proxy, objects: Objects) -> None:
    # The first try fails before the store has it, and the second finds the other's object with equal bytes.
    proxy.fault("PUT", "lost/b", status=503, before=lambda: Objects(BUCKET).create("lost/b", b"the same bytes"))
    assert objects.create("lost/b", b"the same bytes") is None


def test_an_update_whose_answer_was_lost_is_our_own_and_a_stale_one_is_refused(proxy: Proxy, objects: Objects) -> None:
    first = objects.create("update/a", b"1")
    assert first
    proxy.fault("PUT", "update/a", drop=True)
    second = objects.update("update/a", b"2", first)
    assert second and content(objects, "update/a") == b"2"
    assert objects.update("update/a", b"3", first) is None and content(objects, "update/a") == b"2"
    assert objects.update("update/gone", b"3", first) is None


@pytest.mark.parametrize("fault", [{"status": 503}, {"cut": True}], ids=str)
def test_a_broken_answer_is_asked_for_again_and_never_becomes_data(
    proxy: Proxy, objects: Objects, fault: dict, tmp_path: Path
) -> None:
    body = bytes(range(256)) * 200
    objects.overwrite("broken/a", body)
    proxy.fault("GET", "broken/a", times=3, **fault)
    assert content(objects, "broken/a") == body
    proxy.fault("GET", "broken/a", times=3, **fault)
    found = objects.head("broken/a")
    assert found is not None
    with open(tmp_path / "copy", "wb") as file:
        objects.read_into(found, file.fileno())
    assert (tmp_path / "copy").read_bytes() == body


def test_a_store_that_is_away_is_waited_for(proxy: Proxy, objects: Objects, monkeypatch: pytest.MonkeyPatch) -> None:
    proxy.is_down = True
    threading.Timer(0.4, lambda: setattr(proxy, "is_down", False)).start()
    assert objects.create("away/a", b"1")


def test_a_store_that_stays_away_ends_in_one_sentence(proxy: Proxy, objects: Objects) -> None:
    proxy.is_down, objects.patience_s = True, 0.5
    with pytest.raises(StoreAwayError, match=f"bucket '{BUCKET}' did not write away/b for .* nothing that was stored is lost"):
        objects.create("away/b", b"1")


def test_a_wrong_address_is_the_user_s_mistake_and_not_waited_for(proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FIRST_PATIENCE_S", 0.3)
    proxy.is_down = True
    objects = Objects(BUCKET)
    with pytest.raises(InputError, match=r"cannot be used for bucket 'bucket' .* start it, or correct AWS_ENDPOINT_URL"):
        objects.directly_below("")
    proxy.is_down = False
    assert objects.directly_below("nothing/") == ([], [])
    proxy.is_down, objects.patience_s = True, 0.5
    with pytest.raises(StoreAwayError):  # it had answered: it is away
        objects.directly_below("")


@pytest.mark.parametrize(
    ("status", "code", "sentence"),
    [
        (403, "InvalidAccessKeyId", "does not accept the key for bucket 'bucket'.*correct AWS_ACCESS_KEY_ID"),
        (403, "AccessDenied", "may not do this in bucket 'bucket'.*name another bucket, or grant it"),
        (403, "RequestTimeTooSkewed", "the clock of this machine differs too much.*set it"),
        (404, "NoSuchBucket", "there is no bucket 'bucket' at .*create it, or correct the name"),
    ],
    ids=lambda value: str(value)[:24],
)
def test_a_refusal_is_one_sentence_at_once(proxy: Proxy, objects: Objects, status: int, code: str, sentence: str) -> None:
    fault = proxy.fault("PUT", "", times=9, status=status, code=code)
    with pytest.raises(InputError, match=sentence):
        objects.create("refused/a", b"1")
    assert fault.seen == 1


def test_listings_name_objects_and_folders(objects: Objects) -> None:
    for key in ("list/a", "list/b", "list/below/c"):
        objects.overwrite(key, b"1")
    files, folders = objects.directly_below("list/")
    assert [each.key for each in files] == ["list/a", "list/b"] and folders == ["below"]
    assert [each.key for each in objects.below("list/", after="list/a")] == ["list/b", "list/below/c"]
    objects.copy("list/a", "list/d")
    objects.remove(["list/a", "list/nothing"])
    assert objects.head("list/a") is None and content(objects, "list/d") == b"1"
    with pytest.raises(FileNotFoundError):
        objects.read("list/a")
    found = objects.head("list/b")
    assert found is not None and objects.read("list/b", unless=found.etag) is None
