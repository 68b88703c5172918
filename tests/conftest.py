"""What tests of several packages share: a small real model, positions to play, an engine whose odds are known, a
Prefect server, the `entente` command, and one whole run that it made.
"""

import json
import random
import shutil
import subprocess
import tarfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

import tests.plain_environment  # noqa: F401  # before what reads the environment
from entente.decoding.codec import Codec
from entente.game.board import Board
from entente.game.scripted import player
from entente.game.snapshot import Snapshot
from entente.inference.host import EngineHost
from entente.players.policy import Tokens
from entente.records.policy_version import BASE
from entente.settings.layers import layered_settings
from entente.telemetry import progress
from entente.telemetry.vllm_environment import find_vllm, vllm_problem
from entente.training.settings import recipe_hash
from storage.adapters import read_adapter
from storage.control import ControlDesk, read_control
from storage.runs import RunPaths
from tests.command import Entente
from tests.instant_engine import UniformEngine
from tests.made_once import made_once
from tests.prefect_home import put_database, serving

# How long one example takes says how busy the machine is, and holds no rule.
settings.register_profile("entente", deadline=None)
settings.load_profile("entente")

SMALL_MODEL = {"hidden": 64, "layers": 2, "source_games": 6, "imitation_steps": 12, "imitation_positions": 2}
"""Recipe of the model of the tests: real in every part, made in a few seconds, and no good at the game."""
_RECIPE = "\n".join(f"{name} = {value}" for name, value in SMALL_MODEL.items())
STORED_SETTINGS: dict[str, Any] = {
    "run": "before",
    "seed": 13,
    "steps": 2,
    "inference": {"engine": "torch", "max_sequences": 32, "max_model_length": 512},
    "tiny_model": {
        **{"hidden": 32, "layers": 1, "source_games": 6},
        **{"imitation_steps": 20, "imitation_positions": 2},
    },
    "cache": {"train_snapshots": 8, "held_out_snapshots": 6, "last_year": 1902},
    "prompts": {"chat": "none", "own_line": "in_place"},
    "rollouts": {"start_groups": 2, "forks_per_group": 4, "horizon_years": 1},
    "training": {"lora_rank": 2, "lora_alpha": 4.0, "learning_rate": 3e-3, "updates_per_step": 2},
    "evaluation": {"positions": 2, "opponents": ["random", "mover"]},
    "telemetry": {"wandb": "disabled", "report": False},
}
"""What the run of the fixture `stored_run` was trained with, as today's settings say it."""
SMALL_RUN = f"""
steps = 2
seed = 13
[tiny_model]
{_RECIPE}
[inference]
engine = "torch"
max_sequences = 32
[cache]
train_snapshots = 8
held_out_snapshots = 6
last_year = 1902
[rollouts]
start_groups = 2
forks_per_group = 4
[training]
learning_rate = 3e-3
[pipeline]
buffer_depth = 0
[evaluation]
positions = 2
[telemetry]
wandb = "disabled"
report = false
"""
"""Settings, over the laptop preset, of a whole training run that takes seconds where nothing has to be imported; rollouts and
training in turn, so that two steps are trained on two versions. Of so few forks some seeds have a step whose groups all came to
the same; with this one both steps have two groups to learn from."""


_SERVED = {
    "tests/cli/test_ask_a_run.py",
    "tests/cli/test_dry_run.py",
    "tests/cli/test_inspect.py",
    "tests/cli/test_replay_step.py",
    "tests/cli/test_watch.py",
    "tests/flows/test_damage.py",
    "tests/flows/test_end_to_end.py",
    "tests/prefect_server/test_database.py",
    "tests/reports/test_command.py",
    "tests/reports/test_compare.py",
    "tests/reports/test_explain.py",
    "tests/reports/test_inspect_rows.py",
    "tests/reports/test_page.py",
    "tests/reports/test_replay.py",
    "tests/tasks/test_dask_rollouts.py",
    "tests/tasks/test_rollout_worker.py",
}
"""Files of the fast tier that use a Prefect server, or the run that needs one. One worker process runs them all, and first,
because server and run take long to make. In the system tier each process has a server: one alone would have most of the work."""


