"""Read the kernel table of the installed AITER, without importing it."""

from __future__ import annotations

import csv
import re
from typing import TYPE_CHECKING

from mla_decode.refusal import Refusal, RefusalCode
from mla_decode_rocm_aiter.tables import KernelRow, KernelTable

if TYPE_CHECKING:
    from pathlib import Path

    from mla_decode_rocm_aiter.installation import Installation

_NEEDED = frozenset({"qType", "kvType", "Gqa", "ps", "qSeqLen", "causal", "knl_name"})


def read_manifest(installation: Installation, arch: str) -> KernelTable | Refusal:
    """The decode rows of the installed kernel table of an arch.

    Prefill rows are left out. The table is compiled into AITER's module: a prebuilt
    module may be older than the file that lies beside it.
    """
    path = installation.table_path(arch)
    if not path.exists():
        return Refusal(
            code=RefusalCode.ARCH,
            message=f"the installed AITER has no MLA kernel table for {arch}",
            got=f"AITER {installation.version}, {path} is missing",
            allowed="an AITER built with its hsa folder, 0.1.10.post1 or newer",
            fix="reinstall AITER with its kernels, or set AITER_META_DIR",
        )
    return parse_manifest(path, arch)


def parse_manifest(path: Path, arch: str) -> KernelTable | Refusal:
    """Parse one `mla_asm.csv`; columns differ by release and arch."""
    rows, number = [], 1
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            columns = frozenset(reader.fieldnames or ())
            if not columns >= _NEEDED:
                return Refusal(
                    code=RefusalCode.VERSION,
                    message="the kernel table has columns that nobody has read yet",
                    got=f"{path} lacks {', '.join(sorted(_NEEDED - columns))}",
                    allowed=", ".join(sorted(_NEEDED)),
                    fix="use a release with a profile, or report the table's header",
                )
            for line in reader:
                number = reader.line_num
                if line.get("prefill", "0") != "1":
                    rows.append(_row(line))
    except (OSError, csv.Error, ValueError, TypeError) as error:
        return Refusal(
            code=RefusalCode.VERSION,
            message="the kernel table cannot be read",
            got=f"{path}, line {number}: {error}",
            allowed="UTF-8 lines of as many fields as the header, numbers as numbers",
            fix="reinstall AITER with its kernels",
        )
    return KernelTable(arch=arch, source=str(path), rows=tuple(rows))


def _row(line: dict[str, str]) -> KernelRow:
    """One row; `lse` came with 0.1.12, `cprr` with 0.1.17 and for gfx950 alone."""
    return KernelRow(
        q_dtype=line["qType"],
        kv_dtype=line["kvType"],
        gqa=int(line["Gqa"]),
        persistent=line["ps"] == "1",
        qseqlen=int(line["qSeqLen"]),
        causal=int(line["causal"]),
        lse=line.get("lse") == "1",
        round_robin=line.get("cprr") == "1",
        kernel=demangle(line["knl_name"]),
    )


def demangle(symbol: str) -> str:
    """The name inside `_ZN5aiter<length><name>E`; anything else stays as it is."""
    match = re.fullmatch(r"_ZN5aiter\d+(\D.*)E", symbol)
    return match[1] if match else symbol
