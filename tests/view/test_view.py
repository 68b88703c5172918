"""`entente view` over a stored run: who may ask, what it shows of whole, killed and damaged runs, and that it changes nothing."""

import hashlib
import io
import json
import os
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet
import pytest

from entente.reports import read_run
from entente.reports.inspect_rows import Inspector
from entente.settings.layers import settings_of
from entente.view.run_pages import weights_for, why_it_won
from storage.files import file_lock
from storage.ledger import ledger_path, read_ledger
from storage.runs import MODEL_FOLDER, RunPaths
from storage.shards import open_shard
from tests.damage import flip
from tests.reports.conftest import Page
from tests.thought_rows import add_thoughts
from tests.view.conftest import ADDRESS, Asked

PLACES = (
    "/",
    "/compare?run=before",
    "/run/before",
    "/run/before/step?step=1",
    "/run/before/games",
    "/run/before/sql?query=@lag&ask=1",
)
WICKED = "</script><img src=x onerror=alert(1)>\"'{{ 7 * 7 }}\x1b[2J\x00"
LIMIT_S = 240.0


def answer_of(asked: Asked, kind: str, what: str) -> tuple[dict | None, str]:
    job, until = asked.viewer.jobs.of(asked.viewer._about(kind, "before", what)), time.monotonic() + LIMIT_S
    assert job is not None
    while job.running and time.monotonic() < until:
        time.sleep(0.1)
    return job.answer()


def tree(root: Path) -> dict[str, tuple[str, int]]:
    files = [file for file in sorted(root.rglob("*")) if file.is_file()]
    return {str(file): (hashlib.sha256(file.read_bytes()).hexdigest(), file.stat().st_mtime_ns) for file in files}


@pytest.mark.parametrize(
    ("headers", "said"),
    [
        pytest.param({"host": "evil.example"}, "on this machine only", id="host"),
        pytest.param({"origin": "http://evil.example"}, "comes from another page", id="origin"),
        pytest.param({"origin": "null"}, "comes from another page", id="a page without an address"),
        pytest.param({}, "the key of this address is missing or old", id="key"),
    ],
)
def test_a_foreign_page_can_ask_nothing_and_start_nothing(asked: Asked, headers: dict[str, str], said: str):
    key = "key=another" if not headers else ""
    for place in PLACES:
        answer = asked(f"{place}{'&' if '?' in place else '?'}{key}" if key else place, headers)
        assert answer.status_code == 403 and said in answer.json()["error"], place
    for place in ("what-if?game=local/0/0&shard=", "recompute?id=1", "cancel?about=x&back=/run/x"):
        answer = asked(f"/run/before/{place}{'&' + key if key else ''}", headers, phase="S1901M")
        assert answer.status_code == 403 and said in answer.json()["error"], place
    assert asked.viewer.jobs._jobs == [] and asked.viewer._sql is None


def test_a_page_has_no_inline_code_and_an_address_of_its_run_alone(asked: Asked):
    answer = asked("/run/before")
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'") and "unsafe" not in policy and "frame-ancestors 'none'" in policy
    nonce = re.search(r"script-src 'nonce-([^']+)'", policy)
    assert nonce and all(nonce[1] in tag for tag in re.findall(r"<(?:script|style)\b[^>\[]*>", answer.text))
    assert " style=" not in answer.text and not re.search(r"\son\w+=", answer.text)
    for name in ("_models", ".git", "none", "before%2f..%2fbefore"):
        assert asked(f"/run/{name}").status_code == 404


def test_looking_at_everything_changes_no_file(asked: Asked, stored_run: RunPaths, decision: Callable[[], str]):
    before = tree(stored_run.root.parent)
    asked.drawn()
    for place in (*PLACES, decision(), asked.links("/run/before/games", "game")[0]):
        assert asked(place).status_code == (404 if place.startswith("/compare") else 200), place
    assert tree(stored_run.root.parent) == before
    with file_lock(stored_run.lock) as free:
        assert free


