"""A dry run tells beforehand what a run then takes, starts nothing and writes nothing, and refuses what the run would."""

import json
import random
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from entente.cli import dry_run
from entente.cli.dry_run import plan_train
from entente.decoding.architectures import read_architecture
from entente.inference.memory_plan import Machine, read_shape
from entente.reports.read_run import read_run
from entente.rollouts.rehearse_forks import unique_tokens
from entente.settings.find_model import tiny_shape
from entente.settings.layers import layered_settings
from entente.telemetry import cards
from entente.training.first_guess import matrix_rate
from entente.training.settings import TinyModelSettings
from storage.runs import RunPaths
from tests.chat_models import NO_GENERATION_PROMPT, chat_model
from tests.command import content
from tests.http_here import Quiet, answering
from tests.telemetry.fake_nvml import card


def size(*folders: Path) -> int:
    """Bytes of the files below."""
    return sum(path.stat().st_size for folder in folders for path in folder.rglob("*") if path.is_file())


def test_what_was_planned_is_what_a_run_takes(workplace, trained):
    summary, paths, _ = trained
    done = workplace("train", "--config", "small.toml", "--run", "second", "--dry-run", "--json")
    assert done.returncode == 0, done.stderr
    plan: dict[str, Any] = json.loads(done.stdout)
    work, disk = plan["work"], plan["disk"]
    assert work["decisions_at_most"] == 2 * 2 * 4 * 1 * 5
    assert summary["decisions"] <= work["decisions_at_most"]
    figures = read_run(paths).steps.values()

    def each(name: str) -> list[float]:
        return [step.get(name, 0.0) for step in figures]

    pairs = {
        "decisions": (summary["decisions"], work["decisions_about"]),
        "shards": (size(paths.shards), disk["shards_bytes_about"]),
        "adapters": (size(paths.adapters), disk["adapters_bytes_about"]),
        "checkpoints": (size(paths.checkpoints), disk["checkpoints_bytes_about"]),
        "run": (size(paths.root), disk["run_bytes_about"]),
        "prompts": (sum(each("rollout/prompt_tokens")), plan["tokens"]["prompts_of_the_run_about"]),
        "flow's memory": (2**20 * max(each("memory/flow_mib")), plan["memory"]["engine_process_bytes_about"]),
        "trainer's memory": (2**20 * max(each("memory/trainer_mib")), plan["memory"]["trainer_process_bytes_about"]),
    }
    assert {name: pair for name, pair in pairs.items() if not 0.5 <= pair[0] / pair[1] <= 2} == {}
    assert plan["tokens"]["basis"].endswith("with this model's tokenizer")
    assert plan["uses"]["model"].startswith("found: ") and plan["uses"]["state_cache"].startswith("found: ")
    measure = RunPaths(paths.root.parent / plan["time"]["basis"].removeprefix("seconds a decision of run '").removesuffix("'"))
    steps = read_run(measure).steps.values()
    seconds, decisions = (sum(step.get(name, 0) for step in steps) for name in ("time/step_s", "rollout/decisions"))
    assert plan["time"]["steps_s_about"] == pytest.approx(work["decisions_about"] * seconds / decisions, abs=1)


def test_the_plan_of_a_resumed_run_counts_the_steps_that_are_left(workplace, trained):
    before = content(trained[1].root)
    done = workplace("train", "--run", "first", "--resume", "--steps", "5", "--dry-run", "--json")
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert (plan["run"]["steps_done"], plan["work"]["steps"]) == (2, 3)
    assert plan["work"]["decisions_at_most"] == 3 * 2 * 4 * 1 * 5
    assert content(trained[1].root) == before


