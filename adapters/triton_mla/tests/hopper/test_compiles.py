"""Every variant compiles for sm_90 without a GPU, and fits."""

import os
import re
import subprocess
from pathlib import Path

import pytest
import torch

from mla_decode_triton.hopper.grid import MERGE_SHAPES

SHARED_LIMIT = 232448
STACK_LIMIT = 64
"""Bytes of a few words that are kept outside of every loop."""


def _descriptor(dtype, rows):
    from triton.experimental.gluon import language as gl

    bits = 8 if dtype == "fp8e4nv" else 16
    layout = gl.NVMMASharedLayout(bits * 8, bits, 3)
    return f"tensordesc<{dtype}[1,{rows},64],{layout!r}>"


def compile_gluon(kernel, dtype, page, *, kv_dtype=None, **constants):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon._runtime import GluonASTSource

    q_rows = constants.get("ROWS", 64)
    constants = {"NEEDS_LSE": True, "PAGE": page, **constants}
    types = dict.fromkeys(kernel.arg_names, "i32")
    types |= dict.fromkeys(("q_latent", "q_rope"), _descriptor(dtype, q_rows))
    types |= dict.fromkeys(("table", "seq_lens", "schedule"), "*i32")
    types |= dict.fromkeys(("lse", "partial_out", "partial_lse"), "*fp32")
    types |= dict.fromkeys(constants, "constexpr")
    types |= {"kv": _descriptor(kv_dtype or dtype, min(page, 64)), "scale_log2": "fp32"}
    attributes = {}
    if "page_stride" in types:
        types["kv"] = f"*{kv_dtype}"
        attributes[(kernel.arg_names.index("kv"),)] = [["tt.divisibility", 16]]
    if kv_dtype:
        types["kv_scale"] = "*fp32"
    types |= {"out": f"*{dtype}"}
    values = {(kernel.arg_names.index(k),): v for k, v in constants.items()}
    source = GluonASTSource(kernel, types, values, attributes)
    return triton.compile(
        source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4}
    )


def compile_plain(kernel, types, constants, num_warps):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    types = types | dict.fromkeys(constants, "constexpr")
    types = {name: types[name] for name in kernel.arg_names}
    values = {(kernel.arg_names.index(k),): v for k, v in constants.items()}
    return triton.compile(
        ASTSource(kernel, types, values, {}),
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": num_warps},
    )


def resources(compiled, tmp_path):
    """Registers and stack from the binary; counts of instructions from its listing."""
    import triton

    path = tmp_path / "kernel.cubin"
    path.write_bytes(compiled.asm["cubin"])
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    env = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}"}

    def dump(option):
        return subprocess.run(
            [str(tools / "cuobjdump"), option, str(path)],
            check=True,
            capture_output=True,
            text=True,
            env=env,
        ).stdout

    usage = dump("--dump-resource-usage")
    listing = dump("--dump-sass")
    registers = int(re.search(r"REG:(\d+)", usage).group(1))
    stack = int(re.search(r"STACK:(\d+)", usage).group(1))
    return registers, stack, listing


def spills_between_products(listing):
    """Lines that keep or fetch a spilled register between the products of a loop."""
    start, stop = listing.index("HGMMA"), listing.rindex("HGMMA")
    return re.findall(r".*\b(?:LDL|STL)\b.*", listing[start:stop])


def numbers_of_barriers(ptx, calls):
    """Numbers of Triton's barriers; `calls` counts those of a number in a register."""
    found = re.findall(r"\bbar(?:rier)?\.(sync|arrive)\s+([^;]*);", ptx)
    ours = [name for name, operands in found if operands.startswith("%")]
    assert {name: ours.count(name) for name in calls} == calls
    assert len(ours) == sum(calls.values())
    return {int(x.split(",")[0]) for _, x in found if not x.startswith("%")}


def branches_on_votes(listing):
    """What each warp does where its vote says so: the instructions that are skipped."""
    code = re.findall(r"/\*([0-9a-f]{4,})\*/\s+(.*?);", listing)
    places = {int(address, 16): i for i, (address, _) in enumerate(code)}
    for vote, (_, text) in enumerate(code):
        if text.startswith("VOTE.ANY"):
            jumps = (i for i in range(vote, len(code)) if " BRA 0x" in code[i][1])
            jump = next(jumps)
            target = places[int(code[jump][1].split()[-1], 16)]
            yield [text for _, text in code[jump + 1 : target]]


