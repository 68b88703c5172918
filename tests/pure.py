"""A pytest plugin for `make test-pure`: the tests of every commit that need neither torch nor Prefect, and get neither.

tests/needs_torch_or_prefect.txt names the others: files that cannot be imported without, and tests that fail without. The plugin
makes it: `make test-pure ARGS="--record -n 0"`. A test that it does not name fails as soon as it imports one of them.
"""

import os
import sys
from pathlib import Path
from typing import Any

import pytest

_TESTS = Path(__file__).resolve().parent
_STUBS = _TESTS / "pure_stubs"
NAMED = _TESTS / "needs_torch_or_prefect.txt"
"""A file, or FILE::TEST, a line; a test includes all its cases."""

assert not {"torch", "prefect"} & set(sys.modules)
sys.path.insert(0, str(_STUBS))


def _test(nodeid: str) -> str:
    return nodeid.partition("[")[0]


class _Pure:
    """Leaves out what needs them."""

    def __init__(self) -> None:
        self._named = set(NAMED.read_text().split())

    def pytest_ignore_collect(self, collection_path: Path, config: pytest.Config) -> bool | None:
        return True if collection_path.relative_to(config.rootpath).as_posix() in self._named else None

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        left_out = [item for item in items if _test(item.nodeid) in self._named]
        items[:] = [item for item in items if _test(item.nodeid) not in self._named]
        config.hook.pytest_deselected(items=left_out)


class _Record:
    """Runs all, and writes the names of what fails."""

    def __init__(self) -> None:
        self._failed: set[str] = set()
        self._tests: set[str] = set()

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._failed |= {report.nodeid} if report.failed else set()

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        self._tests |= {_test(item.nodeid) for item in items}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._failed |= {_test(report.nodeid)} if report.failed else set()

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        whole = {test.partition("::")[0] for test in self._tests} - {
            test.partition("::")[0] for test in self._tests - self._failed
        }
        named = {file if (file := test.partition("::")[0]) in whole else test for test in self._failed}
        NAMED.write_text("".join(f"{name}\n" for name in sorted(named)))
        session.exitstatus = pytest.ExitCode.OK


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", action="store_true", help=f"find what belongs in {NAMED.name}, in a tree whose tests are green")


def pytest_configure(config: pytest.Config) -> None:
    os.environ["PYTHONPATH"] = os.pathsep.join([str(_STUBS), os.environ["PYTHONPATH"]])  # for processes that tests start
    plugin: Any = _Record() if config.getoption("record") else _Pure()
    if isinstance(plugin, _Record):
        config.option.continue_on_collection_errors = True
    config.pluginmanager.register(plugin)
