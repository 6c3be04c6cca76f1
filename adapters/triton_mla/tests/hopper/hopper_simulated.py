"""A batch through a variant, as the device would run it: table, kernel, merge."""

import math
from dataclasses import dataclass

import hopper_simulator
import torch
from hopper_batches import KV_SCALE, SCALE, make_batch, oracle
from hopper_simulator import Descriptor, Pointer, flat

HEADER = 8
BLOCK_PARTS = 16


@dataclass(frozen=True, kw_only=True, eq=False)
class Case:
    """A batch, its work table and the float64 truth."""

    q: torch.Tensor
    cache: torch.Tensor
    table: torch.Tensor
    seq_lens: torch.Tensor
    query_len: int
    num_heads: int
    causal: bool
    num_parts: int
    scale: float
    schedule: torch.Tensor
    expected: tuple[torch.Tensor, torch.Tensor]

    @property
    def num_rows(self):
        return self.query_len * self.num_heads

    @property
    def is_fp8(self):
        return self.cache.dtype == torch.float8_e4m3fn


def make_case(
    plan_kernel,
    lens,
    *,
    query_len,
    num_heads,
    page,
    causal,
    num_parts,
    dtype=torch.bfloat16,
    fp8=False,
    seed=0,
    gap=0,
    scale=SCALE,
):
    """Draw a batch and plan it."""
    q, cache, table = make_batch(
        lens, query_len, num_heads, page, dtype, seed=seed, gap=gap
    )
    truth = cache
    if fp8:
        cache = cache.to(torch.float8_e4m3fn)
        truth = cache.double() * KV_SCALE
    seq_lens = torch.tensor(lens, dtype=torch.int32)
    return Case(
        q=q,
        cache=cache,
        table=table,
        seq_lens=seq_lens,
        query_len=query_len,
        num_heads=num_heads,
        causal=causal,
        num_parts=num_parts,
        scale=scale,
        schedule=plan_batch(plan_kernel, seq_lens, num_parts),
        expected=oracle(
            q, truth, table, lens, query_len, num_heads, causal=causal, scale=scale
        ),
    )


def plan_batch(plan_kernel, seq_lens, num_parts):
    """The work table of a batch."""
    steps = len(seq_lens).bit_length()
    schedule = torch.full((HEADER + 8 * BLOCK_PARTS,), 2**30, dtype=torch.int32)
    plan_kernel[(1,)](
        seq_lens,
        schedule,
        torch.empty(2 * (1 << steps) + 8 * BLOCK_PARTS, dtype=torch.int32),
        len(seq_lens),
        num_parts,
        OVERHEAD=3,
        MERGE=3,
        PIECE=2,
        SNAP=2,
        MIN_TILES=1,
        BLOCK_REQS=1 << steps,
        BLOCK_PARTS=BLOCK_PARTS,
        STEPS=steps,
    )
    return schedule


