"""The strange environments reach `make test`; what a machine has set reaches the commands, and not the tests."""

import contextlib
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from storage.runs import RunPaths
from tests import strange_environments
from tests.conftest import in_turn
from tests.plain_environment import PLAIN, is_read
from tests.strange_environments import ENVIRONMENTS, main, order_for, run_in

MAKEFILE = """
setup-dev:
\tfalse
test: setup-dev
\t@env > $(SEEN)
\t@(pwd; umask; ulimit -n; id -u; nproc; .venv/bin/python -c 'import marked; print(marked.__file__)') > $(SEEN).more
\t@test -z "$(findstring red,$(ARGS))"
"""


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project whose `make test` notes where it runs."""
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "Makefile").write_text(MAKEFILE)
    (folder / "marked.py").write_text("")
    (folder / ".gitignore").write_text(".venv\n")
    (folder / ".venv" / "bin").mkdir(parents=True)
    (folder / ".venv" / "bin" / "python").symlink_to(sys.executable)
    subprocess.run(["git", "init", "--quiet", folder], check=True)
    monkeypatch.setattr(strange_environments, "ROOT", folder)
    for name in ("MAKEFLAGS", "MAKEOVERRIDES", "MFLAGS"):  # `make test ARGS=...` hands its own ARGS down
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SEEN", str(tmp_path / "seen"))
    return folder


def test_what_an_environment_sets_reaches_make(tree: Path):
    # This test runs in strange environments too: what one of them does not set is what this process has.
    mine = subprocess.run("umask; ulimit -n", shell=True, capture_output=True, text=True, check=True).stdout.split()
    for name, environment in ENVIRONMENTS.items():
        if environment.folder or environment.user is not None:
            continue
        assert run_in(name, "--mine"), name
        seen = dict(line.split("=", 1) for line in (tree.parent / "seen").read_text().splitlines() if "=" in line)
        assert environment.variables.items() <= seen.items() and seen["ARGS"].endswith("--mine"), name
        place, umask, files, _, cores, _ = (tree.parent / "seen.more").read_text().splitlines()
        assert place == str(tree), name
        assert umask == ("0077" if name == "umask" else mine[0].zfill(4)), name
        assert files == ("256" if name == "files" else mine[1]), name
        assert cores == "1" or name != "busy"


def test_a_copy_in_a_strange_folder_is_what_is_tested_there(tree: Path):
    assert run_in("folder", "")
    place, *_, module = (tree.parent / "seen.more").read_text().splitlines()
    assert place.endswith("/ä path") and module == f"{place}/marked.py" and not Path(place).exists()


def test_red_tests_are_the_exit_code(tree: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]):
    assert main(["files", "umask"]) == 0
    monkeypatch.setenv("ARGS", "red")
    assert main(["files", "umask"]) == 1
    assert re.findall(r"== '(\w+)': (\w+)", capfd.readouterr().out) == [
        *(("files", "green"), ("umask", "green")),
        *(("files", "RED"), ("umask", "RED")),
    ]


def test_a_commit_takes_one_environment_and_the_next_where_the_machine_cannot_have_it(monkeypatch: pytest.MonkeyPatch):
    assert {order_for(f"{number:040x}")[0] for number in range(99)} == set(ENVIRONMENTS) - {"busy"}, "which leaves tests out"
    first, second, *_ = order_for("abc123")
    run: list[str] = []
    monkeypatch.setattr(strange_environments, "run_in", lambda name, _: run.append(name) or {first: None}.get(name, True))
    assert main(["--pick", "abc123"]) == 0 and run == [first, second]


def test_six_commits_in_turn_run_every_test_once():
    names = [f"test {number}" for number in range(15)]
    parts = [in_turn(names, f"{commit:040x}") for commit in range(8, 14)]
    assert sorted(name for part in parts for name in part) == sorted(names) and all(2 <= len(part) <= 3 for part in parts)


def test_a_wrong_name_is_refused_with_the_right_ones(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        main(["unmask"])
    said = capsys.readouterr().err
    assert ended.value.code == 2 and [name for name in ("unmask", *ENVIRONMENTS) if name not in said] == []


def test_no_variable_that_a_program_reads_comes_from_the_machine():
    names = ["HTTPS_PROXY", "no_proxy", "COLUMNS", "LC_ALL", "TZ", "PREFECT_API_URL", "WANDB_MODE", "CUDA_VISIBLE_DEVICES"]
    names += ["OMP_NUM_THREADS", "PYTHONPATH", "PYTHONHASHSEED", "NO_COLOR", "HF_HOME", "ENTENTE_KEY", "GIT_DIR"]
    assert [name for name in names if not is_read(name)] == []
    assert [name for name in ("PATH", "HOME", "PIP_INDEX_URL", "PYTHON", "ATEN_CPU_CAPABILITY", "TMPDIR") if is_read(name)] == []
    child = subprocess.run(["env"], capture_output=True, text=True, check=True).stdout
    assert {f"{name}={value}" for name, value in PLAIN.items()} <= set(child.splitlines())
    assert "_PROXY" not in "".join(os.environ).upper()


NOWHERE = "http://127.0.0.1:9"
VARIABLES = {
    "terminal": {
        **{"COLUMNS": "40", "LINES": "10", "TERM": "dumb", "NO_COLOR": "1"},
        **{"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},  # without these two Python would write UTF-8
    },
    "services": {"PREFECT_API_URL": f"{NOWHERE}/api", "PREFECT_FLOWS_DEFAULT_RETRIES": "3", "WANDB_MODE": "nonsense"},
    "machine": {
        **dict.fromkeys(("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"), NOWHERE),
        **{"PYTHONHASHSEED": "7", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONWARNINGS": "error", "OMP_NUM_THREADS": "7"},
        "TZ": "Pacific/Kiritimati",
    },
}


@pytest.mark.system
@pytest.mark.parametrize("name", VARIABLES)
def test_commands_in_a_strange_terminal_say_all_that_they_say_elsewhere(stored_run: RunPaths, name: str):
    def said(*words: str) -> tuple[int, str]:
        """The exit code, and what the terminal got, without colours and line breaks."""
        terminal, theirs = pty.openpty()
        command, read = [sys.executable, "-m", "entente.cli.main", *words, "--runs-root", "."], b""
        where = {"cwd": stored_run.root.parent, "env": os.environ | VARIABLES[name]}
        with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, **where) as process:
            os.close(theirs)
            with contextlib.suppress(OSError):  # the command has ended
                while True:
                    read += os.read(terminal, 1 << 16)
        os.close(terminal)
        text = re.sub(r"\x1b\[[0-9;]*m", "", read.decode("ascii" if name == "terminal" else "utf-8"))
        return process.returncode, " ".join(text.split())

    code, doctor = said("doctor")
    if name == "services":
        assert code == 1 and f"no Prefect server answers at {NOWHERE}/api" in doctor and "not ready: 1 problem" in doctor
    else:
        assert code == 0 and doctor.endswith("ready: a run can start")
    code, plan = said("train", "--dry-run")
    assert code == 0 and "steps 20 forks 1,280" in plan and plan.endswith("nothing was started, nothing was written")
    code, runs = said("runs")
    assert code == 0 and "before complete 2 of 2" in runs
    code, rows = said("sql", "select chr(233) || count(*) from decisions", "--run", "before")
    assert code == 0 and ("\\xe932" if name == "terminal" else "é32") in rows
