"""What reads foreign text: each parser, valid text of its, and the error that it may raise.

A parser here takes bytes, as somebody else's file or variable holds them. Whatever they
are it returns, or raises `TYPED`: nothing else, and in bounded time.
"""

from __future__ import annotations

import importlib.util
import json
import tempfile
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from mla_decode import ContractError, Refusal
from mla_decode.cli.bench.trace import Columns, read_trace
from mla_decode_contract.known_failures import read_exceptions
from mla_decode_contract.reading import read_report
from mla_decode_contract.target import UsageProblem
from mla_decode_rocm_aiter.installation import find_version
from mla_decode_rocm_aiter.manifest import parse_manifest
from mla_decode_rocm_aiter.probe import read_record
from mla_decode_rocm_aiter.probe.shapes import ProbeShape
from mla_decode_rocm_aiter.profiles import find_profile
from mla_decode_rocm_aiter.simulation import read_variable

if TYPE_CHECKING:
    from collections.abc import Callable

TYPED = (ContractError, UsageProblem)


@dataclass(frozen=True, kw_only=True)
class Parser:
    """One reader of foreign text."""

    read: Callable[[bytes], object]
    """Returns what was read, or a refusal, or raises one of `TYPED`."""
    seeds: tuple[bytes, ...]
    """Valid text, which is read."""
    grown: Callable[[int], bytes] | None = None
    """Text of so many entries: how the time grows with it is tested."""


_SCRATCH = tempfile.TemporaryDirectory(prefix="mla-decode-fuzz-")


def _file(read):
    """A reader of paths as a reader of bytes."""
    path = Path(_SCRATCH.name) / f"{read.__name__}.text"

    def read_bytes(data):
        path.write_bytes(data)
        return read(path)

    return read_bytes


def _text(read):
    """A reader of text as a reader of bytes; an environment decodes like this."""
    return lambda data: read(
        data.replace(b"\0", b"").decode("utf-8", "surrogateescape")
    )


def _table(path):
    found = parse_manifest(path, "gfx950")
    if isinstance(found, Refusal):
        return found
    for row in found.rows:
        hash(row)
    return found


def _trace(path):
    requests = read_trace(path, Columns())
    arrivals = [request.arrival_s for request in requests]
    assert arrivals == sorted(arrivals), "arrivals are no numbers"
    return requests


def _known_failures(path):
    found = read_exceptions(path)
    assert all(0 < units < float("inf") for units in found.budgets.values())
    return found


def _variable(text):
    return read_variable(f"rocm_aiter{text}")


def _settings(text):
    from mla_decode_vllm.settings import read_settings

    names = ("MLA_DECODE_VLLM", "MLA_DECODE_VLLM_LOWERING", "MLA_DECODE_VLLM_OVER")
    words = text.split("\n")
    return read_settings(dict(zip(names, words, strict=False)))


TABLE_HEADER = b"qType,kvType,Gqa,ps,qSeqLen,prefill,causal,lse,cprr,knl_name,co_name\n"
TABLE_ROW = b"bf16,bf16,16,1,4,0,0,1,0,_ZN5aiter8mla_a_qhE,mla_a.co\n"
TRACE = b"TIMESTAMP,ContextTokens,GeneratedTokens\n"
ENTRY = b'[[known_failure]]\ncase="empty.block"\nreason="r"\nissue="i"\n'
TOLERANCE = b'[[tolerance]]\ncase = "lengths.one_key"\nunits = 6\nreason = "fp8"\n'


def _record(count):
    shapes = [
        ProbeShape(heads=16 * n, q=1, q_dtype="bf16", kv_dtype="bf16", causal=True)
        for n in range(1, count + 1)
    ]
    entries = [
        {"shape": shape.as_dict(), "outcome": "works", "detail": "0.01"}
        for shape in shapes
    ]
    return json.dumps(entries).encode()


def _report(count=1):
    """A report that the kit could have written, with one case so many times."""
    found = json.loads(
        resources.files("mla_decode_contract")
        .joinpath("schema/report.schema.json")
        .read_text(encoding="utf-8")
    )
    report = _example(found, found, count)
    report["counts"][report["cases"][0]["outcome"]] = count
    return json.dumps(report).encode()


def _example(schema, root, count):
    """The plainest value that a schema of the kit's kind allows."""
    if "$ref" in schema:
        at = root
        for key in schema["$ref"].removeprefix("#/").split("/"):
            at = at[key]
        return _example(at, root, count)
    for key in ("const", "enum"):
        if key in schema:
            return schema[key] if key == "const" else schema[key][-1]
    for key in ("anyOf", "oneOf"):
        if key in schema:
            return _example(schema[key][0], root, count)
    kind = schema.get("type", "object")
    kind = kind[0] if isinstance(kind, list) else kind
    if kind == "object":
        needed = schema.get("required", ())
        known = schema.get("properties", {})
        return {name: _example(known[name], root, count) for name in needed}
    if kind == "array":
        several = count if "items" in schema else 0
        return [_example(schema["items"], root, 1) for _ in range(several)]
    plain = {"string": "text", "integer": 0, "number": 1.0, "boolean": True}
    return plain.get(kind)


PARSERS = {
    "AITER's kernel table": Parser(
        read=_file(_table),
        seeds=(TABLE_HEADER + TABLE_ROW * 2, TABLE_HEADER),
        grown=lambda count: TABLE_HEADER + TABLE_ROW * count,
    ),
    "AITER's version file": Parser(
        read=_file(find_version),
        seeds=(b"__version__ = '0.1.20'\n",),
        grown=lambda count: b"__version__ = '" * count,
    ),
    "a release's name": Parser(
        read=_text(find_profile),
        seeds=(b"0.1.20.post1", b"v0.1.16.post6+rocm7.0", b"0.1.21.dev3"),
        grown=lambda count: b"0." * count,
    ),
    "a probe's record": Parser(
        read=_file(read_record), seeds=(_record(2), b"[]"), grown=_record
    ),
    "known failures": Parser(
        read=_file(_known_failures),
        seeds=(ENTRY + TOLERANCE, b""),
        grown=lambda count: ENTRY * count,
    ),
    "a report": Parser(read=_file(read_report), seeds=(_report(),), grown=_report),
    "a trace": Parser(
        read=_file(_trace),
        seeds=(
            TRACE + b"2023-11-16 18:17:03.9799600,4808,10\n0.5,12,3\n",
            TRACE + b"2023-11-16T18:17:03,1,1\n",
        ),
        grown=lambda count: TRACE + b"0.5,12,3\n" * count,
    ),
    "the simulator's variable": Parser(
        read=_text(_variable),
        seeds=(b":gfx950:0.1.20.post1",),
        grown=lambda count: b":gfx950" * count,
    ),
}
if importlib.util.find_spec("mla_decode_vllm") is not None:
    PARSERS["the plugin's variables"] = Parser(
        read=_text(_settings),
        seeds=(b"auto\nexact\nTRITON_MLA", b"off"),
        grown=lambda count: b"auto" * count,
    )