def test_a_page_that_did_not_change_is_not_sent_again_and_one_that_did_is(asked: Asked, stored_run: RunPaths):
    text, first = asked.drawn(), asked("/run/before")
    assert "Complete: 2 steps" in text and "being drawn" not in text and len(re.findall("<figure", text)) >= 10
    tag = {"if-none-match": first.headers["etag"]}
    assert asked("/run/before", tag).status_code == 304
    lines = stored_run.metrics.read_text().splitlines()
    step = json.loads(next(line for line in lines if '"step": 2' in line)) | {"step": 3, "train/reward": 7.25}
    with stored_run.metrics.open("a") as file:
        file.write(json.dumps(step)[:50])
    assert "its last line is no complete record" in asked("/run/before", tag).text
    with stored_run.metrics.open("a") as file:
        file.write(json.dumps(step)[50:] + "\n")
    now = asked("/run/before", tag)
    assert now.status_code == 200 and "+7.250" in now.text and "no complete record" not in now.text
    assert "7.25" in asked.drawn().split('aria-label="Mean return per step')[1][:60]


def test_a_killed_run_and_one_that_trains_say_what_they_are(asked: Asked, stored_run: RunPaths, monkeypatch: pytest.MonkeyPatch):
    stored_run.summary.unlink()
    stopped = asked("/run/before")
    assert "the run stopped before its last scores" in stopped.text
    late = time.time() + 7200
    with monkeypatch.context() as later:
        later.setattr(time, "time", lambda: late)
        now = asked("/run/before", {"if-none-match": stopped.headers["etag"]})
        assert "the last file was written 2 hours ago" in now.text
    lines = stored_run.metrics.read_text().splitlines(keepends=True)
    stored_run.metrics.write_text("".join(line for line in lines if '"step": 2' not in line))
    shutil.rmtree(stored_run.checkpoint(2))
    shutil.rmtree(stored_run.adapter(2))
    assert "Cut at step 2 of 2" in asked("/run/before").text and "interrupted" in asked("/").text
    with file_lock(stored_run.lock) as free:
        assert free
        page = asked("/run/before").text
        assert "Running: 1 of 2 steps done" in page
        assert "Step 2 has its rows, and the trainer computes" in page and ">training<" in asked("/").text
    copied = shutil.copytree(stored_run.root, stored_run.root.with_name("copy"))
    assert (
        copied.is_dir()
        and "Cut at step 2 of 2" in asked("/run/copy").text
        and "2 runs, each with" in asked("/compare?run=before&run=copy").text
    )


def test_the_list_of_runs_parses_the_new_metrics_of_a_run_that_trains_alone(
    asked: Asked, stored_run: RunPaths, monkeypatch: pytest.MonkeyPatch
):
    """Of 20,000 steps it parsed all of them each time that a file of the run changed."""
    parsed, record = list[bytes](), read_run._record
    monkeypatch.setattr(read_run, "_record", lambda line, records: bool(parsed.append(line)) or record(line, records))
    lines = stored_run.metrics.read_text().splitlines()
    with file_lock(stored_run.lock):
        assert ">training<" in asked("/").text and len(parsed) == len(lines)
        with stored_run.metrics.open("a") as file:
            file.write(json.dumps(json.loads(lines[-1]) | {"step": 3, "time/step_s": 1.0, "train/reward": 7.25}) + "\n")
        assert "+7.25" in asked("/").text and len(parsed) == len(lines) + 1
    assert ">training<" not in asked("/").text


