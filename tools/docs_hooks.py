"""Hooks of mkdocs: the order of the pages, and the parts that come from the code.

A page asks for a part by a line ``<!-- generated: NAME -->``; an unknown name fails the
build.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mla_decode import DecodeProblem, DeviceInfo, Mask, discover, survey

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from mla_decode import Candidate

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
    "support.md",
    "refusals.md",
    "lowering.md",
    "dcp.md",
    "aiter.md",
    "flashmla.md",
    "triton.md",
    "hopper.md",
    "reports.md",
    "faults.md",
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

OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./([\w./-]+)\)")


def on_config(config: Any) -> Any:
    """Put the pages in a reader's order; what the order does not name comes last."""
    docs = Path(config["docs_dir"])
    found = {path.relative_to(docs).as_posix() for path in docs.rglob("*.md")}
    named = [page for page in ORDER if page in found]
    config["nav"] = named + sorted(found - set(named))
    return config


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Fill in what comes from the code; name files outside the site by their path.

    On GitHub such links work, in the site they would lead nowhere.
    """
    filled = MARKER.sub(lambda found: PARTS[found[1]](), markdown)
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
    return f"`{chosen.backend.name}`{kind} ({chosen.backend.evidence(device)})"


PARTS: dict[str, Callable[[], str]] = {"support": support}
