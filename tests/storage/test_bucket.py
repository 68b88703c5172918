"""Files of runs in a bucket: published once, read through a cache that may be lost, and locked for all machines."""

import json
import os
import random
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from records.policy_version import PolicyVersion
from storage import copies, lease
from storage.adapters import ADAPTER_FILES, publish_adapter, published_versions, read_adapter
from storage.bucket import BucketFiles
from storage.control import ControlDesk, read_control
from storage.copies import trim
from storage.files import FILES, machine
from storage.index import Index, open_index
from storage.ledger import read_ledger
from storage.objects import Objects
from storage.run_roots import INHERITED, as_given, located, text_as_given
from storage.runs import RunPaths, held, refresh_run, runs_in, set_aside
from storage.shards import coverage, open_plies, open_shard, publish_shard, shard_path
from telemetry.errors import DataError, InputError
from tests.storage.make_rows import make_shard_rows
from tests.storage.object_store import BUCKET, Proxy, environment

Elsewhere = Callable[[], RunPaths]


@pytest.fixture
def proxy(object_store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    with Proxy(upstream=object_store).serving() as made:
        for name, value in environment(made.address, tmp_path / "cache").items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv(INHERITED, "{}")
        monkeypatch.setattr(FILES, "mounted", {})
        yield made


@pytest.fixture
def root(proxy: Proxy, request: pytest.FixtureRequest) -> Path:
    return located(f"s3://{BUCKET}/{request.node.name[:60]}")


@pytest.fixture
def run(root: Path) -> RunPaths:
    return RunPaths(root / "mine").create()


@pytest.fixture
def elsewhere(root: Path, tmp_path: Path) -> Elsewhere:
    """The same run on a machine with an empty disk: another cache, and nothing known."""
    count = iter(range(100))

    def another() -> RunPaths:
        cache = tmp_path / f"machine-{next(count)}"
        prefix = as_given(root).removeprefix(f"s3://{BUCKET}/")
        FILES.mount(cache, BucketFiles(Objects(BUCKET), prefix, cache))
        return RunPaths(cache / "mine")

    return another


def publish_groups(run: RunPaths, producer: str, groups: range) -> None:
    """One shard for each start group."""
    for number in groups:
        decisions, plies = make_shard_rows(random.Random(number), range(number, number + 1), producer)
        publish_shard(run, producer, number, decisions, plies, {"code": "test"})


def test_a_url_is_mounted_in_a_cache_and_shown_as_it_was_given(root: Path) -> None:
    url = as_given(root)
    assert url.startswith("s3://bucket/test_a_url") and located(url) == root == located(Path(url)) == located(f"{url}/")
    assert json.loads(os.environ[INHERITED]) == {str(root): url}
    assert text_as_given(f"{root}/mine is gone") == f"{url}/mine is gone" and located("runs") == Path("runs")


@pytest.mark.parametrize("wrong", ["s3://B/x", "gs://bucket/x"])
def test_what_names_no_bucket_is_refused_in_one_sentence(wrong: str) -> None:
    with pytest.raises(InputError, match="names no folder of runs: give a folder, or s3://bucket/prefix"):
        located(wrong)


def test_a_file_is_published_once_and_read_on_a_machine_with_an_empty_disk(run: RunPaths, elsewhere: Elsewhere) -> None:
    path = run.index / "snap.parquet"
    assert FILES.publish(path, lambda temp: temp.write_bytes(b"first"))
    assert not FILES.publish(path, lambda temp: temp.write_bytes(b"second"))
    there = elsewhere()
    assert FILES.open(there.index / path.name).read() == b"first" == FILES.open(path).read()
    assert FILES.marks(there.index / path.name) == FILES.marks(path)
    with pytest.raises(FileNotFoundError):
        FILES.open(there.index / "nothing.parquet")


def test_shards_are_published_counted_and_gathered_from_an_empty_disk(run: RunPaths, elsewhere: Elsewhere) -> None:
    publish_groups(run, "local", range(0, 3))
    there = elsewhere()
    index, before = Index(there), Index(run)
    assert index.refresh() == before.refresh() > 0
    assert [shard.path.name for shard in coverage(there, "local", 0, 5).published] == [
        "000000.arrow",
        "000001.arrow",
        "000002.arrow",
    ]
    assert coverage(there, "local", 0, 5).missing == ((3, 2),)
    publish_groups(run, "local", range(3, 4))
    assert index.refresh() > 0 and index.refresh() == 0
    assert open_plies(shard_path(there, "local", 3)).num_rows > 0


def test_a_new_shard_costs_few_requests_however_many_there_are(run: RunPaths, proxy: Proxy) -> None:
    publish_groups(run, "local", range(0, 8))
    index = open_index(run)
    publish_groups(run, "local", range(8, 9))
    del proxy.requests[:]
    assert index.refresh() > 0
    assert len(proxy.requests) <= 14, proxy.requests
    del proxy.requests[:]
    assert index.refresh() == 0
    assert len(proxy.requests) <= 6, proxy.requests


def test_a_copy_that_rotted_is_fetched_again_and_the_object_stays(run: RunPaths, elsewhere: Elsewhere) -> None:
    publish_groups(run, "local", range(1))
    path = shard_path(elsewhere(), "local", 0)
    whole = open_shard(path)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    etag = copies.etag_of(path)
    path.unlink()
    path.write_bytes(content)
    copies.set_etag(path, etag)
    assert open_shard(path).equals(whole) and FILES.exists(path)


def test_an_object_that_is_damaged_is_set_aside_for_every_machine(run: RunPaths, elsewhere: Elsewhere) -> None:
    publish_groups(run, "local", range(2))
    path = shard_path(run, "local", 0)
    store = FILES.store_of(path)
    assert isinstance(store, BucketFiles)
    found = store.objects.read(store.key(path))
    assert found is not None
    store.objects.overwrite(store.key(path), found[0][: len(found[0]) // 2])
    there = elsewhere()
    damaged = coverage(there, "local", 0, 2)
    assert damaged.missing == ((0, 1),) and len(damaged.set_aside) == 1
    assert coverage(run, "local", 0, 2).missing == ((0, 1),)
    assert [entry.path.name for entry in FILES.entries(run.shards / "local") if entry.path.name.startswith(".")] != []


def adapter(folder: Path, weights: bytes = b"weights") -> Path:
    folder.mkdir(parents=True)
    for name in ADAPTER_FILES:
        (folder / name).write_bytes(weights)
    return folder


def test_an_adapter_is_published_with_its_manifest_last(
    run: RunPaths, proxy: Proxy, elsewhere: Elsewhere, tmp_path: Path
) -> None:
    published = publish_adapter(run, 3, adapter(tmp_path / "made"))
    written = [path.rpartition("/")[2] for method, path in proxy.requests if method == "PUT" and "/adapters/" in path]
    assert sorted(written[:-1]) == sorted(ADAPTER_FILES) and written[-1] == "manifest.json"
    there = elsewhere()
    assert read_adapter(there, 3) == published == publish_adapter(there, 3, tmp_path / "made")
    assert published_versions(there) == [3]
    with pytest.raises(DataError, match="other weights"):
        publish_adapter(there, 3, adapter(tmp_path / "other", b"other"))


def test_of_two_that_publish_a_folder_one_is_refused(run: RunPaths, elsewhere: Elsewhere, tmp_path: Path) -> None:
    first, second = run.checkpoints / ".a", elsewhere().checkpoints / ".b"
    for folder in (first, second):
        folder.mkdir(parents=True)
        (folder / "manifest.json").write_text("{}")
    FILES.publish_folder(first, run.checkpoint(1))
    with pytest.raises(DataError, match="exists and is never overwritten"):
        FILES.publish_folder(second, second.parent / "step_000001")


def desk(run: RunPaths) -> ControlDesk:
    return ControlDesk(run, base_model="base", plays="plays", max_policy_lag=2)


def test_the_control_file_is_seen_elsewhere_and_a_second_writer_is_refused(run: RunPaths, elsewhere: Elsewhere) -> None:
    one, two, three, four, five = (PolicyVersion(version=number, adapter_hash="x") for number in range(1, 6))
    mine = desk(run)
    mine.serve(one)
    there = elsewhere()
    assert read_control(there).version == 1
    mine.serve(two)
    assert read_control(there).version == 2
    other = desk(there)
    other.serve(three)
    with pytest.raises(InputError, match=r"another process has written .* so this one stops"):
        mine.serve(four)
    assert read_control(run).version == 3
    again = desk(run)  # this process opens the run anew, which its lock allows
    again.serve(five)
    with pytest.raises(InputError, match="so this one stops"):
        other.serve(four)
    assert read_control(there).version == 5


def test_small_files_are_brought_up_to_date_and_removed_ones_go(run: RunPaths, elsewhere: Elsewhere) -> None:
    FILES.replace(run.settings, b"{}")
    FILES.replace(run.scores / "base.json", b"1")
    there = elsewhere()
    assert [each.root.name for each in runs_in(there.root.parent)] == ["mine"]
    assert there.settings.read_bytes() == b"{}" and (there.scores / "base.json").read_bytes() == b"1"
    assert abs(there.settings.stat().st_mtime - time.time()) < 100
    FILES.replace(run.settings, b"[]")
    FILES.remove(run.scores / "base.json")
    refresh_run(there)
    assert there.settings.read_bytes() == b"[]" and not (there.scores / "base.json").exists()


def test_figures_are_mirrored_and_a_reader_beside_them_leaves_them_alone(run: RunPaths, elsewhere: Elsewhere) -> None:
    with FILES.mirror(run.root) as mirror, run.metrics.open("a") as figures:
        for line in ("one\n", "two\n"):
            figures.write(line)
            figures.flush()
            mirror.flush()
            figures.write("not yet mirrored\n")
            figures.flush()
            refresh_run(run)  # of another process of this machine: it must not replace the open file
            there = elsewhere()
            refresh_run(there)
            assert there.metrics.read_text().endswith(line)
    refresh_run(there)
    assert there.metrics.read_text() == run.metrics.read_text() == "one\nnot yet mirrored\ntwo\nnot yet mirrored\n"


def test_a_mirror_does_not_overwrite_the_figures_of_a_process_that_took_over(run: RunPaths, elsewhere: Elsewhere) -> None:
    with FILES.mirror(run.root) as mirror, run.metrics.open("a") as figures:
        figures.write("one\n")
        figures.flush()
        mirror.flush()
        there = elsewhere()
        with FILES.mirror(there.root):
            there.metrics.write_text("one\nof another\n")
        figures.write("two\n")
        figures.flush()
        with pytest.raises(InputError, match="another process has written"):
            mirror.flush()
    refresh_run(there)
    assert there.metrics.read_text() == "one\nof another\n"


def quick_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "BEAT_S", 0.1)
    monkeypatch.setattr(lease, "LOST_S", 1.0)


def test_one_machine_at_a_time_holds_a_run(run: RunPaths, elsewhere: Elsewhere, monkeypatch: pytest.MonkeyPatch) -> None:
    quick_lease(monkeypatch)
    there = elsewhere()
    with held(run.lock) as mine, held(there.lock) as other:
        assert mine and not other and FILES.is_held(there.lock)
    with held(there.lock) as other:
        assert other
    assert not FILES.is_held(run.lock)


def test_a_lease_without_a_sign_of_life_is_taken_over_and_its_holder_writes_nothing_more(
    run: RunPaths, elsewhere: Elsewhere, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick_lease(monkeypatch)
    there = elsewhere()
    with held(run.lock) as mine:
        assert mine
        monkeypatch.setattr(lease, "BEAT_S", 30.0)  # from its next beat on the holder is silent
        began = time.monotonic()
        with held(there.lock, wait_s=10.0) as other:
            assert other and time.monotonic() - began >= 1.0
            store = FILES.store_of(run.root)
            assert isinstance(store, BucketFiles)
            store._lose(run.root, "another process works on the run now")
            with pytest.raises(InputError, match="another process works on the run now"):
                FILES.publish(run.ledger / "step-000001.arrow", lambda temp: temp.write_bytes(b"1"))
            assert read_ledger(there, 1) is None
            assert FILES.publish(there.ledger / "step-000001.arrow", lambda temp: temp.write_bytes(b"1"))


def test_the_lease_of_a_process_that_ended_on_this_machine_is_free_at_once(run: RunPaths) -> None:
    store = FILES.store_of(run.root)
    assert isinstance(store, BucketFiles)
    gone = lease.Holder(owner="other", machine=machine(), pid=2**22 + 1, beat=0)
    store.objects.create(store.key(run.lock), lease._packed(gone))
    began = time.monotonic()
    with held(run.lock) as mine:
        assert mine and time.monotonic() - began < lease.LOST_S / 4


def test_a_store_that_ignores_conditions_is_refused(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    FILES.check(root)
    store = FILES.store_of(root)
    assert isinstance(store, BucketFiles)
    monkeypatch.setattr(store.objects, "create", lambda key, content: store.objects.overwrite(key, content))
    with pytest.raises(InputError, match=r"ignores conditional puts .* use a store that has them"):
        FILES.check(root)


def test_the_cache_is_bounded_by_what_was_fetched_longest_ago(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "_YOUNG_S", 0.0)
    names = [root / "mine" / "shards" / "local" / f"{number:06d}.arrow" for number in range(4)]
    for path in names:
        FILES.publish(path, lambda temp: temp.write_bytes(b"x" * 1000))
        time.sleep(0.01)
    kept = root / "_models" / "tiny" / "model.safetensors"
    FILES.publish(kept, lambda temp: temp.write_bytes(b"x" * 1000))
    not_stored = root / "mine" / "shards" / "local" / "000009.arrow"
    not_stored.write_bytes(b"x" * 1000)
    assert trim(root, 2e-6) == 2000
    assert [path.exists() for path in [*names, kept, not_stored]] == [False, False, True, True, True, True]
    assert FILES.open(names[0]).read() == b"x" * 1000


def test_a_made_folder_is_shared_once(root: Path, proxy: Proxy, elsewhere: Elsewhere) -> None:
    folder = root / "_state_cache" / "v-1"
    folder.mkdir(parents=True)
    for name in ("train.arrow", "manifest.json"):
        (folder / name).write_text(name)
    FILES.share(folder)
    FILES.share(folder)
    assert [path.rpartition("/")[2] for method, path in proxy.requests if method == "PUT"] == ["train.arrow", "manifest.json"]
    there = elsewhere().root.parent / "_state_cache" / "v-1"
    FILES.fetch_folder(there)
    assert (there / "train.arrow").read_text() == "train.arrow"
    shutil.rmtree(there)
    aside = set_aside(folder)
    assert not FILES.exists(folder / "manifest.json") and aside.is_dir()
