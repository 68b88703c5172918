"""Every door of a worker is knocked on: keys, paths, sizes, names; and each request is drawn once, or told plainly why not."""

import asyncio
import json
import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import pytest

from inference.adapter_check import adapter_hash_of
from records.generation import GenerationRequest
from records.policy_version import PolicyVersion
from telemetry.errors import EngineError, EngineLostError, InputError
from tests.waiting import wait_until
from tests.workers.plain_worker import PlainEngine, WorkerHere, expected_tokens
from tests.workers.test_pool import pools, request_for, root
from workers.wire import pack_request, unpack_generation
from workers.worker import bind

__all__ = ["pools", "request_for", "root"]  # fixtures
KEY = "a-key-that-nobody-guesses"


@pytest.fixture
def locked(model: Path, root: Path) -> Iterator[WorkerHere]:
    """A worker with a key."""
    end = WorkerHere(PlainEngine("locked"), model, root, key=KEY).start()
    yield end
    end.stop()


@pytest.fixture
def end(model: Path, root: Path) -> Iterator[WorkerHere]:
    """A worker without one."""
    end = WorkerHere(PlainEngine("open"), model, root).start()
    yield end
    end.stop()


def knock(
    end: WorkerHere, path: str, body: bytes | dict[str, Any] | None = None, key: str | None = None, **headers: str
) -> tuple[int, bytes]:
    """Status and content of what answers at `path`; a body makes it a POST.

    httpx closes its socket at once, even with part of a body unsent; aiohttp leaves it to an event loop that has ended.
    """
    sent = headers | ({"authorization": f"Bearer {key}".strip()} if key is not None else {})
    if isinstance(body, bytes):
        sent = {"content-type": "application/octet-stream"} | sent
    how: dict[str, Any] = {"json": body} if isinstance(body, dict) else {"content": body}
    encoded = {name: value.encode() for name, value in sent.items()}
    answer = httpx.request("POST" if body is not None else "GET", end.url + path, headers=encoded, timeout=30, **how)
    return answer.status_code, answer.content


def told(answer: tuple[int, bytes]) -> tuple[int, str]:
    """Status and kind of a refusal."""
    return answer[0], json.loads(answer[1])["kind"]


def publish(end: WorkerHere, adapter: str, adapter_hash: str = "x", version: Any = 4) -> tuple[int, str]:
    body = {"version": version, "adapter": adapter, "adapter_hash": adapter_hash}
    status, content = knock(end, "/publish", body)
    return (status, "") if status == 200 else told((status, content))


ROUTES = ["/generate", "/publish", "/retire", "/stats", "/health", "/metrics", "/no-such-route"]


def test_no_door_opens_without_the_key_or_says_what_is_behind_it(locked):
    for path in ROUTES:
        for key in (None, "", KEY + "x", KEY[:-1], "\xff"):
            assert told(knock(locked, path, None, key)) == told(knock(locked, path, b"x", key)) == (401, "key")
        assert knock(locked, path, None, None, authorization=KEY)[0] == 401, "the key without its scheme"
    assert knock(locked, "/health", None, KEY)[0] == 200
    assert knock(locked, "/ready", None, None) == (200, b'{"ready":true}'), "all that a probe without the key learns"
    assert told(knock(locked, "/ready", b"{}", None)) == (401, "key")


def test_the_key_appears_in_no_log_and_no_error(model, root, host, pools, request_for, caplog, capfd):
    class Broken(PlainEngine):
        async def generate(self, request: GenerationRequest):
            raise RuntimeError("a defect")

    caplog.set_level(logging.DEBUG)
    end = WorkerHere(Broken("broken"), model, root, key=KEY).start()
    try:
        said = [knock(end, path, b"nonsense", KEY)[1] for path in ("/generate", "/publish", "/retire")]
        status, content = knock(end, "/generate", pack_request(request_for(1)), KEY)
        assert status == 500
        said += [content, *(knock(end, path, None, KEY)[1] for path in ("/stats", "/health", "/metrics", "/docs"))]
        for key in (KEY + "wrong", KEY):
            from inference.settings import InferenceSettings
            from workers.pool import RemoteEngine

            settings = InferenceSettings(urls=(end.url,))
            pool = RemoteEngine(settings, key, end.worker.health()["model"])  # type: ignore[arg-type]
            with pytest.raises((InputError, EngineError)) as refused:
                host.submit(pool.start()).result(timeout=20)
                host.submit(pool.generate(request_for(1))).result(timeout=20)
            host.submit(pool.close()).result(timeout=10)
            assert ("set ENTENTE_KEY to the key" in str(refused.value)) == (key != KEY)
            said += [str(refused.value).encode(), repr(pool).encode(), repr(settings).encode()]
    finally:
        end.stop()
    out, err = capfd.readouterr()
    everything = b"".join(said).decode() + caplog.text + out + err
    assert "a defect" in everything and KEY not in everything


