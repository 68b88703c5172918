"""`entente bundle`: a real run's step goes into one file, and comes out of it again without the run."""

import json
import lzma
import shutil
import tarfile
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import pytest

import pipeline.step_bundle
from cli import main
from decoding.model_files import base_identity
from pipeline.bundle_file import unpack_bundle_file, write_bundle_file
from storage.ledger import MAIN
from storage.outcome import outcome_path
from storage.runs import RunPaths

Bundle = Callable[..., tuple[int, str, str]]


@pytest.fixture
def bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Bundle:
    """`entente bundle WORDS` in this process, in an empty folder: exit code, standard output and error."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr("cli.environment.prepare_environment", lambda **how: None)

    def run(*words: str) -> tuple[int, str, str]:
        code = main.run(["bundle", *words])
        told = capsys.readouterr()
        return code, told.out, told.err

    return run


@pytest.fixture(scope="module")
def written(trained, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundle of the run's second step."""
    file = tmp_path_factory.mktemp("bundles") / "step2.bundle"
    assert (
        main.run(["bundle", "--run", "first", "--step", "2", "--to", str(file), "--runs-root", str(trained[1].root.parent)]) == 0
    )
    return file


def changed(file: Path, folder: Path, change: Callable[[Path, dict], object]) -> Path:
    """Another bundle, sealed as it should be: its files and facts as `change` leaves them."""
    facts = unpack_bundle_file(file, folder / "inside")
    change(folder / "inside", facts)
    write_bundle_file(folder / "changed.bundle", folder / "inside", facts)
    return folder / "changed.bundle"


def test_a_stranger_repeats_the_step_bit_for_bit_without_the_run(written: Path, bundle: Bundle, trained):
    code, out, err = bundle("--verify", str(written), "--json")
    facts = json.loads(out.splitlines()[-1])
    assert code == 0, err
    assert facts["agrees"] and facts["bitwise"] and facts["otherwise_here"] == [] and facts["step"] == 2
    assert facts["farthest_off"] == {"loss": 0.0, "gradient_norm": 0.0, "weights": 0.0}
    assert "it comes out again bit for bit" in out
    assert not list(Path.cwd().iterdir()), "nothing is left behind"


def test_a_bundle_names_no_folder_of_this_machine_and_no_setting_that_its_step_needs_not(written: Path, trained, tmp_path: Path):
    facts = unpack_bundle_file(written, tmp_path / "inside")
    contents = (
        b"".join(file.read_bytes() for file in (tmp_path / "inside").rglob("*") if file.is_file()) + json.dumps(facts).encode()
    )
    for local in (trained[1].root.parent, Path.home(), Path(__file__).parents[2], Path(pipeline.__file__).parents[1]):
        assert str(local.resolve()).encode() not in contents
    outcome = {"loss", "gradient_norm", "adapter_hash", "repeated"}
    assert set(facts) == {"run", "step", "lineage", "training", "storage", "base", "environment", *outcome}
    suffixes = {file.suffix for file in (tmp_path / "inside").rglob("*") if file.is_file()}
    assert suffixes == {".arrow", ".json", ".safetensors"}


def test_a_state_that_is_no_longer_kept_is_made_again_and_the_bundle_has_the_same_bytes(
    written: Path, copied: RunPaths, bundle: Bundle
):
    shutil.rmtree(copied.checkpoint(1))
    shutil.rmtree(copied.adapter(2))
    shutil.rmtree(copied.adapter(1))
    renamed = copied.root.rename(copied.root.with_name("first"))
    code, out, err = bundle("--run", "first", "--step", "2", "--to", "again.bundle", "--runs-root", str(renamed.parent))
    assert code == 0 and "it comes out again here, bit for bit" in out, err
    assert sha256(Path("again.bundle").read_bytes()).digest() == sha256(written.read_bytes()).digest()


def test_the_first_step_begins_with_the_first_weights(bundle: Bundle, trained):
    root = str(trained[1].root.parent)
    assert bundle("--run", "first", "--step", "1", "--to", "step1.bundle", "--runs-root", root)[0] == 0
    with tarfile.open("step1.bundle") as tar:
        assert not [name for name in tar.getnames() if name.startswith("run/checkpoints")]
    assert bundle("--verify", "step1.bundle")[0] == 0


def test_elsewhere_the_result_may_be_off_within_a_bound_that_is_said(written: Path, bundle: Bundle, tmp_path: Path):
    def otherwise(folder: Path, facts: dict) -> None:
        facts["environment"]["torch"] = "1.0"
        file = outcome_path(RunPaths(folder / "run"), MAIN, 2)
        outcome = json.loads(file.read_bytes())
        outcome["updates"][0]["micro_batches"][0] += 1e-6
        file.write_text(json.dumps(outcome))

    code, out, err = bundle("--verify", str(changed(written, tmp_path, otherwise)))
    assert code == 0 and "not the same here: torch 1.0, here " in out and "it comes out again within these bounds" in out, err
    assert "loss of a micro-batch 1e-06 (bound 0.0001)" in out


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_step_that_does_not_come_out_again_is_one_sentence_and_exit_code_1(
    written: Path, bundle: Bundle, tmp_path: Path, elsewhere: bool
):
    def spoil(folder: Path, facts: dict) -> None:
        if elsewhere:
            facts["environment"]["torch"] = "1.0"
        file = outcome_path(RunPaths(folder / "run"), MAIN, 2)
        outcome = json.loads(file.read_bytes())
        outcome["updates"][-1]["micro_batches"][0] += 0.01 if elsewhere else 1e-9
        file.write_text(json.dumps(outcome))

    code, out, err = bundle("--verify", str(changed(written, tmp_path, spoil)))
    assert code == 1 and "comes out again" not in out
    assert "step 2 differs: the loss was recorded as" in err.splitlines()[-1]


