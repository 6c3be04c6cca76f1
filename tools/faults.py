"""The catalogue of reported faults, and the tests that meet them.

One TOML file a class of faults under ``tests/faults/catalogue/``. A test says which faults
it meets by ``@pytest.mark.fault("HEADS-02")``; its node name ends in ``[HEADS-02]``. This
module reads both without importing a test, for ``docs/faults.md`` and for the test that
holds the catalogue complete.
"""

from __future__ import annotations

import ast
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "tests" / "faults"
CATALOGUE = FOLDER / "catalogue"
IMPOSSIBLE = "cannot arise"
WHERE = ("reference", "simulated", "interpreted", "cuda", IMPOSSIBLE)
TEXTS = ("kind", "symptom", "cause", "here")


class CatalogueError(ValueError):
    """An entry of the catalogue, or a test's marker, is not what this module reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One reported fault, and what happens here in its place."""

    id: str
    group: str
    """The title of its class."""
    kind: str
    """The kind of fault that hides behind the report, in a few words."""
    symptom: str
    """What people saw."""
    cause: str
    here: str
    """What happens here: the right value, or the refusal and its code."""
    source: tuple[str, ...]
    """Where it was reported: ``owner/repository#number``, or what was read."""
    where: tuple[str, ...]
    """At which levels a test meets it: words of `WHERE`."""
    reason: str = ""
    """Why it cannot arise here; set where, and only where, `where` says so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultTest:
    """A test function that meets one fault."""

    file: str
    """Relative to the repository's root."""
    name: str
    fault: str
    is_cuda: bool
    """Whether it needs an NVIDIA GPU."""

    @property
    def node(self) -> str:
        """The node's name, without what further parameters add."""
        return f"{self.file}::{self.name}[{self.fault}]"


def expected_ids() -> tuple[str, ...]:
    """Every id that the project answers for, in the reports' order."""
    return tuple((CATALOGUE / "ids.txt").read_text(encoding="utf-8").split())


def load(folder: Path = CATALOGUE) -> dict[str, Fault]:
    """Read every file of the catalogue.

    Raises:
        CatalogueError: An entry lacks a field, has an unknown one, or stands twice.
    """
    faults: dict[str, Fault] = {}
    for path in sorted(folder.glob("*.toml")):
        content = tomllib.loads(path.read_text(encoding="utf-8"))
        group = content.pop("title", None)
        if not isinstance(group, str):
            raise CatalogueError(f"{path.name} has no title")
        for key, entry in content.items():
            if key in faults:
                raise CatalogueError(f"{path.name}: {key} stands in two files")
            faults[key] = _fault(path.name, group, key, entry)
    return faults


def _fault(file: str, group: str, key: str, entry: Any) -> Fault:
    wanted = {*TEXTS, "source", "where"}
    found = set(entry) if isinstance(entry, dict) else set()
    if not wanted <= found <= {*wanted, "reason"}:
        odd = sorted(found.symmetric_difference(wanted) - {"reason"})
        raise CatalogueError(f"{file}: {key} lacks or should not have: {odd}")
    where = tuple(entry["where"])
    if not where or not set(where) <= set(WHERE):
        raise CatalogueError(f"{file}: {key}: where is {where}, of {WHERE}")
    texts = {name: entry[name].strip() for name in TEXTS}
    reason = entry.get("reason", "").strip()
    if not all(texts.values()) or not entry["source"]:
        raise CatalogueError(f"{file}: {key} has an empty field")
    if bool(reason) != (IMPOSSIBLE in where):
        raise CatalogueError(f"{file}: {key}: a reason belongs to {IMPOSSIBLE!r} alone")
    source = tuple(entry["source"])
    return Fault(
        id=key, group=group, source=source, where=where, reason=reason, **texts
    )


def read_tests(folder: Path = FOLDER) -> tuple[FaultTest, ...]:
    """Every test under a folder that carries the marker, read from its source.

    Raises:
        CatalogueError: A marker's ids are not plain strings.
    """
    return tuple(
        test for path in sorted(folder.glob("test_*.py")) for test in _tests_of(path)
    )


def _tests_of(path: Path) -> Iterator[FaultTest]:
    is_ours = path.is_relative_to(ROOT)
    file = path.relative_to(ROOT).as_posix() if is_ours else path.name
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if not isinstance(node, ast.FunctionDef) or not node.name.startswith("test_"):
            continue
        marks = [_mark(decorator) for decorator in node.decorator_list]
        is_cuda = any(name == "cuda" for name, _ in marks)
        faults = [found for name, found in marks if name == "fault"]
        for given in (one for found in faults for one in found):
            value = given.value if isinstance(given, ast.Constant) else None
            if not isinstance(value, str):
                raise CatalogueError(f"{file}: {node.name}: ids must be literal")
            yield FaultTest(file=file, name=node.name, fault=value, is_cuda=is_cuda)


def _mark(decorator: ast.expr) -> tuple[str, list[ast.expr]]:
    """The name of ``@pytest.mark.NAME(...)`` and its arguments."""
    arguments: list[ast.expr] = []
    if isinstance(decorator, ast.Call):
        arguments, decorator = decorator.args, decorator.func
    return ast.unparse(decorator).removeprefix("pytest.mark."), arguments


def tables() -> str:
    """The page's tables, one a class: what happens here, and the test that shows it."""
    met: dict[str, list[FaultTest]] = {}
    for test in read_tests():
        met.setdefault(test.fault, []).append(test)
    faults = load()
    groups = dict.fromkeys(fault.group for fault in faults.values())
    return "\n\n".join(
        f"## {group}\n\n"
        + _table([f for f in faults.values() if f.group == group], met)
        for group in groups
    )


def _table(faults: list[Fault], met: dict[str, list[FaultTest]]) -> str:
    lines = [
        "| id | kind | what people saw, and why | what happens here | test | evidence |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for fault in faults:
        here = fault.here
        if fault.reason:
            here += f" Cannot arise: {fault.reason}"
        cells = (
            f'<span id="{fault.id.lower()}"></span>{fault.id}',
            fault.kind,
            f"{fault.symptom} {fault.cause} ({', '.join(map(_link, fault.source))})",
            here,
            "<br>".join(_named(test) for test in met.get(fault.id, ())),
            ", ".join(fault.where),
        )
        escaped = (" ".join(cell.split()).replace("|", "\\|") for cell in cells)
        lines.append("| " + " | ".join(escaped) + " |")
    return "\n".join(lines)


def _link(source: str) -> str:
    repository, is_issue, number = source.partition("#")
    if not is_issue:
        return source
    return f"[{source}](https://github.com/{repository}/issues/{number})"


def _named(test: FaultTest) -> str:
    return f"`{Path(test.file).name}::{test.name}[{test.fault}]`"