def test_damage_is_a_sentence_in_its_place(asked: Asked, stored_run: RunPaths):
    shard = sorted(stored_run.shards.rglob("000000.arrow"))[0]
    flip(shard)
    page = asked.drawn()
    assert "1 shard was set aside as damaged" in page and "local/000000.arrow" in page
    assert asked("/run/before/games?shard=local/000000.arrow").status_code == 422
    assert asked("/run/before/games?shard=local/000002.arrow").status_code == 200
    absent = asked("/run/before/game?game=local/9/9&shard=local/000002.arrow")
    assert absent.status_code == 404 and "shard local/000002.arrow has no game local/9/9" in absent.text
    for file in (stored_run.ledger / "step-000001.arrow", stored_run.scores / "trained.json"):
        file.write_bytes(file.read_bytes()[:-30])
    asked = Asked(stored_run.root.parent)
    page = asked.drawn()
    assert "The curve is left out" in page and "left out:" in page
    assert asked("/run/before/step?step=1").status_code == 422 and asked("/run/before/step?step=99").status_code == 404
    for text, place in (("[]", "alerts"), ('{"a": 1', "environment"), ("1", "summary")):
        getattr(stored_run, place).write_text(text)
    assert asked("/").status_code == 200 and "damaged" in asked("/").text
    stored_run.settings.write_text("{")
    assert asked("/run/before").status_code == 404 and "no complete record of settings" in asked("/run/before").text


def test_a_game_has_odds_as_soon_as_its_model_is_there(asked: Asked, stored_run: RunPaths, tmp_path: Path):
    models, page = stored_run.root.parent / MODEL_FOLDER, "/run/before/game?game=latest"
    away = models.rename(tmp_path / "away")
    assert '"odds":false' in asked(page).text
    away.rename(models)
    assert '"odds":true' in asked(page).text


def test_hostile_content_is_text_everywhere_and_a_page_stays_small(stored_run: RunPaths):
    add_thoughts(stored_run, [(WICKED.replace("\x00", ""), True), (200 * "long " + WICKED.replace("\x00", ""), False)])
    (stored_run.root.parent / "<b>&</b>".replace("/", "")).mkdir()
    stored_run.environment.write_text(json.dumps({WICKED: WICKED, "huge": 1_000_000 * "x", "cpu_cores": "2"}))
    alert = {"name": WICKED, "run": "before", "step": 1, "sentence": 500_000 * "y" + WICKED}
    stored_run.alerts.write_text(json.dumps(alert) + "\n" + json.dumps(alert | {"sentence": WICKED}) + "\n")
    settings = json.loads(stored_run.settings.read_text())
    settings["inference"]["model"] = WICKED
    asked = Asked(stored_run.root.parent)
    group = asked.links("/run/before/step?step=1", "group")
    places = [*PLACES[2:], *group[:1], asked.links("/run/before/games", "game")[0], "/run/before/sql?query=from%20thoughts&ask=1"]
    places += asked.links(group[0], "decision")[:2]
    stored_run.settings.write_text(json.dumps(settings))
    pages = [asked.drawn(), asked("/").text, *(asked(place).text for place in places)]
    for place, page in zip(("run", "runs", *places), pages, strict=True):
        found = [page[max(0, at.start() - 60) : at.end() + 20] for at in re.finditer("<img src=x|\x1b|\x00|alert\\(1\\)>", page)]
        assert found == [], place
        assert len(page) < 900_000, place
        assert Page(re.sub(r"<script[^>]*>.*?</script>", "", page, flags=re.DOTALL)).elements
    assert "&lt;img src=x onerror=alert(1)&gt;" in pages[0]
    asked.viewer.close()


def test_a_group_says_where_its_forks_part_and_why_one_won(asked: Asked, stored_run: RunPaths):
    (group, *_) = asked.links("/run/before/step?step=2", "group")
    page, ledger = Page(asked(group).text), read_ledger(stored_run, 2)
    assert ledger is not None
    asked_for = dict(part.split("=") for part in group.partition("?")[2].split("&"))
    rows = [
        row
        for row in ledger.to_pylist()
        if str(row["start_group"]) == asked_for["start_group"] and row["power"] == asked_for["power"]
    ]
    rows = [row for row in rows if row["phase"] == asked_for["phase"]]
    best, worst = max(rows, key=lambda row: row["return"]), min(rows, key=lambda row: row["return"])
    assert f"Fork {best['fork']} returned {best['return'] - worst['return']:.3g} more" in page.text
    found = Inspector(stored_run, None, settings_of(stored_run)).group(
        int(asked_for["start_group"]), asked_for["power"], asked_for["phase"]
    )
    for member in found.members:
        assert f"Fork {member['fork']}: return {member['return']:+.3g}, advantage {member['advantage']:+.3g}" in page.text
    orders = {fork: [] for fork in (best["fork"], worst["fork"])}
    for row in sorted(open_shard(stored_run.shards / best["shard"]).to_pylist(), key=lambda row: row["phase_index"]):
        if (row["start_group"], row["power"]) == (best["start_group"], best["power"]) and row["fork"] in orders:
            orders[row["fork"]].append((row["phase"], row["orders"]))
    pairs = zip(orders[best["fork"]], orders[worst["fork"]], strict=False)
    phase, own, other = next((mine[0], mine[1], theirs[1]) for mine, theirs in pairs if set(mine[1]) != set(theirs[1]))
    assert f"They part in {phase}: fork {best['fork']} ordered" in page.text
    assert all(order in page.text for order in {*own} ^ {*other})
    assert "centres first differ in" in page.text


