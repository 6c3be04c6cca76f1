"""The kernel tables: which MLA decode kernels an AITER release ships for an arch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from importlib import resources

ARCHS = ("gfx942", "gfx950")
"""Archs that have a table here: MI300X and MI325X, MI350X and MI355X."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelRow:
    """One decode kernel, by the key that AITER looks it up with."""

    q_dtype: str
    """`bf16` or `fp8`."""
    kv_dtype: str
    """`bf16`, `fp8` or `byte` (the 656-byte quantised layout)."""
    gqa: int
    """Heads of the key: after folding and normalisation, not the model's."""
    persistent: bool
    """Whether the kernel walks a schedule."""
    qseqlen: int
    """Query tokens of the key; 0 stands for any."""
    causal: int
    """The table's causal column, whose meaning changed at 0.1.20."""
    lse: bool
    """Whether the kernel can return the log-sum-exp."""
    round_robin: bool
    """Whether the kernel masks on the positions of a round-robin sharded cache."""
    kernel: str
    """The kernel's name, demangled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelTable:
    """All decode kernels of one arch, with where the rows were read."""

    arch: str
    """The arch that the kernels are built for."""
    source: str
    """A release (`0.1.20`) for a packaged table, a path for an installed one."""
    rows: tuple[KernelRow, ...]
    """In the order of the file: among rows of one key, AITER's order is unspecified."""

    def has_non_causal_rows(self) -> bool:
        """Whether any kernel leaves the mask out, if causal has its 0.1.20 meaning."""
        return any(row.causal == 0 for row in self.rows)


def parse_row(text: str) -> KernelRow:
    """Read one row of the packaged form."""
    q_dtype, kv_dtype, gqa, persistent, qseqlen, causal, lse, cprr, kernel = (
        text.split()
    )
    return KernelRow(
        q_dtype=q_dtype,
        kv_dtype=kv_dtype,
        gqa=int(gqa),
        persistent=persistent == "1",
        qseqlen=int(qseqlen),
        causal=int(causal),
        lse=lse == "1",
        round_robin=cprr == "1",
        kernel=kernel,
    )


@lru_cache(maxsize=1)
def packaged_tables() -> dict[tuple[str, str], KernelTable]:
    """Every packaged table, by (arch, first release that shipped it)."""
    text = (
        resources.files(__package__)
        .joinpath("data/kernel_tables.txt")
        .read_text(encoding="utf-8")
    )
    blocks: dict[tuple[str, str], list[KernelRow]] = {}
    rows: list[KernelRow] = []
    for line in text.splitlines():
        if not line or line.startswith("#"):
            continue
        if line.startswith("table "):
            _, arch, release = line.split()
            rows = blocks[arch, release] = []
        else:
            rows.append(parse_row(line))
    return {
        (arch, release): KernelTable(arch=arch, source=release, rows=tuple(rows))
        for (arch, release), rows in blocks.items()
    }
