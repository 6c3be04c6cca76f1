"""Hooks of mkdocs: the order of the pages, and the parts that come from the code.

A page asks for a part by a line ``<!-- generated: NAME -->``; an unknown name fails the
build.
"""

from __future__ import annotations

import re
from collections import Counter
from functools import cache
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import contract_page
import faults
import hardware_reports

from mla_decode import (
    DecodeProblem,
    DeviceInfo,
    Mask,
    RefusalCode,
    discover,
    survey,
)
from mla_decode.cli.coverage import DTYPES, HEADS, OUTCOMES, QUERY_LENS
from mla_decode.cli.coverage import cells as coverage_cells

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from mla_decode import Candidate
    from mla_decode.cli.coverage import Cell

ORDER = (
    "index.md",
    "first-hour.md",
    "engine.md",
    "vllm.md",
    "explain.md",
    "demo.md",
    "adapter.md",
    "contract.md",
    "contract-kit.md",
    "hardware-ci.md",
    "support.md",
    "refusals.md",
    "lowering.md",
    "dcp.md",
    "aiter.md",
    "flashmla.md",
    "triton.md",
    "hopper.md",
    "reports.md",
    "reports/published.md",
    "faults.md",
    "soak.md",
    "upstream.md",
    "glossary.md",
    "api.md",
)
MACHINES = (
    DeviceInfo.assume("gfx942", libraries={"amd-aiter": "0.1.20.post1"}),
    DeviceInfo.assume("gfx950", libraries={"amd-aiter": "0.1.19.post2"}),
    DeviceInfo.assume("gfx950", libraries={"amd-aiter": "0.1.20.post1"}),
    DeviceInfo.assume("sm_90"),
    DeviceInfo.assume("sm_100"),
    DeviceInfo.assume("cpu"),
)
MARKER = re.compile(r"^<!-- generated: ([\w-]+) -->$", re.MULTILINE)
IN_A_CLONE = (
    "*Tables of this page are made when the site is built: "
    "`nox -s docs -- serve` shows them.*\n\n"
)

OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./([\w./-]+)\)")


def on_config(config: Any) -> Any:
    """Put the pages in a reader's order; what the order does not name comes last."""
    docs = Path(config["docs_dir"])
    found = {path.relative_to(docs).as_posix() for path in docs.rglob("*.md")}
    named = [page for page in ORDER if page in found]
    left = found - set(named)
    reports = sorted(page for page in left if page.startswith("reports/"))
    config["nav"] = [*named, *sorted(left - set(reports)), {"Each report": reports}]
    return config


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Fill in what comes from the code; name files outside the site by their path.

    On GitHub such links work, in the site they would lead nowhere; the note to those
    who read a page in a clone is left out.
    """
    told = markdown.replace(IN_A_CLONE, "")
    filled = MARKER.sub(lambda found: PARTS[found[1]](), told)
    if "/" in page.file.src_uri:
        return filled  # one folder down, such links stay inside the site
    return OUTSIDE.sub(r"\1 (`\2`)", filled)


def table(header: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> str:
    """A table in Markdown; bars inside cells are escaped."""
    lines = [header, tuple("---" for _ in header), *rows]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |"
        for line in lines
    )


def support() -> str:
    """What selection answers on each machine, natively and lowered, without hardware."""
    return table(
        ("arch", "query / cache", "heads", "block", "mask", "native", "lowered"),
        _support_rows(),
    )


def _support_rows() -> Iterator[tuple[str, ...]]:
    for device in MACHINES:
        libraries = " ".join(f"{k} {v}" for k, v in device.libraries.items())
        for dtypes in (("bf16", "bf16"), ("bf16", "fp8"), ("fp8", "fp8")):
            for heads in (16, 128):
                for query_len, mask in (
                    (1, "causal"),
                    (8, "causal"),
                    (8, "non_causal"),
                ):
                    problem = DecodeProblem(
                        num_q_heads=heads,
                        q_dtype=dtypes[0],
                        kv_dtype=dtypes[1],
                        query_lens=frozenset({query_len}),
                        masks=frozenset({Mask(mask)}),
                    )
                    native = _answer(problem, device, "refuse")
                    lowered = _answer(problem, device, "exact")
                    yield (
                        *(f"{device.arch} {libraries}".strip(), " / ".join(dtypes)),
                        *(str(heads), str(query_len), mask, native),
                        "" if lowered == native else lowered,
                    )


@cache
def _installed() -> dict[str, Candidate]:
    return discover()


def _answer(problem: DecodeProblem, device: DeviceInfo, policy: Any) -> str:
    found = survey(problem, device, lowering=policy, candidates=_installed())
    if found.outdated is not None:
        return f"refused: version ({found.outdated.got} is too old)"
    if found.selection is None:
        codes = sorted({str(r.code) for rs in found.refused.values() for r in rs})
        return "refused: " + ", ".join(codes)
    chosen = found.selection
    kind = "" if chosen.plan.kind == "native" else f", {chosen.plan.kind}"
    return f"`{chosen.backend.name}`{kind} ({_evidence(chosen.backend, device)})"


def _evidence(backend: Any, device: DeviceInfo) -> str:
    """The backend's own word, or the day on which the kit proved it on this hardware."""
    for report in _reports():
        if report.proves(backend.name, device):
            return f"hardware, {report.date}"
    return str(backend.evidence(device))