def test_centres_of_two_forks_are_compared_after_equally_many_counts():
    """One fork may have a retreat phase that the other lacks: the page named a phase in which their centres were equal."""
    ours = [("F1903M", ("PAR",)), ("W1903A", ("BEL", "PAR")), ("S1904M", ("BEL", "PAR")), ("W1904A", ("BEL", "HOL", "PAR"))]
    theirs = [("F1903M", ("PAR",)), ("F1903R", ("PAR",)), ("W1903A", ("BEL", "PAR")), ("S1905M", ("BEL", "PAR"))]

    def why(ours: Any, ended: str) -> str:
        rows: Any = SimpleNamespace(parting=lambda *forks: None, course=lambda fork: (ours, theirs)[fork["fork"]])
        best, worst = ({"fork": fork, "return": -fork, "status": "complete", "ended": ended} for fork in range(2))
        return why_it_won(rows, SimpleNamespace(facts=best), SimpleNamespace(facts=worst))[-1]  # type: ignore[arg-type]

    assert why(ours, "horizon") == "Their centres first differ in W1904A: fork 0 has HOL."
    assert why(ours[:-1], "horizon").startswith("Their centres never differ")
    assert why(ours[:-1], "won") == "Their centres do not differ before the phase in which a game was won."


def test_a_decision_is_recomputed_under_the_version_trained_on_it_or_that_sampled_it_or_the_nearest(stored_run: RunPaths):
    def named(trained: int, sampled: int) -> str:
        decided: Any = SimpleNamespace(facts={"policy_version": sampled}, used=[(trained + 1, trained - sampled)])
        version, folder, said = weights_for(stored_run, decided)
        assert (folder is None) == (version == 0) and f"ecomputed under version {version}" in said
        return said.partition(":")[0]

    assert named(2, 1) == "Recomputed under version 2, which was trained on it; version 1 sampled it"
    for folder in (stored_run.adapter(2), stored_run.checkpoint(2)):
        shutil.rmtree(folder)
    assert named(2, 1) == "Recomputed under version 1, which sampled it"
    for folder in (stored_run.adapter(1), stored_run.checkpoint(1)):
        shutil.rmtree(folder)
    assert named(2, 1) == "Version 2 is gone"


def test_tokens_have_the_overlay_that_was_chosen_and_what_is_recomputed_agrees_with_the_engine(
    asked: Asked, decision: Callable[[], str], stored_run: RunPaths
):
    settings = json.loads(stored_run.settings.read_text())
    settings["training"] |= {"attention": "flex", "gradient_checkpointing": True}  # as trained on a card
    stored_run.settings.write_text(json.dumps(settings))
    address = decision()
    page = asked(address + "&overlay=legal").text
    assert 'aria-current="true">legal<' in page and "heat9" in page and "Recompute entropy" in page
    assert asked(address + "&overlay=nothing").status_code == 404
    which = dict(part.split("=") for part in address.partition("?")[2].split("&"))
    started = asked(f"/run/before/recompute?id={which['id']}&shard={which['shard']}&overlay=gap", None, go="1")
    assert started.status_code == 303 and started.headers["location"].endswith("#tokens")
    found, why = answer_of(asked, "decision", f"{which['id']} under version 0")
    assert found is not None, why
    shown = Inspector(stored_run, None, settings_of(stored_run)).decision(int(which["id"]))
    assert found["place"] == [place for place, token in enumerate(shown.sampled) if token.legal != 1]
    assert max(map(abs, found["gap"])) < 1e-3 and all(entropy >= 0 for entropy in found["entropy"])
    page = asked(address + "&overlay=entropy").text
    assert "Recomputed under version" in page and "entropy ↻" in page and f"{found['entropy'][0]:.4f}" in page


