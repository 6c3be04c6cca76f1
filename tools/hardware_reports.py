"""Reports from hardware: received, kept in the repository, and shown as evidence.

Usage: ``hardware_reports.py report.json [...]`` adds received reports; the support
matrix of the documentation is made with what is kept. ``--commit`` names the commit that
ran where the report could not know it, and ``--asked WORD`` says what was asked for,
such as one kernel of a backend that has two. Only what asked for nothing, or for
``auto``, is evidence for who asks for nothing.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import jsonschema  # type: ignore[import-untyped] # it ships no types
import typer

from mla_decode_contract.report import validate

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mla_decode import DeviceInfo

KEPT = Path(__file__).parents[1] / "docs" / "reports" / "hardware"
UNASKED = frozenset({"", "auto"})
"""Words for a run that left the choice to the backend."""
LINUX = re.compile(r"^Linux-.+?-(x86_64|aarch64)")


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareReport:
    """What one run of the contract kit showed on one machine."""

    backend: str
    arch: str
    device: str
    """The device's name, as its driver gives it."""
    date: str
    libraries: Mapping[str, str] = field(default_factory=dict)
    verdict: str
    is_conformant: bool
    counts: Mapping[str, int]
    failed: tuple[str, ...] = ()
    asked: str = ""
    """What was asked for: beyond `UNASKED` it proves nothing of the defaults."""

    @property
    def file_name(self) -> str:
        """Of the kept report: one a backend, device, day, and what was asked for."""
        device = "-".join(self.device.lower().split())
        words = (self.backend, self.arch, device, self.date, self.asked)
        return "-".join(filter(None, words)) + ".json"

    def proves(self, backend: str, device: DeviceInfo) -> bool:
        """Whether it is evidence for a backend on a device with these libraries."""
        return (
            self.is_conformant
            and self.asked in UNASKED
            and (self.backend, self.arch) == (backend, device.arch)
            and all(self.libraries.get(k) == v for k, v in device.libraries.items())
        )


def parse(text: str) -> HardwareReport:
    """Read a report of the contract kit.

    Raises:
        ValueError: It is no report, or not one that shows what a backend does on its
            hardware: another evidence, not the whole kit, or a mutant of the kit.
    """
    try:
        raw: dict[str, Any] = json.loads(text)
        validate(raw)
    except (json.JSONDecodeError, jsonschema.ValidationError) as error:
        reason = getattr(error, "message", str(error))
        raise ValueError(f"not a report of the contract kit: {reason}") from error
    if raw["evidence"] != "hardware":
        raise ValueError(f"its evidence is {raw['evidence']!r}, not 'hardware'")
    if raw["quick"] or raw["mutant"]:
        raise ValueError("it is of a quick run or of a mutant: the whole kit is wanted")
    return HardwareReport(
        backend=raw["adapter"]["backend"],
        arch=raw["device"]["arch"],
        device=raw["device_name"] or raw["device"]["name"] or raw["device"]["arch"],
        date=raw["started_at"][:10],
        libraries=raw["libraries"],
        verdict=raw["verdict"],
        is_conformant=raw["exit_code"] == 0,
        counts=raw["counts"],
        failed=tuple(
            case["id"] for case in raw["cases"] if case["outcome"] == "failed"
        ),
    )


def read(path: Path) -> HardwareReport:
    """A kept report; what was asked for stands at the end of its name."""
    report = parse(path.read_text(encoding="utf-8"))
    plain = report.file_name.removesuffix(".json")
    return replace(report, asked=path.stem.removeprefix(plain).removeprefix("-"))


def kept(folder: Path = KEPT) -> tuple[HardwareReport, ...]:
    """The reports of a folder, the newest first."""
    found = [read(path) for path in folder.glob("*.json")]
    return tuple(sorted(found, key=lambda r: (r.date, r.file_name), reverse=True))


def add(
    reports: Annotated[
        list[Path], typer.Argument(exists=True, dir_okay=False, readable=True)
    ],
    folder: Annotated[Path, typer.Option(file_okay=False)] = KEPT,
    commit: Annotated[str, typer.Option(help="That ran, in full.")] = "",
    asked: Annotated[str, typer.Option(help="A word: hopper, portable, auto.")] = "",
) -> None:
    """Check received reports and keep them; they become evidence in the documents.

    The machine's kernel release is left out.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for path in reports:
        text = path.read_text(encoding="utf-8")
        try:
            report = replace(parse(text), asked=asked)
        except ValueError as error:
            typer.echo(f"{path}: {error}", err=True)
            raise typer.Exit(4) from error
        raw = json.loads(text)
        raw["platform"] = LINUX.sub(r"Linux-\1", raw["platform"])
        raw["adapter"]["commit"] = raw["adapter"]["commit"] or commit or None
        text = json.dumps(raw, indent=2) + "\n"
        (folder / report.file_name).write_text(text, encoding="utf-8")
        typer.echo(f"{report.file_name}: {report.verdict}")


if __name__ == "__main__":
    typer.run(add)
