"""What this code uses of vLLM is found by reading, and a name that is missing or changed is told by name."""

from collections.abc import Callable
from pathlib import Path

import pytest

from scripts.check_gpu import __main__ as command
from scripts.check_gpu import contract, wheels
from scripts.check_gpu.check import answer, troubles
from scripts.check_gpu.lock import ROOT
from scripts.check_gpu.source import VllmSource
from scripts.check_gpu.uses import Use, collect
from telemetry.errors import EntenteError

OURS = """
import os
from vllm import SamplingParams
from vllm.proc import Base, Update
os.environ["VLLM_SWITCH"] = "1"
os.environ.update(VLLM_OTHER="2")

class Ours(Base):
    def apply(self, logits): ...

def use(update: "Update | None", params: SamplingParams):
    for row in update.added:
        row.index
    params.seed
    SamplingParams(1, seed=3)
    engine = Engine.made(1)
    return engine.step()[0].config.size

def fallback():
    try:
        from vllm.proc import Newer
    except ImportError:
        return None

from vllm.engine import Engine
"""

THEIRS = {
    "__init__.py": "MODULE_ATTRS = {}\nimport typing\nif typing.TYPE_CHECKING:\n    from .params import SamplingParams\n",
    "params.py": "class SamplingParams:\n    temperature: float = 1\n    seed: int | None = None\n",
    "envs.py": 'variables = {"VLLM_SWITCH": 1, "VLLM_OTHER": 2}\n',
    "proc/__init__.py": "from vllm.proc.interface import Base, Update\n",
    "proc/interface.py": (
        "from abc import ABC, abstractmethod\nclass Row:\n    index: int\n"
        "class Update:\n    added: list[Row]\n"
        "class Base(ABC):\n    @abstractmethod\n    def apply(self, logits): ...\n"
    ),
    "engine.py": (
        "class Config:\n    size: int = 0\n"
        "class Output:\n    def __init__(self, config: Config | None):\n        self.config = config\n"
        "class Engine:\n    @classmethod\n    def made(cls, number, *, fast=False) -> 'Engine': ...\n"
        "    def step(self) -> list[Output]: ...\n"
    ),
}  # fmt: skip


@pytest.fixture
def uses(tmp_path: Path) -> list[Use]:
    (tmp_path / "ours" / "inference").mkdir(parents=True)
    (tmp_path / "ours" / "inference" / "use.py").write_text(OURS)
    return collect(tmp_path / "ours", ["inference"])


@pytest.fixture
def problems(tmp_path: Path, uses: list[Use], monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str, str], dict[str, str]]:
    """Problems by name, where in one file of the small vLLM some text was replaced."""
    monkeypatch.setattr(contract, "REPLACED", ())
    monkeypatch.setattr("scripts.check_gpu.check._others", lambda source: [])

    def ask(file: str, old: str, new: str) -> dict[str, str]:
        for name, text in THEIRS.items():
            path = tmp_path / "site" / "vllm" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            assert name != file or old in text
            path.write_text(text.replace(old, new) if name == file else text)
        return {each.name: each.problem for each in troubles(uses, VllmSource(tmp_path / "site")) if not each.optional}

    return ask


def test_where_all_is_as_used_nothing_is_missing_but_what_we_do_without(problems, uses: list[Use], tmp_path: Path):
    assert problems("envs.py", "", "") == {}
    (missing,) = troubles(uses, VllmSource(tmp_path / "site"))
    assert missing.optional and missing.name == "vllm.proc.Newer" and "inference/use.py:21" in missing.place
    assert [use.name for use in uses if answer(use, VllmSource(tmp_path / "site")).stopped_at] == []


@pytest.mark.parametrize(
    ("file", "old", "new", "name", "problem"),
    [
        ("proc/__init__.py", "Base, Update", "Base", "vllm.proc.Update", "vllm.proc has no Update"),
        ("proc/interface.py", "added", "appended", "vllm.proc.Update().added", "has no added"),
        ("proc/interface.py", "index", "number", "vllm.proc.Update().added[].index", "has no index"),
        ("proc/interface.py", "logits)", "logits, ctx)", "vllm.proc.Base", "its apply takes (logits, ctx), ours takes (logits)"),
        (
            "proc/interface.py",
            "    @abs",
            "    @abstractmethod\n    def more(self): ...\n    @abs",
            "vllm.proc.Base",
            "lacks more",
        ),
        ("params.py", "seed", "seeds", "vllm.SamplingParams().seed", "has no seed"),
        ("params.py", "seed", "seeds", "vllm.SamplingParams", "does not take seed"),
        ("engine.py", "number, *,", "*, number,", "vllm.engine.Engine.made", "takes 0 positional arguments, not 1"),
        ("engine.py", "number, *,", "number, other, *,", "vllm.engine.Engine.made", "also requires other"),
        ("engine.py", "size", "length", "vllm.engine.Engine.made().step()[].config.size", "has no size"),
        ("envs.py", "VLLM_OTHER", "VLLM_ANOTHER", '"VLLM_OTHER"', "does not occur in vllm/envs.py"),
    ],
)
def test_what_is_missing_or_changed_is_told_by_its_name(problems, file: str, old: str, new: str, name: str, problem: str):
    found = problems(file, old, new)
    assert problem in found[name]


