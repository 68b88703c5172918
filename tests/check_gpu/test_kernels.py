"""vLLM's V2 sampler draws under our mask what it should, its kernels in Triton's interpreter."""

import subprocess
import sys

import pytest

from scripts.check_gpu.lock import ROOT

pytest.importorskip("vllm", reason="vLLM is not installed")

PROGRAM = "import sys; from scripts.check_gpu import kernels; {}; sys.exit(kernels.main())"


def run(change: str) -> subprocess.CompletedProcess[str]:
    """The command, after a change of the code that it runs."""
    command = [sys.executable, "-c", PROGRAM.format(change)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)


@pytest.mark.vllm
@pytest.mark.system
def test_what_it_draws_is_legal_and_as_likely_as_it_says():
    done = run("0")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "drew 38 tokens under the legal mask twice" in done.stdout


@pytest.mark.vllm
@pytest.mark.slow
def test_an_unmasked_draw_is_noticed():
    done = run("kernels.table_of = lambda sequences: None")  # admission takes it for a request without a table
    assert done.returncode == 1, done.stdout + done.stderr
    assert "illegal tokens" in done.stdout
