"""Write the files of a new adapter from their templates."""

from __future__ import annotations

from importlib.metadata import version
from typing import TYPE_CHECKING

import jinja2

from mla_decode.device import vendor_of
from mla_decode.errors import ArgumentError
from mla_decode.version import CONTRACT_VERSION
from mla_decode_contract.scaffold.names import Names
from mla_decode_contract.scaffold.problem import ScaffoldProblem

if TYPE_CHECKING:
    from pathlib import Path

FILES = {
    "README.md": "README.md",
    "gitignore": ".gitignore",
    "pyproject.toml": "pyproject.toml",
    "workflow.yml": ".github/workflows/contract.yml",
    "init.py": "src/{module}/__init__.py",
    "backend.py": "src/{module}/backend.py",
    "builder.py": "src/{module}/builder.py",
    "capability.py": "src/{module}/capability.py",
    "forward.py": "src/{module}/forward.py",
    "library.py": "src/{module}/library.py",
    "refusals.py": "src/{module}/refusals.py",
    "simulator.py": "src/{module}/simulator.py",
    "py.typed": "src/{module}/py.typed",
    "test_backend.py": "tests/test_backend.py",
    "test_contract.py": "tests/test_contract.py",
}
"""Templates, without their suffix, and where each one's file goes."""


def scaffold(name: str, directory: Path, *, arch: str) -> tuple[Path, ...]:
    """Write a new adapter.

    Args:
        name: The backend's; distribution and module are called after it.
        directory: Made where it is absent; must be empty.
        arch: The accelerator that the capability's first row is for.

    Returns:
        The files, in the order of `FILES`.

    Raises:
        ScaffoldProblem: The name, the architecture or the directory will not do.
    """
    names = Names.parse(name)
    _check_arch(arch)
    values = {
        "name": names.backend,
        "distribution": names.distribution,
        "module": names.module,
        "arch": arch,
        "contract": CONTRACT_VERSION,
        "core_bounds": _bounds("mla-decode"),
        "kit_bounds": _bounds("mla-decode-contract"),
    }
    environment = jinja2.Environment(  # noqa: S701 - no HTML; the values are checked words
        loader=jinja2.PackageLoader("mla_decode_contract.scaffold", "template"),
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
    )
    texts = {
        directory / path.format(module=names.module): environment.get_template(
            f"{template}.jinja"
        ).render(values)
        for template, path in FILES.items()
    }
    _check_directory(directory)
    try:
        for path, text in texts.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ScaffoldProblem(
            f"{directory} cannot be written",
            got=str(error.strerror),
            allowed="a directory that can be written to",
            fix="Choose another one.",
        ) from error
    return tuple(texts)


def _check_arch(arch: str) -> None:
    try:
        vendor = vendor_of(arch)
    except ArgumentError as error:
        raise ScaffoldProblem(
            "The architecture has no known form",
            got=error.got,
            allowed=error.allowed,
            fix="Use the vendor's own name.",
        ) from error
    if vendor == "cpu":
        raise ScaffoldProblem(
            "An adapter is for an accelerator",
            got=arch,
            allowed="sm_NN or gfxNNN",
            fix="Name the one that the kernels are for; the simulator runs on the CPU.",
        )


def _check_directory(directory: Path) -> None:
    if directory.is_dir():
        found = sorted(path.name for path in directory.iterdir())
        got = f"{len(found)} entries, {found[0]!r} first" if found else ""
    else:
        got = "a file" if directory.exists() else ""
    if got:
        raise ScaffoldProblem(
            f"{directory} is not an empty directory",
            got=got,
            allowed="one that is empty, or not there yet",
            fix="Choose another one: nothing is ever overwritten.",
        )


def _bounds(distribution: str) -> str:
    """From the installed minor to the next major: ``>=0.1,<1``."""
    major, minor = version(distribution).split(".")[:2]
    return f">={major}.{minor},<{int(major) + 1}"
