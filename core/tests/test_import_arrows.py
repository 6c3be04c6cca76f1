"""The three arrows: engine -> core -> entry point; kit -> core, adapter; adapter -> core."""

import ast
from pathlib import Path

import pytest

HERE = Path(__file__).parents[1]
ROOT = HERE.parent
CORE = "mla_decode"

ALLOWED = {
    "core": set(),
    "adapters": {CORE},
    "contract_tests": {CORE},
    "engines": {CORE},
}
"""First-party packages that the sources below a directory may import, by name."""


def distributions():
    """Every first-party package: (top directory, import name, its sources)."""
    for top in ALLOWED:
        folder = HERE if top == "core" else ROOT / top
        for package in sorted(folder.glob("**/src/mla_decode*")):
            if package.is_dir() and (package / "__init__.py").exists():
                yield top, package.name, sorted(package.rglob("*.py"))


FOUND = list(distributions())
PACKAGES = {name for _, name, _ in FOUND}


def imports(source):
    """Modules that a source imports, statically or by a literal name."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if not node.level:  # relative ones stay within their own package
                yield node.module or ""
        elif isinstance(node, ast.Call) and node.args:
            called = node.func
            name = getattr(called, "attr", getattr(called, "id", ""))
            first = node.args[0]
            if name in {"import_module", "__import__"} and isinstance(
                first, ast.Constant
            ):
                yield str(first.value)


def arrows(sources):
    return {
        (path.name, module)
        for path in sources
        for module in imports(path.read_text(encoding="utf-8"))
        if module.split(".")[0].startswith(CORE)
    }


def test_core_is_found():
    assert ("core", CORE) in {(top, name) for top, name, _ in FOUND}


@pytest.mark.parametrize(
    ("top", "name", "sources"), FOUND, ids=[name for _, name, _ in FOUND]
)
def test_a_package_imports_itself_and_what_its_arrow_allows(top, name, sources):
    assert sources
    allowed = ALLOWED[top] | {name}
    wrong = {
        (path, module)
        for path, module in arrows(sources)
        if module.split(".")[0] not in allowed
    }
    assert not wrong


@pytest.mark.parametrize(
    ("source", "module"),
    [
        ("import mla_decode_triton.kernels", "mla_decode_triton.kernels"),
        ("from mla_decode_triton import backend", "mla_decode_triton"),
        ("import importlib\nimportlib.import_module('mla_decode_x')", "mla_decode_x"),
        ("def f():\n    __import__('mla_decode_x')", "mla_decode_x"),
    ],
    ids=["import", "from", "import_module", "builtin"],
)
def test_an_arrow_in_any_form_is_seen(tmp_path, source, module):
    path = tmp_path / "module.py"
    path.write_text(source)
    assert ("module.py", module) in arrows([path])
