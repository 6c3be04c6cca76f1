"""Call AITER's functions as a careful caller does, and say what is right."""

import torch

SCALE = 192**-0.5


def make_batch(
    seq_lens, q, heads, *, dtype=torch.bfloat16, page_size=1, seed=0, poison=True
):
    """q, cache and the paging arrays of a batch; slots past a request hold NaN."""
    generator = torch.Generator().manual_seed(seed)
    pages = [-(-length // page_size) for length in seq_lens]
    total = sum(pages)
    cache = torch.randn(total + 3, page_size, 1, 576, generator=generator) * 0.3
    indices = torch.randperm(total + 3, generator=generator)[:total]
    starts = torch.tensor([0, *torch.tensor(pages).cumsum(0).tolist()])
    last = [(length - 1) % page_size + 1 if length else 1 for length in seq_lens]
    query = torch.randn(len(seq_lens) * q, heads, 576, generator=generator)
    cache, query = cache.to(torch.bfloat16), query.to(torch.bfloat16)
    if poison and page_size > 1:
        for at, length in enumerate(seq_lens):
            if length % page_size:
                cache[indices[starts[at + 1] - 1], length % page_size :] = torch.nan
    if dtype != torch.bfloat16:
        cache, query = cache.to(dtype), query.to(dtype)
    return {
        "q": query,
        "kv_buffer": cache,
        "qo_indptr": torch.arange(0, (len(seq_lens) + 1) * q, q, dtype=torch.int32),
        "kv_indptr": starts.int(),
        "kv_indices": indices.int(),
        "kv_last_page_lens": torch.tensor(last, dtype=torch.int32),
        "page_size": page_size,
    }


def make_schedule(lib, batch, q, heads, *, causal=True, told_causal=None, **words):
    """Buffers of a schedule, filled; `words` replace what a careful caller passes."""
    dtypes = (batch["q"].dtype, batch["kv_buffer"].dtype)
    requests = batch["qo_indptr"].shape[0] - 1
    shapes = lib.get_mla_metadata_info_v1(requests, q, heads, *dtypes, False)
    meta, indptr, works, reduce_indptr, final, partial = (
        torch.zeros(shape, dtype=dtype) for shape, dtype in shapes
    )
    given = {
        "page_size": batch["page_size"],
        "kv_granularity": 16,
        "max_seqlen_qo": q,
        "uni_seqlen_qo": q,
        "dtype_q": dtypes[0],
        "dtype_kv": dtypes[1],
    } | words
    lib.get_mla_metadata_v1(
        batch["qo_indptr"],
        batch["kv_indptr"],
        batch["kv_last_page_lens"],
        heads,
        1,
        causal if told_causal is None else told_causal,
        meta,
        works,
        indptr,
        reduce_indptr,
        final,
        partial,
        **{name: value for name, value in given.items() if value is not None},
    )
    return {
        "work_meta_data": meta,
        "work_indptr": indptr,
        "work_info_set": works,
        "reduce_indptr": reduce_indptr,
        "reduce_final_map": final,
        "reduce_partial_map": partial,
    }


def run_decode(lib, batch, q, heads, *, schedule=None, causal=True, **words):
    """Decode, and return (output, lse or None)."""
    out = torch.empty(batch["q"].shape[0], heads, 512, dtype=torch.bfloat16)
    given = {"sm_scale": SCALE, "return_lse": False, "causal": causal} | words
    if batch["q"].dtype != torch.bfloat16:
        one = torch.ones(1)
        given = {"q_scale": one, "kv_scale": one} | given
    _, lse = lib.mla.mla_decode_fwd(
        o=out, max_seqlen_q=q, **batch, **(schedule or {}), **given
    )
    return out, lse


def right_answer(batch, q, *, causal, scale=SCALE):
    """(out, lse) by the definition, in float64; (0, -inf) where a row has no key."""
    size = batch["page_size"]
    starts = batch["kv_indptr"].tolist()
    heads = batch["q"].shape[1]
    rows = batch["q"].double().reshape(-1, q, heads, 576)
    outs, lses = [], []
    for at, query in enumerate(rows):
        pages = batch["kv_indices"][starts[at] : starts[at + 1]].long()
        length = (len(pages) - 1) * size + int(batch["kv_last_page_lens"][at])
        length = length if len(pages) else 0
        keys = batch["kv_buffer"][pages].double().reshape(-1, 576)[:length]
        scores = torch.einsum("qhd,kd->qhk", query, keys) * scale
        if causal:
            token = torch.arange(q)[:, None, None]
            hidden = torch.arange(length)[None, None, :] > length - q + token
            scores = scores.masked_fill(hidden, -torch.inf)
        lse = torch.logsumexp(scores, dim=-1)
        weights = torch.exp(scores - torch.where(lse.isinf(), 0.0, lse)[..., None])
        outs.append(torch.einsum("qhk,kd->qhd", weights, keys[:, :512]))
        lses.append(lse)
    return torch.cat(outs).float(), torch.cat(lses).float()
