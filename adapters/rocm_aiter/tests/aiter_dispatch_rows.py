"""Read the recorded outcomes of AITER's own host code, row by row."""

import re
from pathlib import Path
from typing import NamedTuple

HEADS = (4, 8, 12, 16, 20, 24, 32, 33, 40, 48, 64, 80, 96, 112, 128)
RELEASES = (
    "0.1.13.post1",
    "0.1.14.post1",
    "0.1.16.post6",
    "0.1.18",
    "0.1.19.post2",
    "0.1.20.post1",
)


class Row(NamedTuple):
    """One call and what became of it."""

    release: str
    arch: str
    q_dtype: str
    kv_dtype: str
    persistent: bool
    causal: bool
    lse: bool
    heads: int
    q: int
    key: tuple[int, int, int] | None
    ends_process: bool


def read_rows(release):
    """Yield every recorded row of a release."""
    path = Path(__file__).parent / "data" / "dispatch_rows.txt"
    inside = False
    legend = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            continue
        if line.startswith("release "):
            _, name, *entries = line.split()
            inside = name == release
            legend = {
                letter: tuple(int(number) for number in key.split("/"))
                for letter, _, key in (entry.partition("=") for entry in entries)
            }
            continue
        if not inside:
            continue
        arch, q_dtype, kv_dtype, persistent, causal, lse, runs = line.split()
        outcomes = "".join(
            symbol * int(count or 1)
            for count, symbol in re.findall(r"(\d*)([a-zA-Z.!])", runs)
        )
        shapes = ((heads, q) for heads in HEADS for q in range(1, 17))
        for (heads, q), outcome in zip(shapes, outcomes, strict=True):
            yield Row(
                release=release,
                arch=arch,
                q_dtype=q_dtype,
                kv_dtype=kv_dtype,
                persistent=persistent == "1",
                causal=causal == "1",
                lse=lse == "1",
                heads=heads,
                q=q,
                key=legend.get(outcome),
                ends_process=outcome == "!",
            )