def simulate(case, variant, *, rows=None, merge=None, seed=0, trees=None):
    """What a variant makes of a case: (out, lse).

    Args:
        case: Of `make_case`.
        variant: The kernel's name.
        rows: Of a program; None: as few as hold a request's, or the variant's most.
        merge: A function as `merge_pieces`, which it is by default.
        seed: Of the schedule, and of how many tiles ahead are prefetched.
        trees: Syntax trees of modules in place of their own.
    """
    from mla_decode_triton.hopper import asym, asym_fp8, swap, swap_fp8

    num_rows = case.num_rows
    many = variant.startswith("asym")
    tile_rows = rows or (64 if many else 16 if num_rows <= 16 else 32)
    own = {} if many else {"ROWS": tile_rows}
    if case.is_fp8:
        own["kv_scale"] = Pointer(torch.tensor([KV_SCALE]))
    if variant == "asym_fp8":
        own["kv"] = Pointer(flat(case.cache))
        own |= {"page_stride": case.cache.stride(0) // 16, "PREFETCH": seed % 4}
    else:
        own["kv"] = Descriptor(case.cache, [1, min(case.cache.shape[1], 64), 64])
        own["num_pages"] = case.cache.shape[0]
    nan = float("nan")
    out = torch.full((len(case.q) * num_rows * 512,), nan, dtype=case.q.dtype)
    lse = torch.full((len(case.q) * num_rows,), nan)
    partial_out = torch.full((2 * case.num_parts * num_rows * 512,), nan)
    partial_lse = torch.full((2 * case.num_parts * num_rows,), nan)
    arguments = dict(
        q_latent=Descriptor(case.q[..., :512], [1, tile_rows, 64]),
        q_rope=Descriptor(case.q[..., 512:], [1, tile_rows, 64]),
        table=Pointer(case.table.flatten()),
        seq_lens=Pointer(case.seq_lens),
        schedule=Pointer(case.schedule),
        out=Pointer(out),
        lse=Pointer(lse),
        partial_out=Pointer(partial_out),
        partial_lse=Pointer(partial_lse),
        scale_log2=case.scale * math.log2(math.e),
        num_heads=case.num_heads,
        query_len=case.query_len,
        table_stride=case.table.stride(0),
        num_reqs=len(case.q),
        num_parts=case.num_parts,
        CAUSAL=case.causal,
        NEEDS_LSE=True,
        PAGE=case.cache.shape[1],
        **own,
    )
    hopper_simulator.run(
        {"asym": asym, "asym_fp8": asym_fp8, "swap": swap, "swap_fp8": swap_fp8}[
            variant
        ],
        f"{variant}_kernel",
        (math.ceil(num_rows / tile_rows), case.num_parts),
        arguments,
        seed=seed,
        trees=trees,
    )
    buffers = partial_out, partial_lse, out, lse, case.schedule, num_rows
    (merge or merge_pieces)(*buffers)
    return out.view(-1, num_rows, 512), lse.view(-1, num_rows)


def merge_pieces(
    partial_out,
    partial_lse,
    out,
    lse,
    schedule,
    num_rows,
    *,
    block_parts=BLOCK_PARTS,
):
    """Merge as `merge_kernel` does, which is slow to interpret."""
    used = partial_lse.numel() // num_rows * num_rows
    partial_out = partial_out.view(-1, 512)[:used].view(-1, num_rows, 512)
    partial_lse = partial_lse[:used].view(-1, num_rows)
    num_splits, *entries = schedule[
        [0, *range(HEADER + 4 * block_parts, len(schedule))]
    ]
    for entry in range(num_splits):
        request, part, before = (int(x) for x in entries[4 * entry : 4 * entry + 3])
        pieces = int(entries[4 * entry + 6]) - before + 1
        slots = [2 * part + 1, *range(2 * part + 2, 2 * (part + pieces), 2)]
        logs = partial_lse[slots]
        total = logs.mul(math.log(2)).logsumexp(0)
        weights = torch.exp2(logs - logs.amax(0).nan_to_num(neginf=0.0))
        weights /= weights.sum(0).clamp(min=1e-30)
        merged = (partial_out[slots] * weights[..., None]).sum(0)
        out.view(-1, num_rows, 512)[request] = merged.to(out.dtype)
        lse.view(-1, num_rows)[request] = total


def interpreted_merge(merge_kernel, *, columns):
    """`merge_kernel` as a function like `merge_pieces`."""

    def merge(partial_out, partial_lse, out, lse, schedule, num_rows):
        merge_kernel[(3,)](
            partial_out,
            partial_lse,
            out,
            lse,
            schedule,
            num_rows,
            NEEDS_LSE=True,
            BLOCK_PARTS=BLOCK_PARTS,
            BLOCK_PIECES=4,
            BLOCK_COLUMNS=columns,
            EARLY=False,
        )

    return merge


def simulated_merge(shape, *, trees=None, needs_lse=True):
    """`merge_rows.merge_kernel` in the simulator, as a function like `merge_pieces`."""
    from mla_decode_triton.hopper import merge_rows

    def merge(partial_out, partial_lse, out, lse, schedule, num_rows):
        num_parts = partial_lse.numel() // num_rows // 2
        num_reqs = out.numel() // num_rows // 512
        row_blocks = math.ceil(num_rows / shape.rows)
        arguments = {
            "partial_out": Pointer(partial_out, is_late=True),
            "partial_lse": Pointer(partial_lse, is_late=True),
            "out": Pointer(out, is_late=True),
            "lse": Pointer(lse, is_late=True),
            "table": Pointer(schedule),
            "num_rows": num_rows,
            "NEEDS_LSE": needs_lse,
            "BLOCK_PARTS": BLOCK_PARTS,
            "BLOCK_ROWS": shape.rows,
            "BLOCK_PIECES": shape.pieces,
            "BLOCK_COLUMNS": shape.columns,
            "LOOPS": shape.programs > 0,
        }
        units = min(num_reqs, num_parts) * row_blocks * shape.blocks
        hopper_simulator.run(
            merge_rows,
            "merge_kernel",
            (min(units, shape.programs) or units, 1),
            arguments,
            trees=trees,
        )

    return merge
