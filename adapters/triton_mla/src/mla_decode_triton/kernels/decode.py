"""The decode kernel: one tile of (token, head) rows, one walk over a range of the KV.

A program owns `BLOCK_ROWS` rows of one request (row = token * H + head, so a tile spans
tokens) and the token tiles ``[first, last)`` of one split. Each tile of the cache is
loaded once: its 576 columns give the scores, its first 512 are the values.

Two orientations of the same arithmetic. Upright: scores [rows, tokens], accumulator
[rows, 512]. Swapped: scores [tokens, rows], accumulator [512, rows]; the matrix unit's
64-row operand is then the cache, so few query rows do not pad to 64.
"""

import triton
import triton.language as tl

# tl.max and tl.sum are compiled functions: interpreted kernels cannot call them.
from triton.language.standard import (  # noqa: PLC2701 - the combiners of tl.max and tl.sum
    _elementwise_max,
    _sum_combine,
)

_LOWEST = tl.constexpr(-3.0e38)
"""Floor of the running maximum: finite, so that an empty row meets no inf - inf."""
_LATENT = tl.constexpr(512)
_ROPE = tl.constexpr(64)
_WIDTH = tl.constexpr(576)


@triton.jit
def _as_operand(x, like: tl.constexpr, UPCAST: tl.constexpr):
    """Give a matrix operand its compute dtype; float32 where dots are interpreted."""
    if UPCAST:
        x = x.to(tl.float32)
    else:
        x = x.to(like)
    return x


