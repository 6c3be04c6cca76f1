"""The decode kernel: one tile of (token, head) rows, one walk over a range of the KV.

A program owns `BLOCK_ROWS` rows of one request (row = token * H + head, so a tile spans
tokens) and the token tiles ``[first, last)`` of one split. Each tile of the cache is
loaded once: its 576 columns give the scores, its first 512 are the values.
"""

import triton
import triton.language as tl

# tl.max and tl.sum are compiled functions, which interpreted kernels cannot call.
from triton.language.standard import (
    _elementwise_max,
    _sum_combine,
)

# Relative: the interpreted kernels are a package of their own, which calls its own.
from .operands import (
    as_operand,
    multiply,
    multiply_add,
    row_exponents,
    split_columns,
    unpair,
)

_LOWEST = tl.constexpr(-3.0e38)
"""Floor of the running maximum: finite, so that an empty row meets no inf - inf."""
_LN2 = tl.constexpr(0.6931471805599453)
_LATENT = tl.constexpr(512)
_ROPE = tl.constexpr(64)
_STRIPE = tl.constexpr(4)
"""Rows that the warps of a program load at a time."""
_ROW_MULTIPLE = tl.constexpr(32)
"""What a row's width is a multiple of, read one by one (576) or in pairs (288)."""


@triton.jit
def _find_pages(
    table_row, token0, seq_len, PAGE: tl.constexpr, BLOCK_TOKENS: tl.constexpr
):
    """The page of a tile, or its pages where they are shorter.

    Reads no slot past those in use.
    """
    if PAGE >= BLOCK_TOKENS:
        pages = tl.load(table_row + token0 // PAGE, mask=token0 < seq_len, other=0)
    else:
        slots = token0 // PAGE + tl.arange(0, BLOCK_TOKENS // PAGE)
        pages = tl.load(table_row + slots, mask=slots * PAGE < seq_len, other=0)
    return pages


@triton.jit
def _load_tile(
    kv,
    pages,
    token0,
    seq_len,
    page_stride,
    PAGE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    PACK: tl.constexpr,
    STRIPED: tl.constexpr,
):
    """Load [BLOCK_TOKENS, 512 / PACK] and [BLOCK_TOKENS, 64 / PACK] of the cache, once.

    Reads no slot of a page at or past `seq_len`: such rows are zero.
    """
    LATENT: tl.constexpr = _LATENT // PACK
    ROPE: tl.constexpr = _ROPE // PACK
    WIDTH: tl.constexpr = LATENT + ROPE
    tokens = token0 + tl.arange(0, BLOCK_TOKENS)
    inside = tokens < seq_len
    if PAGE >= BLOCK_TOKENS:
        base = kv + (pages.to(tl.int64) * page_stride + (token0 % PAGE) * WIDTH)
        if STRIPED:
            # A thread's rows are _STRIPE apart: offsets counted so differ by constants,
            # where a register for each would be held all along the walk.
            stripes = tl.arange(0, BLOCK_TOKENS // _STRIPE) * (_STRIPE * WIDTH)
            stripe = tl.arange(0, _STRIPE) * WIDTH
            rows = tl.reshape(stripes[:, None] + stripe[None, :], [BLOCK_TOKENS])
            # Triton 3.6 forgets it in a reshape.
            rows = tl.multiple_of(rows, _ROW_MULTIPLE)
        else:
            rows = tl.arange(0, BLOCK_TOKENS) * WIDTH
    else:
        # Spread over their tokens here and not when found: fewer registers wait.
        pages = tl.broadcast_to(pages[:, None], [BLOCK_TOKENS // PAGE, PAGE])
        pages = tl.reshape(pages, [BLOCK_TOKENS])
        base = (kv + pages.to(tl.int64) * page_stride)[:, None]
        rows = (tokens % PAGE) * WIDTH
    latent_ptrs = base + (rows[:, None] + tl.arange(0, LATENT)[None, :])
    rope_ptrs = base + (rows[:, None] + (tl.arange(0, ROPE) + LATENT)[None, :])
    latent = tl.load(latent_ptrs, mask=inside[:, None], other=0.0)
    rope = tl.load(rope_ptrs, mask=inside[:, None], other=0.0)
    return latent, rope


@triton.jit
def _weigh(scores, seen, peak, total):
    """Weights of a tile under the new running maximum; `decay` is due to the old ones."""
    scores = tl.where(seen, scores, float("-inf"))
    new_peak = tl.maximum(peak, tl.reduce(scores, 1, _elementwise_max))
    decay = tl.exp2(peak - new_peak)
    weights = tl.exp2(scores - new_peak[:, None])
    total = total * decay + tl.reduce(weights, 1, _sum_combine)
    return new_peak, total, decay, weights


@triton.jit(
    do_not_specialize=["num_heads", "query_len", "table_stride", "num_splits"],
    do_not_specialize_on_alignment=[
        "table_ptr",
        "seq_lens_ptr",
        "kv_scale_ptr",
        "lse_ptr",
    ],
)
def decode_kernel(
    q_latent_ptr,
    q_rope_ptr,
    kv_ptr,
    table_ptr,
    seq_lens_ptr,
    kv_scale_ptr,
    out_ptr,
    lse_ptr,
    scale_log2,
    num_heads,
    query_len,
    q_latent_token_stride,
    q_latent_head_stride,
    q_rope_token_stride,
    q_rope_head_stride,
    page_stride,
    table_stride,
    num_splits,
    PAGE: tl.constexpr,
    CAUSAL: tl.constexpr,
    SPLIT: tl.constexpr,
    NEEDS_LSE: tl.constexpr,
    OPERAND: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    STAGES: tl.constexpr,
    DETACHED: tl.constexpr,
    WIDEN_IN_PTX: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    PAIRED: tl.constexpr,
    UPCAST: tl.constexpr,
    TILES_PER_SPLIT: tl.constexpr,
):
    """Attend one tile of rows over one split of its request's KV.

    Grid: (row tiles, splits, requests). With `SPLIT`, `out_ptr` is float32
    [num_splits, requests * query_len * num_heads, 512] and `lse_ptr` float32
    [requests * query_len * num_heads, num_splits] in units of log2: the merge kernel's
    input. Without it they are the caller's tensors, and the lse is natural.

    With `PAIRED` the cache is fp8 and read as pairs of columns, 2-byte aligned; even and
    odd columns are multiplied apart, in float16, and joined at the end.

    Rows of a request without keys are not read: their outputs are the EMPTY values.
    """
    row_tile = tl.program_id(0)
    split = tl.program_id(1)
    request = tl.program_id(2)
    seq_len = tl.load(seq_lens_ptr + request)
    num_tiles = (seq_len + BLOCK_TOKENS - 1) // BLOCK_TOKENS
    if TILES_PER_SPLIT:
        share = TILES_PER_SPLIT
    else:
        share = (num_tiles + num_splits - 1) // num_splits
    first = split * share
    last = tl.minimum(first + share, num_tiles)

    num_rows = query_len * num_heads
    rows = row_tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    token = rows // num_heads
    head = rows % num_heads
    has_keys = rows < tl.where(first < last, num_rows, 0)
    latent_cols = tl.arange(0, _LATENT)
    rope_cols = tl.arange(0, _ROPE)
    token_base = request.to(tl.int64) * query_len
    q_latent_base = q_latent_ptr + token_base * q_latent_token_stride
    q_rope_base = q_rope_ptr + token_base * q_rope_token_stride
    q_latent_rows = token * q_latent_token_stride + head * q_latent_head_stride
    q_rope_rows = token * q_rope_token_stride + head * q_rope_head_stride
    q_latent = tl.load(
        q_latent_base + (q_latent_rows[:, None] + latent_cols[None, :]),
        mask=has_keys[:, None],
        other=0.0,
    )
    q_rope = tl.load(
        q_rope_base + (q_rope_rows[:, None] + rope_cols[None, :]),
        mask=has_keys[:, None],
        other=0.0,
    )
    if kv_scale_ptr is not None:
        kv_scale = tl.load(kv_scale_ptr)
        scale_log2 = scale_log2 * kv_scale
    if SCALE_ROWS:
        exponents = row_exponents(q_latent, q_rope)[:, None]
        q_latent = q_latent.to(tl.float32) / exponents
        q_rope = q_rope.to(tl.float32) / exponents
        scale_log2 = scale_log2 * exponents
    q_latent = as_operand(q_latent, OPERAND, False, UPCAST)
    q_rope = as_operand(q_rope, OPERAND, False, UPCAST)
    if PAIRED:
        q_latent, q_latent_odd = split_columns(q_latent, BLOCK_ROWS, _LATENT)
        q_rope, q_rope_odd = split_columns(q_rope, BLOCK_ROWS, _ROPE)
        kv_ptr = kv_ptr.to(tl.pointer_type(tl.int16))
        page_stride = page_stride // 2
    if CAUSAL:
        visible_keys = seq_len - query_len + token + 1
    else:
        visible_keys = tl.full([BLOCK_ROWS], 0, tl.int32) + seq_len
    table_row = table_ptr + request.to(tl.int64) * table_stride

    peak = tl.full([BLOCK_ROWS], _LOWEST, tl.float32)
    total = tl.full([BLOCK_ROWS], 0, tl.float32)
    PACK: tl.constexpr = 2 if PAIRED else 1
    acc = tl.full([BLOCK_ROWS, _LATENT // PACK], 0, tl.float32)
    acc_odd = acc
    decay = tl.full([BLOCK_ROWS], 0, tl.float32)
    weights = tl.full([BLOCK_ROWS, BLOCK_TOKENS], 0, tl.float32 if UPCAST else OPERAND)
    # Found a tile ahead: a load whose address is itself loaded would be pipelined less.
    pages = _find_pages(table_row, first * BLOCK_TOKENS, seq_len, PAGE, BLOCK_TOKENS)
    # Only where registers are short. A narrow walk that so comes below 128 of a thread
    # is held to 128 by the assembler, for programs that shared memory has no room for,
    # and values are then no longer fetched ahead of the products that take them.
    STRIPED: tl.constexpr = PAIRED or DETACHED
    for tile in tl.range(first, last, num_stages=STAGES):
        token0 = tile * BLOCK_TOKENS
        latent, rope = _load_tile(
            kv_ptr,
            pages,
            token0,
            seq_len,
            page_stride,
            PAGE,
            BLOCK_TOKENS,
            PACK,
            STRIPED,
        )
        pages = _find_pages(
            table_row, token0 + BLOCK_TOKENS, seq_len, PAGE, BLOCK_TOKENS
        )
        tokens = token0 + tl.arange(0, BLOCK_TOKENS)
        seen = tokens[None, :] < visible_keys[:, None]
        if PAIRED:
            latent, latent_odd = unpair(latent, UPCAST)
            rope, rope_odd = unpair(rope, UPCAST)
            # Scaled one by one: sums of products would become one chain of them.
            scores = multiply(q_rope, rope.T, UPCAST)
            scores = multiply_add(q_rope_odd, rope_odd.T, scores, UPCAST) * scale_log2
            scores += multiply(q_latent, latent.T, UPCAST) * scale_log2
            scores += multiply(q_latent_odd, latent_odd.T, UPCAST) * scale_log2
            peak, total, decay, weights32 = _weigh(scores, seen, peak, total)
            weights = as_operand(weights32, OPERAND, False, UPCAST)
            acc_odd = acc_odd * decay[:, None]
            acc_odd = multiply_add(weights, latent_odd, acc_odd, UPCAST)
            acc = multiply_add(weights, latent, acc * decay[:, None], UPCAST)
        else:
            latent = as_operand(latent, OPERAND, WIDEN_IN_PTX, UPCAST)
            rope = as_operand(rope, OPERAND, WIDEN_IN_PTX, UPCAST)
            scores = multiply(q_rope, rope.T, UPCAST) * scale_log2
            if DETACHED:
                # Always true. Triton gives every warp group all the tokens of a product
                # that feeds another; the region hides that this one does, and halves it.
                if tile < last:
                    scores += multiply(q_latent, latent.T, UPCAST) * scale_log2
                    peak, total, decay, weights32 = _weigh(scores, seen, peak, total)
                    weights = as_operand(weights32, OPERAND, False, UPCAST)
            else:
                scores += multiply(q_latent, latent.T, UPCAST) * scale_log2
                peak, total, decay, weights32 = _weigh(scores, seen, peak, total)
                weights = as_operand(weights32, OPERAND, False, UPCAST)
            acc = acc * decay[:, None]
            acc = multiply_add(weights, latent, acc, UPCAST)

    if PAIRED:
        acc = tl.reshape(tl.join(acc, acc_odd), [BLOCK_ROWS, _LATENT])
    empty = total == 0.0
    safe_total = tl.where(empty, 1.0, total)
    factor = 1.0 / safe_total
    if kv_scale_ptr is not None:
        factor = factor * kv_scale
    acc = tl.where(empty[:, None], 0.0, acc * factor[:, None])
    lse_log2 = tl.where(empty, float("-inf"), peak + tl.log2(safe_total))
    # 64-bit up to the tile, 32-bit within it. Counted from the tile's first row, so
    # that offsets are constants and none is held while the keys are walked.
    row_base = token_base * num_heads + row_tile * BLOCK_ROWS
    tile_rows = tl.arange(0, BLOCK_ROWS)
    left = num_rows - row_tile * BLOCK_ROWS
    stored = tile_rows < left
    places = (tile_rows * _LATENT)[:, None] + latent_cols[None, :]
    if SPLIT:
        lse_ptrs = lse_ptr + row_base * num_splits + split + tile_rows * num_splits
        tl.store(lse_ptrs, lse_log2, mask=stored)
        first_of_split = split * (tl.num_programs(2).to(tl.int64) * num_rows)
        written = tile_rows < tl.where(first < last, left, 0)
        partial_ptrs = out_ptr + (first_of_split + row_base) * _LATENT + places
        tl.store(partial_ptrs, acc, mask=written[:, None])
    else:
        if NEEDS_LSE:
            tl.store(lse_ptr + row_base + tile_rows, lse_log2 * _LN2, mask=stored)
        out_ptrs = out_ptr + row_base * _LATENT + places
        tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=stored[:, None])
