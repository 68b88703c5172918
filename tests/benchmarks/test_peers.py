"""Figures against a peer are of what they say, and a peer that is missing gives none."""

from pathlib import Path

import pytest

from benchmarks.peers import bench
from benchmarks.peers.bench import take_turns
from benchmarks.peers.trl_program import padded
from benchmarks.trainer_cases import Case, made_up_batch
from entente.cli import main
from entente.settings.layers import layered_settings
from entente.training.settings import TrainingSettings

ROOT = Path(__file__).resolve().parents[2]


def pins(name: str) -> dict[str, str]:
    lines = (line.split("#")[0].strip() for line in (ROOT / "deploy" / "locks" / name).read_text().splitlines())
    return dict(line.split(";")[0].strip().split("==") for line in lines if "==" in line)


def test_both_arms_run_on_the_same_libraries():
    """Of what both environments have and what computes, the versions are the same."""
    theirs, ours = pins("peers-trl.txt"), pins("cpu.lock")
    computing = {"torch", "transformers", "peft", "accelerate", "numpy", "pyarrow", "tokenizers"} & theirs.keys()
    assert computing and {package: theirs[package] for package in computing} == {package: ours[package] for package in computing}


def test_arms_take_turns_and_the_first_round_does_not_count():
    order: list[str] = []
    seconds = {"ours": iter([100.0, 1.0, 2.0, 4.0]), "theirs": iter([1.0, 3.0, 8.0, 8.0])}

    def measure(name: str) -> float:
        order.append(name)
        return next(seconds[name])

    rounds = take_turns({name: lambda name=name: measure(name) for name in seconds}, 3)
    assert order == ["theirs", "ours", "ours", "theirs", "theirs", "ours", "ours", "theirs"]
    assert rounds == [{"ours": 1.0, "theirs": 3.0}, {"ours": 2.0, "theirs": 8.0}, {"ours": 4.0, "theirs": 8.0}]


def test_our_arm_computes_on_a_cpu_in_float32_as_trl_does(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    def made(model: Path, training: TrainingSettings) -> None:
        raise RuntimeError(f"a policy on {training.device} in {training.dtype}")

    monkeypatch.setattr(bench, "check_python", lambda _: None)
    monkeypatch.setattr(bench, "record_rows", lambda *_: (made_up_batch(Case(positions=1, forks=2), vocabulary=64), None))
    monkeypatch.setattr(bench, "model_of", lambda _: tmp_path)
    monkeypatch.setattr(bench, "Policy", made)
    settings = layered_settings("laptop", overrides={"training": {"device": "auto", "dtype": "bfloat16"}})
    with pytest.raises(RuntimeError, match="a policy on cpu in float32"):
        bench.bench_peers(settings, [], tmp_path)


@pytest.mark.parametrize(("words", "why"), [(["--rounds", "0"], "Must be >= 1"), ([], "docs/performance.md")])
def test_the_command_refuses_at_once_what_it_cannot_measure(words: list[str], why: str, capsys, monkeypatch, tmp_path: Path):
    monkeypatch.setattr("entente.prefect_server.environment.prepare_environment", lambda **how: None)
    assert main.run(["bench", "peers", "--trl-python", str(tmp_path / "python"), *words]) == 2
    assert why in capsys.readouterr().err


def test_rows_are_padded_as_trl_pads_them():
    batch = made_up_batch(Case(positions=2, forks=3, own=9, completion=4, spread=0.5), vocabulary=64)
    names = ("input_ids", "input_offsets", "prompt_lens", "completion_offsets")
    rows = {name: getattr(batch, name) for name in names} | {"advantages": batch.returns}
    for first in range(0, len(batch.prompt_lens), 2):
        found = padded(rows, first, 2)
        for place, row in enumerate(range(first, min(first + 2, len(batch.prompt_lens)))):
            kept = [found[f"{part}_ids"][place][found[f"{part}_mask"][place] == 1].tolist() for part in ("prompt", "completion")]
            assert kept[0] + kept[1] == batch.input_ids[batch.input_offsets[row] : batch.input_offsets[row + 1]].tolist()
            assert len(kept[0]) == batch.prompt_lens[row]
