"""What a command shows while it works: only while it works."""

import pytest

from cli.screen import LineReporter, progress_shown
from telemetry.progress import LogReporter, reporter


def test_progress_goes_to_standard_error_for_the_length_of_the_block_only(capsys: pytest.CaptureFixture):
    with pytest.raises(ZeroDivisionError), progress_shown():
        assert isinstance(reporter(), LineReporter)
        reporter().say("half way")
        raise ZeroDivisionError
    assert type(reporter()) is LogReporter
    reporter().say("nobody looks on any more")
    out, err = capsys.readouterr()
    assert (out, err) == ("", "half way\n")
