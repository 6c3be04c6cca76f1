"""Run the kit and its proof over our own backends on a CPU, and publish pages of them.

Usage: ``publish_reports.py run [LABEL...]`` runs, which takes half an hour for all;
``publish_reports.py render`` only makes the pages anew, from the reports that are kept.
Reports from hardware, which `hardware_reports.py` keeps, get pages too.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from mla_decode_contract.pages.form import Form
from mla_decode_contract.pages.publish import publish
from mla_decode_contract.pages.reading import PROOF, read_source
from mla_decode_contract.reading import FILE_NAME

if TYPE_CHECKING:
    from collections.abc import Iterator

KEPT = Path(__file__).parents[1] / "docs" / "reports"
HARDWARE = "hardware"
INDEX = "published.md"
LINUX = re.compile(r"^Linux-.+?-(x86_64|aarch64)")
ASKED = re.compile(r"\d{4}-\d\d-\d\d-(.+)$")
"""In the name of a report from hardware: what was asked for beyond the defaults."""
MADE = ("report.md", "report.html", "badge.json")
KIT = (sys.executable, "-m", "mla_decode_contract.cli")
HEAD = """\
# Published reports

<!-- Written by tools/publish_reports.py; `nox -s reports` runs everything anew. -->

What our own backends did under the contract kit. The evidence word says where: only
`hardware` speaks of a device, and no AMD device has ever run anything of ours. A report is
of the day that it says; the code went on. How to send one: [Reports](../reports.md).

| backend | evidence | verdict | ended | cases | faults caught | page |
| --- | --- | --- | --- | --- | --- | --- |
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuRun:
    """A run that needs no accelerator."""

    backend: str
    arch: str = ""
    """Assumed; none for the backend of the CPU itself."""

    @property
    def label(self) -> str:
        """The folder's name."""
        return "-".join(filter(None, (self.backend, self.arch)))


RUNS = (
    CpuRun(backend="reference"),
    CpuRun(backend="rocm_aiter", arch="gfx942"),
    CpuRun(backend="rocm_aiter", arch="gfx950"),
    CpuRun(backend="cuda_flashmla", arch="sm_90"),
    CpuRun(backend="triton_mla", arch="sm_90"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """A report that is kept, and the folder of its pages."""

    folder: Path
    report: Path
    proof: Path | None

    def copy_to(self, scratch: Path) -> None:
        """Lay report and proof out as the kit leaves them."""
        shutil.copy(self.report, scratch / FILE_NAME)
        if self.proof is not None:
            shutil.copy(self.proof, scratch / PROOF)

    def pages(self) -> dict[str, str]:
        """The text of each page and of the badge, and the report that they show."""
        with tempfile.TemporaryDirectory() as folder:
            scratch = Path(folder)
            self.copy_to(scratch)
            for form in Form:
                publish(scratch, form)
            return {n: (scratch / n).read_text(encoding="utf-8") for n in MADE}

    def line(self) -> str:
        """The row of the index."""
        with tempfile.TemporaryDirectory() as folder:
            self.copy_to(Path(folder))
            source = read_source(Path(folder))
        report, label = source.report, self.folder.name
        asked = ASKED.search(label)
        cells = (
            f"`{report['adapter']['backend']}` on {report['device']['arch']}"
            + (f", {asked[1]}" if asked else ""),
            f"**{report['evidence']}**",
            report["verdict"],
            report["finished_at"][:10],
            _counted(report["counts"]),
            _caught(source.proof),
            f"[page]({label}/report.md), [in one file]({label}/report.html)",
        )
        return "| " + " | ".join(cells) + " |\n"


def kept() -> list[Kept]:
    """Every report of the repository: of a CPU in a folder of its own, of hardware."""
    return sorted((*_of_cpu(), *_of_hardware()), key=lambda each: each.folder)


def _of_cpu() -> Iterator[Kept]:
    for report in KEPT.glob(f"*/{FILE_NAME}"):
        proof = report.with_name(PROOF)
        yield Kept(
            folder=report.parent,
            report=report,
            proof=proof if proof.exists() else None,
        )


def _of_hardware() -> Iterator[Kept]:
    for report in (KEPT / HARDWARE).glob("*.json"):
        yield Kept(folder=KEPT / report.stem, report=report, proof=None)


def _counted(counts: dict[str, int]) -> str:
    found = (f"{n} {word.replace('_', ' ')}" for word, n in counts.items() if n)
    return ", ".join(found)


def _caught(proof: dict[str, Any] | None) -> str:
    if proof is None:
        return "not proven"
    mutants = proof["mutants"]
    caught = sum(mutant["caught"] for mutant in mutants)
    alarms = proof["false_alarms"]
    return f"{caught} of {len(mutants)}, {alarms} false alarms"


def index() -> str:
    """The page that lists them all."""
    return HEAD + "".join(each.line() for each in kept())


def render() -> None:
    """Make every page and the index anew from the reports that are kept."""
    for each in kept():
        each.folder.mkdir(exist_ok=True)
        for name, text in each.pages().items():
            (each.folder / name).write_text(text, encoding="utf-8")
    (KEPT / INDEX).write_text(index(), encoding="utf-8")


def run(
    labels: Annotated[
        Optional[list[str]],  # noqa: UP045 - typer reads it on Python 3.10
        typer.Argument(help="Folders of docs/reports; all by default."),
    ] = None,
) -> None:
    """Run the kit and its proof; a new report replaces the older."""
    known = {each.label: each for each in RUNS}
    for label in labels or list(known):
        if label not in known:
            raise typer.BadParameter(f"{label!r} is none of {', '.join(known)}")
        _run(known[label])
    render()


def _run(chosen: CpuRun) -> None:
    assumed = ("--assume-arch", chosen.arch) if chosen.arch else ()
    words = (chosen.backend, *assumed)
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        run_it = (*KIT, "run", *words, "--report", folder)
        subprocess.run(run_it, check=False)  # noqa: S603 - our own kit; the report has its verdict
        prove_it = (*KIT, "prove", *words, "--json")
        proof = subprocess.run(prove_it, stdout=subprocess.PIPE, check=False)  # noqa: S603 - the same
        (scratch / PROOF).write_bytes(proof.stdout)
        take(scratch, KEPT / chosen.label)


def take(results: Path, folder: Path) -> None:
    """Keep a run's report and proof. The machine's kernel release is left out.

    Raises:
        ReportProblem: They are none.
    """
    source = read_source(results)
    system = LINUX.sub(r"Linux-\1", source.report["platform"])
    folder.mkdir(parents=True, exist_ok=True)
    kept_now = {FILE_NAME: {**source.report, "platform": system}, PROOF: source.proof}
    for name, plain in kept_now.items():
        path = folder / name
        if plain is None:
            path.unlink(
                missing_ok=True
            )  # an older run's proof proves nothing of this one
        else:
            path.write_text(json.dumps(plain, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    """Run the command line."""
    app = typer.Typer(help=__doc__, add_completion=False)
    app.command()(run)
    app.command()(render)
    app()


if __name__ == "__main__":
    main()