def test_a_plan_counts_the_adapters_that_stay_and_warns_of_memory_that_is_not_there(tmp_path: Path, monkeypatch):
    def planned(**changes: Any) -> dict[str, Any]:
        return plan_train(layered_settings("laptop", overrides={"runs_root": tmp_path, **changes}))

    one, many = planned(steps=1), planned(steps=500)
    assert many["disk"]["adapters_bytes_about"] == (20 + 500 // 25) * one["disk"]["adapters_bytes_about"]
    scored = planned(steps=500, evaluation={"every": 4}, rollouts={"opponents": "league"}, inference={"engine": "torch"})
    kept = 20 + sum(not (version % 25 and version % 4 and version % 10) for version in range(1, 501))
    assert scored["disk"]["adapters_bytes_about"] == kept * one["disk"]["adapters_bytes_about"], (
        "scores and the league keep theirs"
    )
    limited = planned(steps=500, retention={"shards_gb": 1e-6})["disk"]["shards_bytes_about"]
    assert limited == many["disk"]["shards_bytes_about"] * 100 // 500, "the newest 100 steps stay beyond the limit"
    assert one["training"]["learning_rate"] == "0.003" and "warning" not in one["memory"]
    needed = one["memory"]["needed_bytes_about"]
    # Which refuses only what cannot work at all.
    monkeypatch.setattr("entente.settings.find_model.check_memory", lambda *_, **__: None)
    monkeypatch.setattr(dry_run, "this_machine", lambda _: Machine(memory=needed - 1))
    assert "the run may need more memory than is there" in planned(steps=1)["memory"]["warning"]
    card = Machine(memory=10 * needed, gpu_free=2**20, gpu_total=2**30)
    monkeypatch.setattr(dry_run, "this_machine", lambda _: card)
    assert "the run may need more memory than is there" in planned(steps=1)["memory"]["warning"]


def test_a_trainer_that_cannot_use_the_card_is_warned_of_unless_it_is_to_use_the_cpu(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(cards, "visible_cards", lambda: (card(0),))
    monkeypatch.setattr(cards, "torch_cuda", lambda: None)
    settings = layered_settings("laptop", [], {"runs_root": tmp_path})
    assert "the installed torch is built for the CPU" in plan_train(settings)["uses"]["warning"]
    on_cpu = settings.model_copy(update={"training": settings.training.model_copy(update={"device": "cpu"})})
    assert "warning" not in plan_train(on_cpu)["uses"]


def test_without_a_tokenizer_the_figures_are_bounds(entente):
    plan = json.loads(entente("train", "--dry-run", "--json", "--steps", "1").stdout)
    assert "bounds" in plan["tokens"]["basis"]
    assert plan["tokens"]["prompt_about"] <= plan["tokens"]["request_at_most"] == 512
    assert plan["uses"]["model"] == "to be made from its recipe"


def test_the_shape_of_the_tiny_model_is_known_before_it_is_made(model: Path):
    recipe = json.loads((model / "recipe.json").read_text())["settings"]
    found, real = tiny_shape(TinyModelSettings(**recipe)), read_shape(model)
    assert replace(found, parameters=0) == replace(real, parameters=0)
    assert real.parameters <= found.parameters < 1.1 * real.parameters, "the vocabulary is not known before"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["train", "--dry-run", "--inference.max-model-length", "2048"], "exceeds the 1024 positions of model 'tiny'"),
        (
            ["train", "--inference.engine", "vllm", "--inference.kv-cache-gib", "9999"],
            "lower inference.kv_cache_gib from 9999 to",
        ),
        (["train", "--dry-run", "--inference.model", "./cut"], "model.safetensors' is cut or damaged (it has "),
        (["train", "--dry-run", "--inference.model", "./template"], "writes no generation prompt"),
        (["train", "--dry-run", "--runs-root", "cut/config.json"], "config.json' is not a folder"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_run_is_refused_before_anything_begins(entente, model: Path, words: list[str], sentence: str):
    shutil.copytree(model, entente.folder / "cut")
    with (entente.folder / "cut" / "model.safetensors").open("r+b") as weights:
        weights.truncate(weights.seek(0, 2) // 2)
    chat_model(model, entente.folder / "template", NO_GENERATION_PROMPT)
    before = content(entente.folder)
    done = entente(*words)
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("entente: ") and sentence in line
    assert {name: held for name, held in content(entente.folder).items() if "/.prefect" not in name} == before


HUB_MODEL = "/api/models/Qwen/Qwen2.5-1.5B-Instruct"


class Hub(Quiet):
    """A hub that has one model, and gives nothing of it away but its name."""

    asked: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self.asked.append(self.path)
        body = json.dumps({"id": "Qwen/Qwen2.5-1.5B-Instruct"}).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def hub() -> Iterator[str]:
    """Address of a hub on this machine."""
    Hub.asked.clear()
    with answering(Hub) as address:
        yield address


@pytest.mark.system
def test_a_hub_model_that_is_not_here_is_asked_for_and_not_fetched(entente, hub: str):
    cache = str(entente.folder / "hub")
    words = ["train", "--dry-run", "--json", "--preset", "gpu-24", "--training.device", "cpu"]
    done = entente.process(*words, HF_HUB_CACHE=cache, HF_ENDPOINT=hub, timeout=60)
    assert done.returncode == 0, done.stderr
    assert Hub.asked == [HUB_MODEL]
    plan = json.loads(done.stdout)
    assert plan["uses"]["model"] == "to be downloaded from the hub, which has it"
    assert "unknown" in plan["memory"]["needed"]
    assert list(entente.folder.iterdir()) == []


def test_a_device_that_is_not_there_is_refused(entente, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    done = entente("train", "--dry-run", "--training.device", "cuda")
    assert done.returncode == 2 and done.stderr.startswith("entente: training.device is 'cuda' but torch has no GPU here")


def test_before_any_run_the_time_follows_from_the_models_arithmetic(model: Path, tmp_path: Path, monkeypatch):
    assert matrix_rate(read_architecture(model)) > 0
    monkeypatch.setattr("entente.training.first_guess.matrix_rate", lambda sizes: 1e8)  # another moment measures another
    given = {"inference": {"model": str(model)}, "runs_root": str(tmp_path), "steps": 5000}
    settings = layered_settings("laptop", overrides=given)
    more = settings.model_copy(update={"rollouts": settings.rollouts.model_copy(update={"start_groups": 32})})
    plans = [plan_train(settings), plan_train(more)]
    assert plans[0]["time"]["basis"].startswith("the model's arithmetic")
    share = plans[1]["time"]["steps_s_about"] / plans[0]["time"]["steps_s_about"]
    assert share == pytest.approx(32 / settings.rollouts.start_groups, rel=0.01)


def test_decisions_and_rows_of_a_schedule_are_those_of_each_horizon(model: Path, tmp_path: Path):
    def work(steps: int, **rollouts: Any) -> tuple[int, int, int]:
        given = {"inference": {"model": str(model)}, "runs_root": str(tmp_path), "steps": steps, "rollouts": rollouts}
        plan = plan_train(layered_settings("laptop", overrides=given))
        return plan["work"]["decisions_about"], plan["work"]["decisions_at_most"], plan["disk"]["shards_bytes_about"]

    short, long = work(2, horizon_years=1), work(3, horizon_years=2)
    assert long[0] > 2 * short[0]
    for rollouts in ({"horizon_years": 1, "horizon_schedule": "3:2"}, {"horizon_years": 2, "horizon_schedule": "4:1"}):
        assert work(5, **rollouts) == pytest.approx([a + b for a, b in zip(short, long, strict=True)], abs=2)


def test_a_prefix_that_forks_share_is_one_work():
    rng = random.Random(1)
    for _ in range(100):
        paths = [[rng.randrange(3) for _ in range(rng.randrange(1, 6))] for _ in range(rng.randrange(1, 8))]
        assert unique_tokens(paths) == len({tuple(path[:end]) for path in paths for end in range(1, len(path) + 1)})
