"""Child processes of a page."""

import os
import time
from typing import Any

import pytest

from entente.view.jobs import Jobs


def test_a_job_that_ended_is_never_signalled_because_its_number_may_be_another_s(monkeypatch: pytest.MonkeyPatch):
    signalled: list[Any] = []
    monkeypatch.setattr(os, "killpg", lambda *given: signalled.append(given))
    jobs = Jobs()
    jobs.start("a quick one", "it", ["entente.cli.main", "--version"])
    job = jobs.of("it")
    assert job is not None
    while job.running:
        time.sleep(0.05)
    jobs.cancel()
    assert signalled == [] and job.answer() == (None, "Its answer cannot be read.")