@pytest.mark.parametrize("host_name", ["0.0.0.0", "::"])
def test_only_loopback_goes_without_a_key(host_name):
    for key in (None, ""):
        with pytest.raises(InputError, match="needs a key"):
            bind(host_name, 0, key)


def test_neither_documentation_nor_development_routes_exist(end):
    for path in ("/docs", "/redoc", "/openapi.json", "/collective_rpc", "/reset_prefix_cache", "/sleep", "/v1/completions",
                 "/v1/load_lora_adapter", "/pause", "/update_weights"):  # fmt: skip
        assert knock(end, path)[0] == 404 and knock(end, path, b"{}")[0] == 404


def test_adapters_come_from_under_the_root_only(end, root, tmp_path: Path):
    good = root / "v1"
    linked, inner = root / "linked", root / "inner"
    linked.symlink_to(tmp_path)
    inner.mkdir()
    for file in good.iterdir():
        (inner / file.name).symlink_to(file)  # stays inside: no matter
    (tmp_path / "empty").mkdir()
    outside = tmp_path / "adapter_config.json"
    outside.write_bytes((good / "adapter_config.json").read_bytes())
    try:
        outer = [str(tmp_path), str(tmp_path / "empty"), "/", "/etc", "..", "../", f"../{root.name}/../.."]
        none = ["nowhere", "", ".", str(root), "v1\0", "x" * 4000, str(good / "adapter_config.json")]
        for path in (*outer, *none, "linked", str(linked)):
            assert publish(end, path) == (403, "path"), path
        assert publish(end, "x" * 5000) == (400, "malformed")
        assert publish(end, str(inner), adapter_hash_of(good))[0] == 200
        (inner / "adapter_config.json").unlink()
        (inner / "adapter_config.json").symlink_to(outside)  # the folder is inside, a file of it is not
        assert publish(end, str(inner), adapter_hash_of(good), 5) == (403, "path")
        assert end.engine.served.keys() == {0, 4}
    finally:
        linked.unlink()
        for file in inner.iterdir():
            file.unlink()
        inner.rmdir()


@pytest.mark.parametrize("kind", ["pipe", "link to a device"])
def test_an_adapter_of_other_than_regular_files_is_refused_and_the_next_one_is_served(end, root, kind: str):
    bad, good, name = root / "odd", root / "v1", "adapter_model.safetensors"
    shutil.copytree(good, bad)
    (bad / name).unlink(missing_ok=True)
    try:
        os.mkfifo(bad / name) if kind == "pipe" else (bad / name).symlink_to("/dev/zero")
        assert publish(end, str(bad)) == (403, "path")
        assert publish(end, "v1", adapter_hash_of(good))[0] == 200
    finally:
        shutil.rmtree(bad)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/publish", {"version": -1, "adapter": "v1", "adapter_hash": "x"}),
        ("/publish", {"version": 1, "adapter": "v1", "adapter_hash": "x", "more": 1}),
        ("/publish", b"[" * 100_000),
        ("/retire", {"oldest": None}),
        ("/generate", b"not msgpack"),
    ],
    ids=lambda given: str(given)[:60],
)
def test_a_malformed_body_is_refused_and_the_worker_lives(end, request_for, path, body):
    if isinstance(body, bytes) and path != "/generate":
        assert told(knock(end, path, body, None, **{"content-type": "application/json"})) == (400, "malformed")
    else:
        assert told(knock(end, path, body)) == (400, "malformed")
    assert knock(end, "/generate", pack_request(request_for(1)))[0] == 200


def test_the_same_request_asked_many_times_is_drawn_once(end, request_for):
    end.engine.delay_s = 0.2
    body = pack_request(request_for(1))

    async def together() -> list[bytes]:
        async with aiohttp.ClientSession() as session:

            async def ask() -> bytes:
                async with session.post(end.url + "/generate", data=body) as answer:
                    assert answer.status == 200
                    return await answer.read()

            return [*await asyncio.gather(*(ask() for _ in range(8))), await ask()]

    assert len(set(asyncio.run(together()))) == 1
    assert len(end.engine.requests) == 1


