"""The main job, run as a user runs it: `entente train` in a process of its own, real vLLM, real Prefect, real trainer."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from storage.adapters import read_adapter
from storage.index import connect
from storage.ledger import read_ledger, recorded_steps
from storage.runs import RunPaths

pytestmark = pytest.mark.vllm

SMALL = """
steps = 2
[inference]
max_model_length = 512
max_sequences = 32
[tiny_model]
hidden = 64
layers = 2
source_games = 6
imitation_steps = 12
imitation_positions = 2
[cache]
train_snapshots = 8
held_out_snapshots = 6
last_year = 1902
[rollouts]
start_groups = 2
forks_per_group = 4
[evaluation]
positions = 4
powers_per_position = 1
bootstrap = 100
[telemetry]
wandb = "disabled"
"""
PROMISED = {
    "base_score",
    "base_ci",
    "trained_score",
    "trained_ci",
    "random_score",
    "teacher_score",
    "steps",
    "wall_s",
    "decisions",
    "max_policy_lag_seen",
    "orders_rejected",
    "run",
}


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder to run in; runs of this module share its model, cache and Prefect home."""
    folder = tmp_path_factory.mktemp("workplace")
    (folder / "small.toml").write_text(SMALL)
    return folder


def train(workplace: Path, *flags: str, program: str = "from cli.main import main; main()") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", program, "train", "--config", "small.toml", *flags]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PREFECT_")}
    return subprocess.run(command, cwd=workplace, capture_output=True, text=True, env=environment, timeout=500)


@pytest.fixture(scope="module")
def trained(workplace: Path) -> tuple[dict, RunPaths, str]:
    """One run of two steps: its summary, its folder, what was said on standard error."""
    done = train(workplace, "--run", "first", "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), RunPaths(workplace / "runs" / "first"), done.stderr


def test_the_last_line_is_the_promised_summary(trained):
    summary, paths, said = trained
    assert set(summary) >= PROMISED
    assert summary["steps"] == 2 and summary["orders_rejected"] == 0 and summary["max_policy_lag_seen"] == 0
    for name in ("base", "trained"):
        low, high = summary[f"{name}_ci"]
        assert low <= summary[f"{name}_score"] <= high
    assert Path(summary["run"]).name == "first" and json.loads((paths.root / "summary.json").read_text()) == summary
    assert "step 2/2" in said and "Traceback" not in said


def test_the_run_folder_holds_everything_that_the_design_names(trained):
    _, paths, _ = trained
    settings = json.loads(paths.settings.read_text())
    assert settings["steps"] == 2 and settings["rollouts"]["horizon_years"] == 1, "preset and file, resolved"
    assert recorded_steps(paths, "main") == [1, 2]
    assert sorted(path.name for path in paths.adapters.iterdir()) == ["v000001", "v000002"]
    assert sorted(path.name for path in paths.checkpoints.iterdir()) == ["step_000001", "step_000002"]
    steps = [json.loads(line)["step"] for line in paths.metrics.read_text().splitlines()]
    assert steps == [0, 1, 2, 3], "one line for the probe, one a step, one for the scores"
    assert json.loads(paths.metrics.read_text().splitlines()[0])["mismatch/largest"] < 1e-4


def test_each_version_that_was_published_drew_the_next_step_s_rows(trained):
    _, paths, _ = trained
    with connect(paths.root) as connection:
        rows = connection.sql(
            "select policy_version, adapter_hash, min(start_group), max(start_group) from decisions group by all order by 1"
        )
        assert rows.fetchall() == [(0, "base", 0, 1), (1, read_adapter(paths, 1).adapter_hash, 2, 3)]


def test_every_trained_row_stands_in_one_step_at_lag_zero(trained):
    _, paths, _ = trained
    ledgers = [read_ledger(paths, "main", step) for step in (1, 2)]
    used = [row for ledger in ledgers if ledger is not None for row in ledger["decision_id"].to_pylist()]
    lags = [lag for ledger in ledgers if ledger is not None for lag in ledger["policy_lag"].to_pylist()]
    assert len(used) == len(set(used)) > 0 and set(lags) == {0}


def test_overlapped_steps_stay_within_the_staleness_budget(workplace):
    done = train(
        workplace, "--run", "ahead", "--json", "--steps", "3", "--pipeline.buffer-depth", "1", "--pipeline.no-deterministic",
        "--storage.max-policy-lag", "1",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["max_policy_lag_seen"] == 1


@pytest.mark.parametrize(
    "lie",
    [
        "lambda request, eos: honest(__import__('dataclasses').replace(request, temperature=0.6), eos)",
        "lambda request, eos: unmasked(honest(request, eos))",
    ],
    ids=["another temperature", "no mask for one token"],
)
def test_a_run_whose_sampler_lies_refuses_to_start_and_trains_nothing(workplace, lie, request):
    """The engine draws under another temperature, or with a wider legal set, than its rows say."""
    name = "liar-" + str(abs(hash(lie)) % 1000)
    program = textwrap.dedent(
        f"""
        import numpy as np
        from cli.main import main
        import cli.environment
        import inference.embedded
        from decoding.legal_table import LegalTable

        def unmasked(params):
            # Every node that offers a choice also offers the first token of the vocabulary that it should not.
            table = LegalTable.from_bytes(params.extra_args["legal_table"])
            wide = int(np.argmax(np.diff(table.offsets)))
            low, high = table.offsets[wide], table.offsets[wide + 1]
            keep = np.r_[0:high - 1, high:len(table.token_ids)]
            offsets = table.offsets.copy()
            offsets[wide + 1:] -= 1
            narrowed = LegalTable(offsets=offsets, token_ids=table.token_ids[keep], next_nodes=table.next_nodes[keep],
                                  longest=table.longest)
            try:
                LegalTable.from_bytes(narrowed.to_bytes())
                params.extra_args["legal_table"] = narrowed.to_bytes()
            except Exception:
                pass  # its longest path was cut: leave this one honest
            return params

        def install():
            import inference.sampling
            honest = inference.sampling.sampling_params
            inference.sampling.sampling_params = {lie}

        start = inference.embedded.EmbeddedEngine.start
        async def lying_start(self):
            await start(self)
            install()
        inference.embedded.EmbeddedEngine.start = lying_start
        main()
        """
    )
    done = train(workplace, "--run", name, program=program)
    assert done.returncode == 1
    assert "trainer and engine disagree on version 0" in done.stderr and "Traceback" not in done.stderr
    paths = RunPaths(workplace / "runs" / name)
    assert recorded_steps(paths, "main") == [] and not list(paths.adapters.iterdir())


@pytest.mark.slow
def test_a_seed_repeats_a_whole_run(workplace, trained):
    _, first, _ = trained
    done = train(workplace, "--run", "again", "--json")
    assert done.returncode == 0, done.stderr
    again = RunPaths(workplace / "runs" / "again")
    for version in (1, 2):
        assert read_adapter(again, version).adapter_hash == read_adapter(first, version).adapter_hash
    facts = "select decision_id, policy_version, orders_rejected, centres_gained from decisions order by 1"
    with connect(first.root) as one, connect(again.root) as other:
        assert one.sql(facts).fetchall() == other.sql(facts).fetchall()