RUNNER = """
class GPUModelRunner:
    def _bookkeeping_sync(self, {parameters}):
        return ({results})
    def execute(self):
        self._bookkeeping_sync({call})
"""


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({}, ""),
        ({"parameters": "scheduler_output, sampler_output"}, "it takes (scheduler_output, sampler_output), not"),
        ({"results": "num_nans_in_logits, logprobs_lists, valid_sampled_token_ids"}, "it returns"),
        ({"call": "logits=1"}, "it is called with names"),
    ],
    ids=["as known", "parameters", "results", "by name"],
)
def test_a_wrapped_method_must_take_return_and_be_called_as_we_know_it(tmp_path: Path, changed: dict[str, str], problem: str):
    """Ours takes its results apart by position, so one more or less would silently be another."""
    (known,) = contract.REPLACED
    folder = tmp_path / "vllm" / "v1" / "worker"
    folder.mkdir(parents=True)
    parts = {"parameters": ", ".join(known.parameters), "results": ", ".join(known.results), "call": "1, 2, 3, 4, 5"}
    (folder / "gpu_model_runner.py").write_text(RUNNER.format(**parts | changed))
    found = {each.name: each.problem for each in troubles([], VllmSource(tmp_path))}
    assert found.get("vllm.v1.worker.gpu_model_runner.GPUModelRunner._bookkeeping_sync", "").startswith(problem)
    assert ("vllm.v1.worker.gpu_model_runner.GPUModelRunner._bookkeeping_sync" in found) == bool(problem)


def test_every_name_that_this_code_uses_is_in_the_installed_vllm():
    """Its files are those of the CUDA wheel, but for three; `make check-gpu` compares them."""
    found = wheels.installed()
    if found is None:
        pytest.skip("no vLLM is installed")
    source, uses = VllmSource(found[0]), collect(ROOT, contract.FOLDERS)
    assert [str(each) for each in troubles(uses, source) if not each.optional] == []
    names = {use.name for use in uses}
    assert {
        "vllm.v1.worker.gpu_model_runner.GPUModelRunner().input_batch.logitsprocs.all",
        "vllm.v1.engine.llm_engine.LLMEngine.from_engine_args().step",
        "vllm.v1.worker.gpu_worker.Worker().reload_weights",
        "vllm.v1.sample.logits_processor.BatchUpdate().moved",
        '"VLLM_ENABLE_V1_MULTIPROCESSING"',
        '"vllm:kv_cache_usage_perc"',
    } <= names
    # What lies behind a type that vLLM's source does not tell is not checked: tensors alone.
    unchecked = {use.name.rpartition(".")[2] for use in uses if answer(use, source).stopped_at}
    assert unchecked <= {"long", "shape"}


def test_every_variable_of_the_table_occurs_in_the_file_that_it_names():
    for file, variables in contract.ROOTS.items():
        text = (ROOT / file).read_text()
        assert [each for each in variables if each not in text] == []
    assert [each.method for each in contract.REPLACED if each.method not in (ROOT / each.used_in).read_text()] == []
    for where in contract.ARGUMENTS:
        file, _, function = where.partition("::")
        assert f"def {function}(" in (ROOT / file).read_text()


def test_a_wheel_that_is_there_is_not_loaded_again_and_without_an_index_one_sentence_says_so(tmp_path: Path, monkeypatch):
    monkeypatch.setenv(wheels.FOLDER_VARIABLE, str(tmp_path / "wheels"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    folder = wheels.wheels_folder()
    with pytest.raises(EntenteError, match=r"vLLM 0\.0\.1 could not be downloaded \(.+\): run this where .+ put the wheel into"):
        wheels.get_wheel(folder, "0.0.1")
    (folder / "vllm-0.0.1-cp38-abi3-x.whl").touch()
    assert wheels.get_wheel(folder, "0.0.1").name == "vllm-0.0.1-cp38-abi3-x.whl"


def test_a_missing_name_ends_the_command_with_one_sentence_and_exit_code_one(tmp_path: Path, uses, monkeypatch, capsys):
    (tmp_path / "site" / "vllm").mkdir(parents=True)
    monkeypatch.setattr(command, "get_wheel", lambda folder, version: tmp_path / "site")
    monkeypatch.setattr(command, "collect", lambda root, folders: uses)
    assert command.main(["--only-names"]) == 1
    said = capsys.readouterr()
    assert "vllm.proc: there is no such module (inference/use.py:4)" in said.out
    assert said.err.count("\n") == 1 and "are missing or changed in vLLM" in said.err


@pytest.mark.slow
def test_the_cuda_wheel_of_the_pinned_vllm_has_every_name(capsys: pytest.CaptureFixture[str]):
    """It is loaded if it is not there: 300 MB. The names in the installed vLLM, with the same files but for three, are quick."""
    try:
        wheels.get_wheel(wheels.wheels_folder(), wheels.pinned_version())
    except EntenteError as error:
        pytest.skip(str(error))
    assert command.main(["--only-names"]) == 0, capsys.readouterr().out
    said = capsys.readouterr().out
    assert " 0 missing or changed in vLLM" in said
