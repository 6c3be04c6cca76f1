"""Write the module lists of ARCHITECTURE.md from the first lines of the docstrings.

Usage: ``architecture.py``, from anywhere. What stands above the marker is left alone.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "ARCHITECTURE.md"
MARKER = "<!-- below: written by tools/architecture.py -->\n"
DISTRIBUTIONS = tuple(
    sorted(
        path.parent.relative_to(ROOT).as_posix()
        for pattern in ("core", "contract_tests", "adapters/*", "engines/*")
        for path in ROOT.glob(f"{pattern}/pyproject.toml")
    )
)


def purpose(source: str) -> str:
    """The first sentence of a module's docstring, on one line, without its full stop."""
    docstring = ast.get_docstring(ast.parse(source)) or ""
    return docstring.split("\n\n")[0].replace("\n", " ").strip().removesuffix(".")


def modules(package: Path) -> Iterator[tuple[str, str]]:
    """Each module of a package with its purpose, folders by their ``__init__``."""
    for path in sorted(package.rglob("*.py")):
        name = path.relative_to(package).as_posix()
        said = purpose(path.read_text(encoding="utf-8"))
        if path.name != "__init__.py":
            yield name, said
        elif path.parent != package and said:
            yield name.removesuffix("__init__.py"), said


def page(root: Path) -> str:
    """The part of the page that is written from the code."""
    sections = []
    for distribution in DISTRIBUTIONS:
        package = next((root / distribution / "src").glob("*/py.typed")).parent
        lines = [f"- `{name}` {said}" for name, said in modules(package)]
        sections.append(f"\n## {distribution}: `{package.name}`\n\n" + "\n".join(lines))
    return "\n".join(sections) + "\n"


def main() -> int:
    """Write the lists; print how many modules they hold."""
    head = PAGE.read_text(encoding="utf-8").split(MARKER)[0]
    written = page(ROOT)
    PAGE.write_text(f"{head}{MARKER}{written}", encoding="utf-8")
    sys.stdout.write(f"{PAGE.name}: {written.count('- `')} modules\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
