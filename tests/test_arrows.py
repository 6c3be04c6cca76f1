"""Three arrows and no others: engine -> core -> adapter, kit -> core, adapter -> core.

Core finds adapters through their entry points and the kit takes a backend's name: no
source file imports an adapter.
"""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
PROJECTS = {
    path.parent.relative_to(ROOT).as_posix(): tomllib.loads(
        path.read_text(encoding="utf-8")
    )
    for pattern in ("core", "contract_tests", "adapters/*", "engines/*")
    for path in ROOT.glob(f"{pattern}/pyproject.toml")
}
PACKAGES = {
    folder: next(path.parent for path in (ROOT / folder).glob("src/*/py.typed"))
    for folder in PROJECTS
}
OURS = {package.name for package in PACKAGES.values()}


def imported(source):
    """First parts of all modules that a source file imports, at any depth."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield (node.module or "").split(".")[0]


def allowed(folder):
    """Which of our packages a distribution's own may import."""
    own = {PACKAGES[folder].name}
    return own if folder == "core" else own | {"mla_decode"}


@pytest.mark.parametrize("folder", PROJECTS)
def test_source_imports_along_the_arrows_only(folder):
    files = sorted(PACKAGES[folder].rglob("*.py"))
    crossing = {
        f"{path.relative_to(ROOT)} imports {name}"
        for path in files
        for name in set(imported(path.read_text(encoding="utf-8"))) & OURS
        if name not in allowed(folder)
    }
    assert files
    assert crossing == set()


@pytest.mark.parametrize("folder", PROJECTS)
def test_dependencies_follow_the_arrows_only(folder):
    project = PROJECTS[folder]["project"]
    names = {
        re.match(r"[\w.-]+", line)[0].lower().replace("-", "_")
        for line in project["dependencies"]
    }
    expected = set() if folder == "core" else {"mla_decode"}
    assert {name for name in names if name.startswith("mla_decode")} == expected
    assert names.isdisjoint({"aiter", "amd_aiter", "flash_mla", "triton"})


def test_finds_an_import_that_stands_inside_a_function():
    source = "def f():\n    from mla_decode_triton import kernels\n    import a.b\n"
    assert set(imported(source)) == {"mla_decode_triton", "a"}


def test_core_loads_without_torch_and_all_backends_without_a_kernel_library():
    code = (
        "import sys, mla_decode\n"
        "assert 'torch' not in sys.modules, 'import mla_decode loads torch'\n"
        "found = mla_decode.discover()\n"
        "assert {'reference', 'rocm_aiter', 'cuda_flashmla', 'triton_mla'} <= set(found)\n"
        "broken = {n: str(c.refusal) for n, c in found.items() if c.backend is None}\n"
        "assert not broken, broken\n"
        "heavy = {'triton', 'aiter', 'flash_mla'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert run.returncode == 0, run.stderr