def check_many_rows(compiled, listing, *, reloads=0):
    """Hold what both variants for many rows have in common."""
    from mla_decode_triton.hopper.named_barriers import (
        LEFT_IS_FREE,
        RIGHT_IS_FREE,
        WEIGHTS,
    )

    # 36 steps of 16 columns for the scores, 4 of 16 tokens for each half of the values.
    assert listing.count("HGMMA") == 36 + 4 + 4
    # Products are waited for where that is written and nowhere else: a compiler that
    # serialises them says so only in a warning.
    assert listing.count("WARPGROUP.DEPBAR") == 3
    begin, scored = listing.index("HGMMA.64x64x"), listing.rindex("HGMMA.64x64x")
    values = listing.index("HGMMA.64x256x", scored)
    assert not re.search(r"\bSTL\b", listing[begin:values])
    assert len(re.findall(r"\bLDL\b", listing[begin:values])) <= reloads
    # One or two before the queries are free, after the last tile; one before the weights.
    assert listing[scored:values].count("BAR.SYNC") <= 3
    # Each is written once, and room is given twice and taken twice besides.
    theirs = numbers_of_barriers(
        compiled.asm["ptx"], {"arrive": 4 + 2 * 2, "sync": 3 + 2 * 2}
    )
    pairs = [n.value for n in (WEIGHTS, RIGHT_IS_FREE, LEFT_IS_FREE)]
    ours = {number + stage for number in pairs for stage in (0, 1)}
    assert len(ours) == 6
    assert max(theirs) < min(ours)
    assert max(ours) < 16
    # Warps branch each by itself, so they may do nothing there together.
    branches = list(branches_on_votes(listing))
    assert len(branches) == 2
    for branch in branches:
        assert sum("FMUL" in text for text in branch) >= 128
        together = r"\b(?:BAR|SYNCS|LDS|STS|HGMMA|WARPGROUP)\b"
        assert not [text for text in branch if re.search(together, text)]
    assert compiled.asm["ptx"].count(".reg .b32 mla_vote") == 1
    assert compiled.asm["ptx"].count("vote.sync.any.pred") == 2


def compile_merge(shape):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    from mla_decode_triton.hopper.launch import HopperStep
    from mla_decode_triton.hopper.merge_rows import merge_kernel as merge_rows_kernel

    step = HopperStep.alone(
        max_num_reqs=1,
        query_len=1,
        num_heads=16,
        device=torch.device("cpu"),
        multiprocessors=132,
    )
    variant = step.variants.merge(shape, torch.bfloat16, needs_lse=True)
    kernel, names = variant.kernel, variant.kernel.arg_names
    types = dict.fromkeys(names, "constexpr")
    types |= dict.fromkeys(("partial_out", "partial_lse", "lse"), "*fp32")
    types |= {"out": "*bf16", "table": "*i32", "num_rows": "i32"}
    values = {(names.index(k),): v for k, v in variant.constants.items()}
    aligned = "partial_out", "partial_lse", "out", "table"
    attributes = {(names.index(k),): [["tt.divisibility", 16]] for k in aligned}
    kind = GluonASTSource if kernel is merge_rows_kernel else ASTSource
    return triton.compile(
        kind(kernel, types, values, attributes),
        target=GPUTarget("cuda", 90, 32),
        options=variant.options,
    )


@pytest.fixture(autouse=True)
def needs_gluon():
    pytest.importorskip("triton.experimental.gluon", reason="needs Triton's Gluon")