class EndsMeanwhile:
    """A job that ends once it was asked whether it runs."""

    words, last_line = "one forward", ""

    def __init__(self) -> None:
        self.ended = False

    @property
    def running(self) -> bool:
        before, self.ended = self.ended, True
        return not before

    def answer(self) -> tuple[None, str]:
        return None, ""


def test_a_job_that_ends_while_its_page_is_drawn_is_asked_for_once_more(
    asked: Asked, decision: Callable[[], str], monkeypatch: pytest.MonkeyPatch
):
    address, ended = decision(), EndsMeanwhile()
    monkeypatch.setattr(asked.viewer.jobs, "of", lambda about: ended)
    every = re.compile(r'data-every="(\d+)"')
    assert [int(every.findall(asked(address).text)[0]) > 0 for _ in range(2)] == [True, False]


@pytest.fixture
def recomputed(asked: Asked, decision: Callable[[], str], monkeypatch: pytest.MonkeyPatch) -> str:
    """The address of a decision whose figures were recomputed under version 0."""
    figures = {"place": [0], "entropy": [0.5], "gap": [0.0], "fate": ["trained"]}
    ended, jobs = SimpleNamespace(words="", running=False, answer=lambda: (figures, "")), {}
    monkeypatch.setattr(asked.viewer.jobs, "start", lambda words, about, *_: jobs.update({about: ended}))
    monkeypatch.setattr(asked.viewer.jobs, "of", jobs.get)
    address = decision()
    assert asked(address.replace("/decision?", "/recompute?"), None, go="1").status_code == 303
    assert "Recomputed under version 0," in asked(address).text
    return address


