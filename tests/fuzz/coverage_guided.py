"""Fuzz one parser of foreign text by coverage, with atheris, for as long as you like.

    pip install atheris
    python tests/fuzz/coverage_guided.py --list
    python tests/fuzz/coverage_guided.py "a trace" -max_total_time=600 [CORPUS_DIR]

What follows the parser's name is libFuzzer's. An untyped error ends the run and leaves the
text that caused it in a file ``crash-...``; one that takes long, in ``timeout-...``.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

OURS = ["mla_decode", "mla_decode_contract", "mla_decode_rocm_aiter", "packaging"]
"""Packages whose branches guide the search."""


def main() -> None:
    """Fuzz the parser that the first argument names."""
    try:
        import atheris
    except ImportError as error:
        sys.exit(f"{error}: pip install atheris (Linux, Python 3.11 to 3.13)")
    with atheris.instrument_imports(include=OURS):
        from fuzz_parsers import PARSERS, TYPED
    if len(sys.argv) < 2 or sys.argv[1] not in PARSERS:
        sys.exit("\n".join(["parsers:", *PARSERS]))
    parser = PARSERS[sys.argv.pop(1)]

    def read(data: bytes) -> None:
        try:
            parser.read(data)
        except TYPED:
            return

    with tempfile.TemporaryDirectory() as seeds:
        for number, text in enumerate(parser.seeds):
            Path(seeds, str(number)).write_bytes(text)
        atheris.Setup([*sys.argv, "-timeout=10", seeds], read)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