def test_the_id_of_another_request_is_refused_in_flight_and_later(end, request_for):
    end.engine.delay_s = 0.4
    first, other = pack_request(request_for(1)), pack_request(request_for(1, seed=99))

    async def both() -> list[int]:
        async with aiohttp.ClientSession() as session:

            async def ask(body: bytes) -> int:
                async with session.post(end.url + "/generate", data=body) as answer:
                    return answer.status

            begun = asyncio.create_task(ask(first))
            await asyncio.sleep(0.2)
            return [await ask(other), await begun, await ask(other), await ask(first)]

    assert asyncio.run(both()) == [409, 200, 409, 200]
    assert len(end.engine.requests) == 1


def test_what_nobody_waits_for_any_more_is_not_drawn_and_can_be_asked_again(end, request_for):
    end.engine.delay_s = 30.0
    body = pack_request(request_for(1))

    async def hang_up() -> None:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=0.3)) as session:
            with pytest.raises(TimeoutError):
                await session.post(end.url + "/generate", data=body)

    asyncio.run(hang_up())
    wait_until(lambda: end.engine._running == 0 and end.worker.answers.in_flight == 0)
    end.engine.delay_s = 0.0
    generation, load = unpack_generation(knock(end, "/generate", body)[1])
    assert generation.token_ids.tolist() == expected_tokens(request_for(1), 0) and load.running <= 1


def test_each_refusal_has_its_own_status_and_kind(end, root, request_for):
    one = adapter_hash_of(root / "v1")
    assert publish(end, "v1", one, 1)[0] == 200
    gone = knock(end, "/generate", pack_request(request_for(1, version=7)))
    assert told(gone) == (410, "version_gone")
    assert (json.loads(gone[1])["policy_version"], json.loads(gone[1])["adapter_hash"]) == (1, one)
    for version, adapter_hash in ((1, "another"), (0, one)):
        body = pack_request(request_for(2), PolicyVersion(version=version, adapter_hash=adapter_hash))
        assert told(knock(end, "/generate", body)) == (410, "version_gone"), "another adapter under this number"
    assert not end.engine.requests

    async def refuses(request: GenerationRequest):
        raise EngineError("too long for this engine")

    end.engine.generate = refuses  # type: ignore[method-assign]
    assert told(knock(end, "/generate", pack_request(request_for(3)))) == (409, "refused")

    async def lost(request: GenerationRequest):
        raise EngineLostError("struck by the test")

    supervisor: Any = end.worker.engine
    supervisor._bound = 0
    end.engine.generate = lost  # type: ignore[method-assign]
    assert told(knock(end, "/generate", pack_request(request_for(4)))) == (503, "engine_lost")


def test_health_tells_of_versions_and_a_worker_that_warms_up_says_so_and_draws_nothing(model, root, request_for):
    class Slow(PlainEngine):
        async def start(self) -> None:
            await asyncio.sleep(1.0)

    end = WorkerHere(Slow("slow"), model, root).begin()
    try:
        health = json.loads(knock(end, "/health")[1])
        assert (health["ready"], health["alive"], health["policy_version"]) == (False, True, 0)
        for path, body in (("/generate", pack_request(request_for(1))), ("/stats", None), ("/metrics", None)):
            assert told(knock(end, path, body)) == (503, "engine_lost")
        assert publish(end, "v1", adapter_hash_of(root / "v1")) == (503, "engine_lost")
        assert end._up.wait(timeout=10)
        one, two = adapter_hash_of(root / "v1"), adapter_hash_of(root / "v2")
        publish(end, "v1", one, 1)
        publish(end, "v2", two, 2)
        health = json.loads(knock(end, "/health")[1])
        assert health["ready"] and health["versions"] == {"1": one, "2": two} and health["worker"] == "slow"
        assert knock(end, "/retire", {"oldest": 2, "keep": []})[0] == 200
        assert json.loads(knock(end, "/health")[1])["versions"] == {"2": two}
    finally:
        end.stop()


def test_an_engine_that_does_not_start_ends_the_worker_with_its_sentence(model, root):
    class Unable(PlainEngine):
        async def start(self) -> None:
            raise EngineError("vLLM could not load the model")

    end = WorkerHere(Unable("unable"), model, root).begin()
    wait_until(lambda: end.ended is not None)
    assert str(end.ended) == "vLLM could not load the model"
    end.stop()