_ONE_VLLM = {"tests/inference/test_contract.py": "vLLM", "tests/inference/test_served_vllm.py": "vLLM"}
"""The same of the system tier: files whose tests share a vLLM server."""


_SYSTEM = "mark.system"


_LONGEST = ("tests/training/", "tests/inference/", "tests/flows/", "tests/test_")
"""Where the longest files of the system tier are: begun last, they would leave one worker alone."""


TURNS = 6


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shuffle", type=int, metavar="SEED", help="run files, and the tests in each, in an order of this seed")
    parser.addoption(
        "--vllm", action="store_true", help="without an environment of vLLM nothing is run, in place of skipping its tests"
    )
    parser.addoption("--turn", metavar="COMMIT", help="of the tests marked 'in_turn' run a sixth, which one by a commit's hash")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Tests for vLLM's environment are not of this one.

    The system tier imports only files with a test of it: a fifth of all, and a worker imports all before its first test."""
    if collection_path.name == "in_vllm":
        return True  # tests/inference/test_vllm_environment.py runs these in vLLM's environment
    python = _is_system_tier(config) and collection_path.suffix == ".py"
    return True if python and _SYSTEM not in collection_path.read_text() else None


def in_turn(names: Sequence[str], commit: str) -> set[str]:
    """Every sixth name, from the one that the commit's hash chooses: CI's share of long tests whose rules others guard too."""
    return set(names[int(commit, 16) % TURNS :: TURNS])


def _is_system_tier(config: pytest.Config) -> bool:
    return str(config.getoption("markexpr")).startswith("system")


def _group(nodeid: str, config: pytest.Config) -> str:
    """The tests that run in one worker process together with this one: its shared group, or its file."""
    file = nodeid.partition("::")[0]
    shared = _ONE_VLLM if _is_system_tier(config) else dict.fromkeys(_SERVED, "Prefect")
    return shared.get(file, file)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `--dist loadgroup` tests go to workers by `_group`: marks do not tell, for xdist 3.8 loses them with pytest 9.2."""
    from xdist.scheduler import LoadScopeScheduling

    class ByGroup(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return _group(nodeid, config)

    return ByGroup(config, log) if config.getvalue("dist") == "loadgroup" else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Long files first. A test outside its group would make the shared fixture a second time, so it is refused."""
    if (commit := config.getoption("turn")) is not None:
        taken = in_turn(sorted(item.nodeid for item in items if item.get_closest_marker("in_turn")), commit)
        left_out = [item for item in items if item.get_closest_marker("in_turn") and item.nodeid not in taken]
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=left_out)
    if (seed := config.getoption("shuffle")) is not None:
        rng = random.Random(seed)
        files = {path: rng.random() for path in dict.fromkeys(item.path for item in items)}
        items.sort(key=lambda item: (files[item.path], rng.random()))
    if _is_system_tier(config):
        items.sort(key=lambda item: next((rank for rank, start in enumerate(_LONGEST) if item.nodeid.startswith(start)), 9))
    else:
        items.sort(key=lambda item: _group(item.nodeid, config) != "Prefect")
    vllm = find_vllm()
    if config.getoption("vllm") and vllm_problem(vllm):
        raise pytest.UsageError("--vllm: {}: {}".format(*(vllm_problem(vllm) or ())))
    for item in items:
        if item.get_closest_marker("vllm") and (vllm is None or not vllm.vllm):
            item.add_marker(pytest.mark.skip(reason="there is no environment of vLLM: `make setup-vllm` makes it"))
        used = set(getattr(item, "fixturenames", ()))
        quick = not item.get_closest_marker("system") and not item.get_closest_marker("slow")
        if item.get_closest_marker("system") and _SYSTEM not in item.path.read_text():
            raise pytest.UsageError(f"{item.nodeid} is of the system tier, so its file has to say pytest.{_SYSTEM}")
        if "prefect_server" in used and quick and item.nodeid.partition("::")[0] not in _SERVED:
            raise pytest.UsageError(f"{item.nodeid} uses a Prefect server: add its file to _SERVED in tests/conftest.py")


@pytest.fixture(scope="session")
def model(small_model: Path) -> Path:
    """Folder of a small model."""
    return small_model


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, for fixtures of the session: a file of tests may have a `model` of its own."""
    from entente.training.settings import TinyModelSettings
    from entente.training.tiny_model import make_tiny_model

    settings = TinyModelSettings(**SMALL_MODEL)
    return make_tiny_model(made_once(tmp_path_factory, "models", lambda folder: make_tiny_model(folder, settings)), settings)


@pytest.fixture(scope="session")
def tokens(model: Path) -> Tokens:
    """Codec and table builder of the small model."""
    return Tokens(Codec(model))


def _positions(games: int, phases: int) -> list[Snapshot]:
    found = []
    for game in range(games):
        rng, board = random.Random(game), Board.start()
        while board.phase_type != "M" or (len(found) == game and board.year < 1901 + phases):
            board.step({power: player("mover")(legal, rng) for power, legal in board.legal_orders().items()})
        found.append(board.snapshot(game_id=f"game-{game}", seed=game, source="test"))
    return found


@pytest.fixture(scope="session")
def positions() -> list[Snapshot]:
    """Eight movement phases of 1903, each from a game of its own."""
    return _positions(games=8, phases=2)


@pytest.fixture(scope="session")
def write_adapter(model: Path) -> Callable[..., Path]:
    """Write an adapter of random weights for the small model: `write_adapter(folder, seed=1, scale=0.3)`."""
    import torch

    from entente.training.policy import Policy
    from entente.training.settings import TrainingSettings

    def write(folder: Path, *, seed: int, scale: float, rank: int = 8) -> Path:
        policy = Policy(model, TrainingSettings(lora_rank=rank, lora_alpha=2 * rank))
        torch.manual_seed(seed)
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.copy_(scale * torch.randn_like(parameter))
        policy.save_adapter(folder)
        return folder

    return write


@pytest.fixture
def make_adapter(write_adapter: Callable[..., Path], tmp_path: Path) -> Callable[..., Path]:
    """An adapter of random weights in a folder of its own: `make_adapter(seed=1, scale=0.3)`."""

    def make(*, seed: int, scale: float, rank: int = 8) -> Path:
        return write_adapter(tmp_path / f"adapter-{seed}", seed=seed, scale=scale, rank=rank)

    return make


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What onlookers hear."""
    heard: list[str] = []
    onlooker = progress.Reporter()
    monkeypatch.setattr(onlooker, "say", heard.append)
    monkeypatch.setattr(progress, "_reporter", onlooker)
    return heard


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A headless Chromium that the system brings.

    No longer than a module: while it is open an event loop runs in this thread, and no other test could begin one.
    """
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if program is None:
        pytest.skip("this system has no Chromium to open the page with")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield opened
        opened.close()


def overheard(page: Any) -> tuple[list[str], list[str]]:
    """What a page complains of, and the addresses that it asks for, from now on."""
    complaints, requests = list[str](), list[str]()
    for event in ("console", "pageerror", "dialog"):
        page.on(event, lambda said: complaints.append(getattr(said, "text", str(said))))
    page.on("request", lambda request: requests.append(request.url))
    return complaints, requests


@pytest.fixture
def uniform_engine() -> type[UniformEngine]:
    """The class, so that a test may make one that fails."""
    return UniformEngine


@pytest.fixture(scope="session")
def host() -> Iterator[EngineHost]:
    """The engine client's thread."""
    host = EngineHost("test-engine")
    yield host
    host.close()


@pytest.fixture(scope="session")
def prefect_home(pytestconfig: pytest.Config) -> Callable[[Path], Path]:
    """Give a server's home a database that has its tables already; not for tests of a first start."""
    return lambda home: put_database(home, pytestconfig)


@pytest.fixture(scope="session")
def prefect_server(prefect_home: Callable[[Path], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A Prefect server with a database of its own, so that not every command has to start one; its address."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PREFECT_SERVER_ANALYTICS_ENABLED", "false")
        patch.setenv("DO_NOT_TRACK", "1")
        from prefect.events.worker import EventsWorker
        from prefect.logging.handlers import APILogWorker
        from prefect.settings import PREFECT_API_URL, temporary_settings

        home = prefect_home(tmp_path_factory.mktemp("prefect"))
        with serving(home) as address, temporary_settings({PREFECT_API_URL: address}):
            yield address
            for service in (APILogWorker, EventsWorker):  # without a server they would try again for a minute
                service.drain_all(timeout=10)


@pytest.fixture
def entente(tmp_path: Path) -> Entente:
    """The command in an empty folder."""
    return Entente(tmp_path)


@pytest.fixture(scope="session")
def workplace(tmp_path_factory: pytest.TempPathFactory, prefect_server: str, small_model: Path) -> Entente:
    """The command in a folder with `small.toml`; runs made there share their model, state cache and Prefect server."""
    folder = tmp_path_factory.mktemp("workplace")
    (folder / "runs" / "_models").mkdir(parents=True)
    (folder / "runs" / "_models" / small_model.name).symlink_to(small_model)  # the same recipe: it need not be made again
    (folder / "small.toml").write_text(SMALL_RUN)
    return Entente(folder, PREFECT_API_URL=prefect_server)


@pytest.fixture(scope="session")
def trained(
    workplace: Entente, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, Any], RunPaths, subprocess.CompletedProcess[str]]:
    """One whole run of two steps, real in every part: its summary, its folder, and what was said."""
    runs, words = workplace.folder / "runs", ("train", "--config", "small.toml", "--run", "first", "--json")

    def train(folder: Path) -> None:
        done = workplace.process(*words)
        assert done.returncode == 0, done.stderr
        for name in ("first", "_state_cache"):
            shutil.move(runs / name, folder / name)
        (folder / "said.json").write_text(json.dumps([done.stdout, done.stderr]))

    made = made_once(tmp_path_factory, "first_run", train)
    for name in ("first", "_state_cache"):
        shutil.copytree(made / name, runs / name, dirs_exist_ok=True)
    out, err = json.loads((made / "said.json").read_text())
    return json.loads(out.splitlines()[-1]), RunPaths(runs / "first"), subprocess.CompletedProcess(words, 0, out, err)


@pytest.fixture
def stored_run(tmp_path: Path) -> RunPaths:
    """A run `before` of two steps on a tiny model of 29,000 weights, beside its model; a copy of its own to change.

    Its files were made once with `entente train`, and its settings are written here. Its state cache is left out.
    """
    with tarfile.open(Path(__file__).parent / "stored_runs" / "two_steps.tar.xz") as archive:
        archive.extractall(tmp_path / "stored", filter="data")
    paths = RunPaths(tmp_path / "stored" / "before")
    settings = layered_settings("laptop", (), STORED_SETTINGS | {"runs_root": tmp_path / "stored"})
    paths.settings.write_text(settings.model_dump_json())
    (model,) = (tmp_path / "stored" / "_models").iterdir()
    model.rename(model.with_name(f"tiny-{recipe_hash(settings.tiny_model, settings.prompts)}"))  # of today's settings
    return paths


@pytest.fixture
def run(trained: Any, tmp_path: Path) -> Callable[..., tuple[RunPaths, ControlDesk]]:
    """A copy of the small run, as it would be at work with this version served."""

    def make(version: int = 0) -> tuple[RunPaths, ControlDesk]:
        _, first, _ = trained
        root = tmp_path / "runs"
        for shared in ("_models", "_state_cache"):
            (root / shared).parent.mkdir(exist_ok=True)
            (root / shared).symlink_to(first.root.parent / shared)
        paths = RunPaths(root / "mine")
        shutil.copytree(first.root, paths.root)
        paths.summary.unlink()
        before = read_control(paths)
        desk = ControlDesk(paths, base_model=before.base_model, plays=before.plays, max_policy_lag=2)
        _serve(paths, desk, version)
        return paths, desk

    return make


@pytest.fixture
def serve() -> Callable[[RunPaths, ControlDesk, int], None]:
    """Have a run serve a version: `serve(paths, desk, 2)`."""
    return _serve


def _serve(paths: RunPaths, desk: ControlDesk, version: int) -> None:
    desk.serve(read_adapter(paths, version) if version else BASE)