def test_the_compilers_are_those_that_were_asked_for():
    import triton

    expected = os.environ.get("MLA_DECODE_EXPECT_TRITON")
    assert expected in {None, triton.__version__}


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize(
    ("dtype", "page"), [("bf16", 16), ("fp16", 16), ("bf16", 64), ("bf16", 128)]
)
def test_the_variant_for_many_rows_fits(dtype, page, tmp_path):
    from mla_decode_triton.hopper.asym import asym_kernel

    compiled = compile_gluon(asym_kernel, dtype, page, CAUSAL=True)
    assert compiled.metadata.shared <= SHARED_LIMIT
    registers, stack, listing = resources(compiled, tmp_path)
    assert registers <= 168
    # 3.6 spills more where the copying warp copies four boxes for one.
    assert stack <= (128 if page < 64 else STACK_LIMIT)
    assert listing.count("UTMALDG") == 9 + 9 * max(1, 64 // page)
    check_many_rows(compiled, listing)


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize(
    ("dtype", "page", "rows"), [("bf16", 64, 16), ("fp16", 16, 32), ("bf16", 128, 32)]
)
def test_the_variant_for_few_rows_fits(dtype, page, rows, tmp_path):
    from mla_decode_triton.hopper.swap import swap_kernel

    compiled = compile_gluon(swap_kernel, dtype, page, CAUSAL=False, ROWS=rows)
    assert compiled.metadata.shared <= SHARED_LIMIT
    _, stack, listing = resources(compiled, tmp_path)
    assert stack <= (192 if rows == 32 else 64)
    assert not spills_between_products(listing)
    assert listing.count("HGMMA") == 36 + 32
    assert listing.count("WARPGROUP.DEPBAR") == 2


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize(("page", "rows"), [(64, 16), (16, 32)])
def test_the_variant_for_fp8_caches_fits(page, rows, tmp_path):
    from mla_decode_triton.hopper.swap_fp8 import swap_fp8_kernel

    compiled = compile_gluon(
        swap_fp8_kernel, "bf16", page, kv_dtype="fp8e4nv", CAUSAL=True, ROWS=rows
    )
    assert compiled.metadata.shared <= SHARED_LIMIT
    registers, stack, listing = resources(compiled, tmp_path)
    assert registers <= 128
    assert stack <= (160 if rows == 32 else STACK_LIMIT)
    # 36 steps of 16 columns for the scores; 512 columns, in even and odd ones, by four
    # steps of 16 tokens for the values.
    assert listing.count("HGMMA") == 36 + 32
    assert listing.count("WARPGROUP.DEPBAR") == 1 + 1 + (8 if rows == 32 else 4)
    # Codes are read once for each product, 16 neighbours of a token or 16 pairs of a
    # column, and written nowhere.
    assert len(re.findall(r"LDS\.128", listing)) >= 64 * 576 // 128 // 16
    assert listing.count("LDSM.16.MT88.4") == 64 * 512 // 128 // 16
    assert listing.count("UTMALDG") == 9 + 9 * max(1, 64 // page)


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize("page", [16, 64, 128])
def test_the_variant_for_many_rows_of_fp8_caches_fits(page, tmp_path):
    from mla_decode_triton.hopper.asym_fp8 import asym_fp8_kernel

    compiled = compile_gluon(
        asym_fp8_kernel,
        "bf16",
        page,
        kv_dtype="fp8e4nv",
        CAUSAL=True,
        PREFETCH=3,
    )
    assert compiled.metadata.shared <= SHARED_LIMIT
    registers, stack, listing = resources(compiled, tmp_path)
    assert registers <= 168
    assert stack <= 96
    # 3.9 fetches one address in the scorer's loop.
    check_many_rows(compiled, listing, reloads=1)
    assert listing.count("UTMALDG") == 9
    assert listing.count("UBLKPF") == 3
    # Two tiles of 36 KB, 16 bytes a load of 128 threads; 72 KB of stores, between which
    # and the next products nothing is spilled. Results have stores of their own.
    assert len(re.findall(r"LDG\.E\.128", listing)) == 2 * 18
    assert listing.count("STS.128") >= 36
    start, stop = listing.index("HMUL2.BF16"), listing.rindex("HMUL2.BF16")
    assert not re.search(r"\b(?:LDL|STL)\b", listing[start:stop])


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
def test_the_work_table_fits_one_program(tmp_path):
    from mla_decode_triton.hopper.schedule import plan_kernel

    types = dict.fromkeys(("seq_lens", "table", "scratch"), "*i32")
    types |= dict.fromkeys(("num_reqs", "num_parts"), "i32")
    constants = {"OVERHEAD": 3, "MERGE": 3, "PIECE": 2, "SNAP": 2, "MIN_TILES": 1}
    constants |= {"BLOCK_REQS": 2048, "BLOCK_PARTS": 256, "STEPS": 11}
    registers, stack, _ = resources(
        compile_plain(plan_kernel, types, constants, 8), tmp_path
    )
    assert registers <= 255
    assert stack == 0


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize("shape", MERGE_SHAPES, ids=str)
def test_the_merge_keeps_its_pieces_in_registers(shape, tmp_path):
    compiled = compile_merge(shape)
    registers, stack, listing = resources(compiled, tmp_path)
    assert registers <= 64  # eight programs a multiprocessor, at the least
    assert stack == 0
    wait = listing.index("ACQBULK")  # for the kernel before it
    if shape.rows == 1:
        return
    assert compiled.metadata.shared == 0
    assert "SHFL" not in listing
    # A thread has 32 values of a round; the first round and all later ones.
    first, later = listing[wait:].split("BAR.SYNC")[:2]
    for part in first, later:
        loads = re.findall(r"\b(?:LDG|STG|FMUL|FFMA)[.\w]*", part)
        assert loads[-8:] == ["LDG.E.128"] * 8
    assert len(re.findall(r"LDG\.E\.128", listing)) == 2 * 8