def test_what_was_recomputed_under_other_weights_is_not_shown(asked: Asked, recomputed: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("entente.view.viewer.weights_for", lambda *_: (1, None, "Recomputed under version 1."))
    page = asked(recomputed).text
    assert "Recomputed under" not in page and "Recompute entropy" in page


def test_what_was_recomputed_in_a_run_is_not_shown_in_another_one_of_its_name(
    asked: Asked, recomputed: str, stored_run: RunPaths
):
    os.utime(ledger_path(stored_run, 1))  # its decisions have the same ids
    assert "Recomputed under" not in asked(recomputed).text


def test_games_played_otherwise_are_one_at_a_time_cancellable_and_asked_twice_while_a_run_trains(
    asked: Asked, stored_run: RunPaths
):
    game = asked.links("/run/before/games", "game")[0]
    assert "What if?" in asked(game).text and 'name="orders"' in asked(game).text
    place = game.replace("/game?", "/what-if?")
    fields = {
        "phase": "S1901X",
        "power": "FRANCE",
        "orders": "",
        "version": "",
        "players": "dumbbot",
        "forks": "4096",
        "years": "20",
    }
    with file_lock(stored_run.lock):
        first = asked(place, None, **fields)
        assert first.status_code == 409 and "ask again" in first.text and "Play them anyway" in first.text
        assert asked.viewer.jobs._jobs == []
    name = dict(part.split("=") for part in game.partition("?")[2].split("&"))["game"].replace("%2F", "/")
    phase = re.search(r'name="phase" size="8" value="(\w+)"', asked(game).text)
    power = re.search(r"<option selected>(\w+)<", asked(game).text)
    assert phase and power
    fields |= {"phase": phase[1], "power": power[1]}
    assert asked(place, None, **fields).status_code == 303
    assert "At work: what-if" in asked(game).text and asked(game).headers["cache-control"] == "no-store"
    again = asked(place, None, **fields)
    assert again.status_code == 409 and "one thing at a time" in again.text
    cancel = re.search(r'action="(/run/before/cancel[^"]*)"', asked(game).text)
    assert cancel and asked(cancel[1].replace("&amp;", "&"), None, go="1").status_code == 303
    assert answer_of(asked, "what-if", name) == (None, "It was cancelled.") and "It was cancelled." in asked(game).text
    asked(place, None, **fields | {"forks": "2", "years": "1"})
    found, why = answer_of(asked, "what-if", name)
    assert found is not None and found["difference"]["mean"] == 0, why
    assert "Nothing changes for" in asked(game).text
    asked(place, None, **fields | {"orders": WICKED.replace("\x00", "")})
    assert answer_of(asked, "what-if", name)[0] is None and "is no legal order" in asked(game).text
    asked(place, None, **fields | {"orders": "A PAR H", "version": "newest"})
    assert answer_of(asked, "what-if", name)[0] is None and "both set the orders" in asked(game).text


def test_the_page_that_refuses_other_games_while_some_are_at_work_is_kept_up_to_date(asked: Asked):
    game = asked.links("/run/before/games", "game")[0]
    again = asked(game.replace("/game?", "/what-if?"))  # where its script asks for it
    assert again.status_code == 200 and 'data-part="job"' in again.text


def test_sql_has_the_limits_of_the_command_and_answers_as_table_picture_and_file(
    asked: Asked, stored_run: RunPaths, tmp_path: Path
):
    def query(text: str, more: str = "") -> str:
        answer = asked(f"/run/before/sql?ask=1{more}&query={text.replace(' ', '%20').replace('#', '%23')}")
        return answer.text if not more else answer.content  # type: ignore[return-value]

    page = query("select step, count(*) as rows, avg(value) as mean from metrics group by step order by step")
    assert page.count("<tr>") >= 3 and 'aria-label="rows, mean by step"' in page
    refused = {
        "select * from read_csv('/etc/passwd')": "external access",
        "copy decisions to '/tmp/x.csv'": "with SELECT",
        "drop table decisions": "with SELECT",
        "select 1; select 2": "with SELECT",
        "set enable_external_access = true": "with SELECT",
        "select nothing from decisions": "SQL failed",
        "@nothing": "no ready question",
    }
    for text, said in refused.items():
        assert said in query(text).replace("file system operations are disabled by configuration", "external access"), text
    assert "1000 rows; there are more" in query("select * from range(5000)")
    file = tmp_path / "answer.parquet"
    file.write_bytes(query("select * from range(5000)", "&file=parquet"))  # type: ignore[arg-type]
    assert pyarrow.parquet.read_table(file).num_rows == 5000
    assert query("@return_by_version_and_power").count("<tr>") > 2 and os.listdir(stored_run.root.parent)


def test_the_key_and_the_nonce_are_in_no_page_as_anything_but_themselves(asked: Asked):
    first, again = asked("/run/before").text, asked("/run/before").text
    nonces = {re.findall(r'nonce="([^"]+)"', text)[0] for text in (first, again)}
    assert len(nonces) == 2 and ADDRESS not in first


def test_a_parquet_file_that_lacks_rows_has_another_name_and_says_which(asked: Asked, stored_run: RunPaths):
    address = "/run/before/sql?ask=1&file=parquet&query=select%20count(*)%20from%20decisions"
    assert asked(address).headers["content-disposition"].endswith("before-answer.parquet")
    (stored_run.shards / "local" / "999999.arrow").write_bytes(b"damaged")
    answer = asked(address)
    assert answer.headers["content-disposition"].endswith("before-incomplete-answer.parquet")
    metadata = pyarrow.parquet.read_schema(io.BytesIO(answer.content)).metadata
    assert metadata[b"lacking"].startswith(b"the answer lacks rows of 1 damaged or missing files, first local/999999.arrow")