def test_a_step_that_does_not_repeat_where_it_was_made_can_be_reported(copied: RunPaths, bundle: Bundle):
    file = outcome_path(copied, MAIN, 2)
    outcome = json.loads(file.read_bytes())
    outcome["updates"][0]["micro_batches"][0] += 0.5
    file.write_text(json.dumps(outcome))
    code, out, _ = bundle("--run", "copy", "--step", "2", "--runs-root", str(copied.root.parent))
    assert code == 0 and "it does not come out again here: micro-batch 1 of update 1 of step 2 differs" in out
    code, out, _ = bundle("--verify", "copy-step2.bundle")
    assert code == 1 and "where it was written it did not come out again" in out


def test_a_base_that_is_not_included_is_found_by_its_folder_and_checked(
    trained, bundle: Bundle, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, make_adapter
):
    monkeypatch.setattr(pipeline.step_bundle, "MOST_BASE_BYTES", 10)
    root = trained[1].root.parent
    assert bundle("--run", "first", "--step", "2", "--to", "bare.bundle", "--runs-root", str(root))[0] == 0
    assert Path("bare.bundle").stat().st_size < 2_000_000
    code, _, err = bundle("--verify", "bare.bundle")
    assert code == 2 and "is not in it and not on this machine: name its folder with --base" in err
    (base,) = (root / "_models").glob("tiny-*")
    assert bundle("--verify", "bare.bundle", "--base", str(base))[0] == 0
    other = shutil.copytree(base, tmp_path / "other")
    config = json.loads((other / "config.json").read_bytes())
    (other / "config.json").write_text(json.dumps(config | {"bos_token_id": 1}))
    code, _, err = bundle("--verify", "bare.bundle", "--base", str(other))
    assert code == 2 and "the hashes differ" in err


def _a_huge_base(folder: Path, facts: dict) -> None:
    """A config that asks for a hundred thousand blocks, with the hashes of this config."""
    file = folder / "model" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_bytes()) | {"num_hidden_layers": 100_000}))
    facts["base"]["identity"] = base_identity(folder / "model")


def _a_million_threads(folder: Path, facts: dict) -> None:
    file = outcome_path(RunPaths(folder / "run"), MAIN, 2)
    file.write_text(json.dumps(json.loads(file.read_bytes()) | {"threads": 1_000_000}))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        pytest.param(lambda folder, facts: facts.update(step=0), "is not of this release: step", id="no step"),
        pytest.param(lambda folder, facts: facts["training"].update(novelty=1), "training.novelty", id="a later setting"),
        pytest.param(lambda folder, facts: facts["training"].update(loss="nobody:x"), "training.loss", id="a loss of a package"),
        pytest.param(lambda folder, facts: facts["training"].update(learning_rate=1), "other training settings", id="a setting"),
        pytest.param(lambda folder, facts: (folder / "model" / "config.json").write_text("[]"), "cannot be repeated", id="base"),
        pytest.param(lambda folder, facts: shutil.rmtree(folder / "run" / "shards"), "is gone", id="no rows"),
        pytest.param(lambda folder, facts: shutil.rmtree(folder / "run" / "ledger"), "step 2 never was", id="no ledger"),
        pytest.param(_a_million_threads, "threads", id="a million threads"),
        pytest.param(_a_huge_base, "the config of its base model does not fit the weights", id="a huge base"),
    ],
)
def test_a_sealed_bundle_that_does_not_fit_is_one_sentence(written: Path, bundle: Bundle, tmp_path: Path, change, sentence: str):
    code, out, err = bundle("--verify", str(changed(written, tmp_path, change)))
    assert code == 2 and out == "" and sentence in err.splitlines()[-1]
    assert str(tmp_path / "changed.bundle") in err and "entente-bundle-" not in err


def test_a_changed_bundle_is_refused_before_anything_is_loaded(written: Path, bundle: Bundle, tmp_path: Path):
    whole = bytearray(lzma.decompress(written.read_bytes()))
    whole[len(whole) // 2] ^= 1
    (tmp_path / "x.bundle").write_bytes(lzma.compress(whole))
    code, _, err = bundle("--verify", str(tmp_path / "x.bundle"))
    assert code == 2 and "was changed" in err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        pytest.param([], "name the step to bundle with --step", id="nothing"),
        pytest.param(["--verify", "x", "--step", "2"], "--verify takes a file and no run", id="both"),
        pytest.param(["--verify", "x"], "there is no bundle 'x'", id="no file"),
        pytest.param(["--run", "first", "--step", "9"], "step 9 never was", id="no step"),
        pytest.param(["--run", "none", "--step", "1"], "there is no run in", id="no run"),
        pytest.param(["--run", "first", "--step", "1", "--base", "y"], "--base belongs to --verify", id="base"),
        pytest.param(["--run", "first", "--step", "1", "--to", "."], "'.' exists", id="a folder"),
    ],
)
def test_what_cannot_be_asked_for_is_one_sentence_and_exit_code_2(bundle: Bundle, trained, words: list[str], sentence: str):
    root = [] if "--verify" in words else ["--runs-root", str(trained[1].root.parent)]
    code, out, err = bundle(*words, *root)
    assert code == 2 and out == "" and sentence in err.splitlines()[-1]
