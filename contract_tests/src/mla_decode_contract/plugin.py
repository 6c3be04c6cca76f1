"""The pytest plugin; it does nothing in a project that does not ask for it.

Only ``--mla-backend NAME`` wakes it. This module imports neither torch nor core.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from mla_decode_contract.session import Run

SUITE = Path(__file__).with_name("suite.py")
RUN_KEY: pytest.StashKey[Run] = pytest.StashKey()
"""Where a session keeps its run."""
_NAME = "mla_decode_contract_session"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options; all but ``--mla-backend`` qualify it."""
    group = parser.getgroup("mla-decode contract")
    group.addoption(
        "--mla-backend",
        metavar="NAME",
        help="run the decode contract's cases against this backend "
        "(with --pyargs mla_decode_contract.suite)",
    )
    group.addoption("--mla-arch", metavar="ARCH", help="require this hardware")
    group.addoption(
        "--mla-assume-arch", metavar="ARCH", help="simulate this architecture"
    )
    group.addoption("--mla-quick", action="store_true", help="the quick cases only")
    group.addoption("--mla-case", metavar="ID", help="one case only")
    group.addoption(
        "--mla-shard", metavar="I/N", help="one part of the cases: 1/4 ... 4/4"
    )
    group.addoption("--mla-seed", metavar="N", type=int, default=0)
    group.addoption(
        "--mla-report",
        metavar="DIR",
        type=Path,
        help="write report.json and junit.xml there",
    )
    group.addoption("--mla-known-failures", metavar="TOML", type=Path)
    group.addoption("--mla-workers", metavar="N", type=int)
    group.addoption("--mla-timeout-s", metavar="S", type=float)
    group.addoption("--mla-mutant", metavar="NAME", help=_mutant_help())


def _mutant_help() -> str:
    return "run a deliberately wrong wrapper of the backend: the run must fail"


def pytest_configure(config: pytest.Config) -> None:
    """Resolve the run where one is asked for."""
    backend = config.getoption("--mla-backend")
    if backend is None:
        return
    from mla_decode_contract.host import Host, settings_of  # noqa: PLC0415 - needs core
    from mla_decode_contract.session import Run  # noqa: PLC0415 - needs core
    from mla_decode_contract.target import UsageProblem  # noqa: PLC0415 - needs core

    try:
        run = Run.prepare(settings_of(config, backend))
    except UsageProblem as problem:
        raise pytest.UsageError(str(problem)) from problem
    config.stash[RUN_KEY] = run
    config.pluginmanager.register(Host(config, run), _NAME)


def pytest_collect_file(
    file_path: Path, parent: pytest.Collector
) -> pytest.Collector | None:
    """Collect the suite's file as cases."""
    if file_path.name != SUITE.name or file_path.resolve() != SUITE.resolve():
        return None
    run = parent.config.stash.get(RUN_KEY, None)
    if run is None:
        raise pytest.UsageError("mla_decode_contract.suite needs --mla-backend NAME")
    from mla_decode_contract.items import SuiteFile  # noqa: PLC0415 - needs core

    return SuiteFile.of(parent, path=file_path, run=run)