@cache
def _reports() -> tuple[hardware_reports.HardwareReport, ...]:
    return hardware_reports.kept()


def received() -> str:
    """The reports from hardware that the repository keeps."""
    header = ("backend", "device", "date", "libraries", "verdict", "cases")
    return table(header, (_received(report) for report in _reports()))


def _received(report: hardware_reports.HardwareReport) -> tuple[str, ...]:
    cases = ", ".join(f"{n} {word}" for word, n in report.counts.items() if n)
    failed = "".join(f", failed: `{case}`" for case in report.failed)
    return (
        f"[`{report.backend}`](reports/hardware/{report.file_name})"
        + (f", {report.asked}" if report.asked else ""),
        f"{report.device} ({report.arch})",
        report.date,
        ", ".join(f"{k} {v}" for k, v in report.libraries.items()),
        report.verdict,
        cases.replace("_", " ") + failed,
    )


def coverage() -> str:
    """AITER's non-causal blocks, cell by cell: how each is served, and its KV walks."""
    parts = []
    for release in ("0.1.20.post1", "0.1.16.post6"):
        for arch in ("gfx942", "gfx950"):
            device = DeviceInfo.assume(arch, libraries={"amd-aiter": release})
            parts.append(f"### AITER {release} on {arch}\n\n{_counts(device)}")
            if release == "0.1.20.post1":
                parts.extend(_grids(device))
    return "\n\n".join(parts)


def _counts(device: DeviceInfo) -> str:
    rows = []
    for needs_lse, policy in product((False, True), ("refuse", "exact")):
        found = Counter(
            cell.outcome for cell in cells(device, needs_lse=needs_lse, lowering=policy)
        )
        label = ("with LSE" if needs_lse else "without LSE", policy)
        rows.append((*label, *(str(found[outcome]) for outcome in OUTCOMES)))
    return table(("", "lowering", *OUTCOMES), iter(rows))


def _grids(device: DeviceInfo) -> Iterator[str]:
    """Letters: native, fold, pad, split; then KV walks. The flatten walks Q times."""
    found = {
        (cell.dtype, cell.kv_dtype, cell.num_heads, cell.query_len): cell
        for cell in cells(device, needs_lse=False, lowering="exact")
    }
    for dtypes in DTYPES:
        header = (f"{dtypes[0]} / {dtypes[1]}", *(f"Q={q}" for q in QUERY_LENS))
        rows = (
            (
                str(heads),
                *(_mark(found[dtypes[0], dtypes[1], heads, q]) for q in QUERY_LENS),
            )
            for heads in HEADS
        )
        yield table(header, rows)


def _mark(cell: Cell) -> str:
    return "-" if cell.kv_walks is None else f"{cell.outcome[0]}{cell.kv_walks}"


def cells(device: DeviceInfo, *, needs_lse: bool, lowering: Any) -> Iterator[Cell]:
    """What `mla-decode coverage` tabulates, for rocm_aiter."""
    return coverage_cells(device, "rocm_aiter", lowering, needs_lse=needs_lse)


def refusals() -> str:
    """Every code of a refusal, with its usual cause and what helps."""
    rows = ((f"`{code}`", code.cause, code.remedy) for code in RefusalCode)
    return table(("code", "cause", "what to do"), rows)


PARTS: dict[str, Callable[[], str]] = {
    "support": support,
    "coverage": coverage,
    "refusals": refusals,
    "received": received,
    "faults": faults.tables,
    **contract_page.PARTS,
}