@triton.jit
def _load_whole_tile(
    latent_desc,
    rope_desc,
    table_row,
    token0,
    PAGE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
):
    """Load [BLOCK_TOKENS, 512] and [BLOCK_TOKENS, 64] of one page through descriptors."""
    page = tl.load(table_row + token0 // PAGE)
    latent = latent_desc.load([page, token0 % PAGE, 0])
    rope = rope_desc.load([page, token0 % PAGE, _LATENT])
    return latent.reshape(BLOCK_TOKENS, _LATENT), rope.reshape(BLOCK_TOKENS, _ROPE)


@triton.jit
def _load_tile(
    kv,
    table_row,
    token0,
    seq_len,
    page_stride,
    PAGE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
):
    """Load [BLOCK_TOKENS, 512] and [BLOCK_TOKENS, 64] of the cache through pointers.

    Reads no slot at or past `seq_len`, neither of the table nor of a page.
    """
    cols = tl.arange(0, BLOCK_TOKENS)
    tokens = token0 + cols
    inside = tokens < seq_len
    if PAGE >= BLOCK_TOKENS:
        page = tl.load(table_row + token0 // PAGE).to(tl.int64)
        base = kv + (page * page_stride + (token0 % PAGE) * _WIDTH)
        rows = cols * _WIDTH
    else:
        page = tl.load(table_row + tokens // PAGE, mask=inside, other=0)
        base = kv
        rows = page.to(tl.int64) * page_stride + (tokens % PAGE) * _WIDTH
    latent_ptrs = base + (rows[:, None] + tl.arange(0, _LATENT)[None, :])
    rope_ptrs = base + (rows[:, None] + (tl.arange(0, _ROPE) + _LATENT)[None, :])
    latent = tl.load(latent_ptrs, mask=inside[:, None], other=0.0)
    rope = tl.load(rope_ptrs, mask=inside[:, None], other=0.0)
    return latent, rope


@triton.jit
def _softmax_step(scores, peak, total, TOKEN_AXIS: tl.constexpr):
    """Weights of a tile under the new running maximum, and what the old ones decay by."""
    new_peak = tl.maximum(peak, tl.reduce(scores, TOKEN_AXIS, _elementwise_max))
    decay = tl.exp2(peak - new_peak)
    weights = tl.exp2(scores - tl.expand_dims(new_peak, TOKEN_AXIS))
    total = total * decay + tl.reduce(weights, TOKEN_AXIS, _sum_combine)
    return new_peak, total, decay, weights


@triton.jit
def _hide(scores, tokens, visible_keys, SWAPPED: tl.constexpr):
    """Minus infinity where a row does not see a token."""
    if SWAPPED:
        seen = tokens[:, None] < visible_keys[None, :]
    else:
        seen = tokens[None, :] < visible_keys[:, None]
    return tl.where(seen, scores, float("-inf"))


@triton.jit
def _absorb_tile(
    q_latent,
    q_rope,
    latent,
    rope,
    visible_keys,
    token0,
    is_within,
    scale_log2,
    peak,
    total,
    acc,
    decay,
    operand,
    COMPUTE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    SWAPPED: tl.constexpr,
    DETACHED: tl.constexpr,
    MASKED: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """One online-softmax step over a tile of the cache.

    `decay` and `operand` (the weights as a matrix operand) are carried by the loop only
    for a detached tile: see `Tile.detached`.
    """
    latent = _as_operand(latent, COMPUTE, UPCAST)
    rope = _as_operand(rope, COMPUTE, UPCAST)
    tokens = token0 + tl.arange(0, BLOCK_TOKENS)
    if SWAPPED:
        scores = tl.dot(rope, q_rope.T)
        scores = tl.dot(latent, q_latent.T, scores) * scale_log2
        if MASKED:
            scores = _hide(scores, tokens, visible_keys, True)
        peak, total, decay, weights = _softmax_step(scores, peak, total, 0)
        acc = acc * decay[None, :]
        acc = tl.dot(latent.T, _as_operand(weights, COMPUTE, UPCAST), acc)
    else:
        scores = tl.dot(q_rope, rope.T) * scale_log2
        if DETACHED:
            # Always true. A region hides from the compiler that these scores feed the
            # next product, which would make it give every warp group all the tokens.
            if is_within:
                scores += tl.dot(q_latent, latent.T) * scale_log2
                if MASKED:
                    scores = _hide(scores, tokens, visible_keys, False)
                peak, total, decay, weights = _softmax_step(scores, peak, total, 1)
                operand = _as_operand(weights, COMPUTE, UPCAST)
            acc = acc * decay[:, None]
            acc = tl.dot(operand, latent, acc)
        else:
            scores += tl.dot(q_latent, latent.T) * scale_log2
            if MASKED:
                scores = _hide(scores, tokens, visible_keys, False)
            peak, total, decay, weights = _softmax_step(scores, peak, total, 1)
            acc = acc * decay[:, None]
            acc = tl.dot(_as_operand(weights, COMPUTE, UPCAST), latent, acc)
    return peak, total, acc, decay, operand


@triton.jit
def _store_rows(base, offsets, values, inside, columns, SWAPPED: tl.constexpr):
    """Store an accumulator of either orientation as rows of 512."""
    values = values.to(base.dtype.element_ty)
    if SWAPPED:
        tl.store(base + (offsets[None, :] + columns[:, None]), values, inside[None, :])
    else:
        tl.store(base + (offsets[:, None] + columns[None, :]), values, inside[:, None])


@triton.jit(
    do_not_specialize=[
        "num_heads",
        "query_len",
        "table_stride",
        "num_splits",
    ]
)
def decode_kernel(
    q_latent_ptr,
    q_rope_ptr,
    kv_ptr,
    latent_desc,
    rope_desc,
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
    COMPUTE: tl.constexpr,
    SWAPPED: tl.constexpr,
    DETACHED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    STAGES: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Attend one tile of rows over one split of its request's KV.

    Grid: (row tiles, splits, requests). With `SPLIT`, `out_ptr` is float32
    [requests * query_len * num_heads, num_splits, 512] and `lse_ptr` float32 of the
    same without the last axis, in units of log2: the merge kernel's input. Without it
    they are the caller's tensors, and the lse is natural.

    Rows of a request without keys are not read: their outputs are the EMPTY values.
    """
    row_tile = tl.program_id(0)
    split = tl.program_id(1)
    request = tl.program_id(2)
    seq_len = tl.load(seq_lens_ptr + request)
    num_tiles = (seq_len + BLOCK_TOKENS - 1) // BLOCK_TOKENS
    share = (num_tiles + num_splits - 1) // num_splits
    first = split * share
    last = tl.minimum(first + share, num_tiles)

    rows = row_tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    token = rows // num_heads
    head = rows % num_heads
    num_rows = query_len * num_heads
    inside = rows < num_rows
    live = rows < tl.where(first < last, num_rows, 0)
    latent_cols = tl.arange(0, _LATENT)
    rope_cols = tl.arange(0, _ROPE)
    token_base = (request * query_len).to(tl.int64)
    q_latent_rows = token * q_latent_token_stride + head * q_latent_head_stride
    q_rope_rows = token * q_rope_token_stride + head * q_rope_head_stride
    q_latent = tl.load(
        q_latent_ptr
        + token_base * q_latent_token_stride
        + q_latent_rows[:, None]
        + latent_cols[None, :],
        mask=live[:, None],
        other=0.0,
    )
    q_rope = tl.load(
        q_rope_ptr
        + token_base * q_rope_token_stride
        + q_rope_rows[:, None]
        + rope_cols[None, :],
        mask=live[:, None],
        other=0.0,
    )
    q_latent = _as_operand(q_latent, COMPUTE, UPCAST)
    q_rope = _as_operand(q_rope, COMPUTE, UPCAST)
    if CAUSAL:
        visible_keys = seq_len - query_len + token + 1
        least_visible = seq_len - query_len + row_tile * BLOCK_ROWS // num_heads + 1
    else:
        visible_keys = tl.full([BLOCK_ROWS], 0, tl.int32) + seq_len
        least_visible = seq_len
    if kv_scale_ptr is not None:
        kv_scale = tl.load(kv_scale_ptr)
        scale_log2 = scale_log2 * kv_scale

    peak = tl.full([BLOCK_ROWS], _LOWEST, tl.float32)
    total = tl.full([BLOCK_ROWS], 0, tl.float32)
    if SWAPPED:
        acc = tl.full([_LATENT, BLOCK_ROWS], 0, tl.float32)
    else:
        acc = tl.full([BLOCK_ROWS, _LATENT], 0, tl.float32)
    decay = tl.full([BLOCK_ROWS], 0, tl.float32)
    operand = tl.full([BLOCK_ROWS, BLOCK_TOKENS], 0, tl.float32 if UPCAST else COMPUTE)
    table_row = table_ptr + request.to(tl.int64) * table_stride

    start = first
    if latent_desc is not None:
        # A descriptor cannot stop at seq_len: it serves the tiles that every row sees
        # whole, which need no mask either.
        start = tl.minimum(tl.maximum(least_visible // BLOCK_TOKENS, first), last)
        for tile in tl.range(first, start, num_stages=STAGES):
            token0 = tile * BLOCK_TOKENS
            latent, rope = _load_whole_tile(
                latent_desc, rope_desc, table_row, token0, PAGE, BLOCK_TOKENS
            )
            peak, total, acc, decay, operand = _absorb_tile(
                q_latent,
                q_rope,
                latent,
                rope,
                visible_keys,
                token0,
                tile < start,
                scale_log2,
                peak,
                total,
                acc,
                decay,
                operand,
                COMPUTE,
                BLOCK_TOKENS,
                SWAPPED,
                DETACHED,
                False,
                UPCAST,
            )
    for tile in tl.range(start, last, num_stages=STAGES):
        token0 = tile * BLOCK_TOKENS
        latent, rope = _load_tile(
            kv_ptr, table_row, token0, seq_len, page_stride, PAGE, BLOCK_TOKENS
        )
        peak, total, acc, decay, operand = _absorb_tile(
            q_latent,
            q_rope,
            latent,
            rope,
            visible_keys,
            token0,
            tile < last,
            scale_log2,
            peak,
            total,
            acc,
            decay,
            operand,
            COMPUTE,
            BLOCK_TOKENS,
            SWAPPED,
            DETACHED,
            True,
            UPCAST,
        )

    empty = total == 0.0
    factor = 1.0 / tl.where(empty, 1.0, total)
    if kv_scale_ptr is not None:
        factor = factor * kv_scale
    if SWAPPED:
        acc = tl.where(empty[None, :], 0.0, acc * factor[None, :])
    else:
        acc = tl.where(empty[:, None], 0.0, acc * factor[:, None])
    lse_log2 = tl.where(
        empty, float("-inf"), peak + tl.log2(tl.where(empty, 1.0, total))
    )
    # 64-bit up to the request, 32-bit within it: 4096 rows x 64 splits x 512 fit.
    row_base = token_base * num_heads
    if SPLIT:
        slots = rows * num_splits
        slot_base = row_base * num_splits + split
        tl.store(lse_ptr + slot_base + slots, lse_log2, mask=inside)
        _store_rows(
            out_ptr + slot_base * _LATENT,
            slots * _LATENT,
            acc,
            live,
            latent_cols,
            SWAPPED,
        )
    else:
        if NEEDS_LSE:
            natural = lse_log2 * 0.6931471805599453
            tl.store(lse_ptr + row_base + rows, natural, mask=inside)
        _store_rows(
            out_ptr + row_base * _LATENT,
            rows * _LATENT,
            acc,
            inside,
            latent_cols,
            SWAPPED,
        )
