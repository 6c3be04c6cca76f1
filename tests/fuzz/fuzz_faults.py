"""Input that must be refused: each fault spoils a valid batch, table, call or problem."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from mla_decode import DecodeMetadata
from mla_decode.problem import ROW_WIDTH

INT32 = torch.int32


def aliens():
    """Values of no type that a tensor or a number is asked for, by name."""
    return {
        "None": None,
        "a text": "text",
        "a fraction": 0.5,
        "an object": object(),
        "a list": [1, 2],
        "an array": np.ones(3),
        "a class": torch.Tensor,
        "a tensor of int64": torch.ones(3, dtype=torch.int64),
        "a tensor elsewhere": torch.empty(3, dtype=INT32, device="meta"),
        "a sparse tensor": torch.eye(3).to_sparse(),
        "a complex number": torch.tensor(1j),
        "an empty tensor": torch.empty(0),
    }


TENSOR_FIELDS = (
    "query_start_loc",
    "query_start_loc_cpu",
    "seq_lens",
    "block_table_tensor",
)
COUNT_FIELDS = ("num_reqs", "num_actual_tokens", "max_query_len", "max_seq_len")
FIELDS = (*TENSOR_FIELDS, *COUNT_FIELDS, "causal", "dcp_local_seq_lens")


def alien_batch(batch, field, name):
    """A batch with one field of another type; None where that is no fault."""
    if name == "None" and field == "dcp_local_seq_lens":
        return None
    return replace(batch.common, **{field: aliens()[name]})


def _strided(tensor):
    return torch.stack((tensor, tensor), dim=-1)[..., 0]


def batch_faults(batch, problem, *, varlen):
    """Batches that differ from a valid one by one host-visible fault, by name."""
    common, longest = batch.common, batch.common.max_query_len
    starts, count = common.query_start_loc_cpu, common.num_reqs
    unnamed = max(problem.query_lens) + 1
    table = common.block_table_tensor
    faults = {
        "no request": {"num_reqs": 0},
        "fewer than none": {"num_reqs": -1},
        "more requests than sized for": {"num_reqs": problem.max_num_reqs + 1},
        "requests as a bool": {"num_reqs": True},
        "requests as numpy": {"num_reqs": np.int64(count)},
        "too many tokens": {"num_actual_tokens": 10**9},
        "fewer tokens than none": {"num_actual_tokens": -1},
        "no longest block": {"max_query_len": 0},
        "longest block as a fraction": {"max_query_len": float(longest)},
        "negative bound": {"max_seq_len": -1},
        "bound past the model": {"max_seq_len": problem.max_model_len + 1},
        "bound as numpy": {"max_seq_len": np.int32(common.max_seq_len)},
        "bound past all": {"max_seq_len": 10**30},
        "starts as int64": {"query_start_loc_cpu": starts.long()},
        "a start too few": {"query_start_loc_cpu": starts[:-1].clone()},
        "starts without storage": {"query_start_loc_cpu": starts.to_sparse()},
        "lengths without storage": {"seq_lens": common.seq_lens.to_sparse()},
        "table without storage": {"block_table_tensor": table.to_sparse()},
        "starts in two axes": {"query_start_loc_cpu": starts[None]},
        "starts from 1": {"query_start_loc_cpu": starts + 1},
        "starts go back": {"query_start_loc_cpu": -starts - 1},
        "device starts as int64": {"query_start_loc": starts.long()},
        "device starts too short": {"query_start_loc": starts[1:].clone()},
        "device starts elsewhere": {"query_start_loc": starts.to("meta")},
        "device starts strided": {"query_start_loc": _strided(starts)},
        "lengths as int64": {"seq_lens": common.seq_lens.long()},
        "lengths as floats": {"seq_lens": common.seq_lens.float()},
        "a length too many": {"seq_lens": torch.ones(count + 1, dtype=INT32)},
        "lengths elsewhere": {"seq_lens": common.seq_lens.to("meta")},
        "lengths in two axes": {"seq_lens": common.seq_lens[:, None]},
        "table as int64": {"block_table_tensor": table.long()},
        "table in one axis": {"block_table_tensor": table[0].clone()},
        "table of too few rows": {"block_table_tensor": table[: count - 1]},
        "table elsewhere": {"block_table_tensor": table.to("meta")},
        "table by columns": {"block_table_tensor": table.t().contiguous().t()},
        "no mask": {"causal": None},
        "a mask of 0": {"causal": 0},
        "a mask of 1": {"causal": 1},
        "a mask in words": {"causal": "causal"},
        "a mask of ints": {"causal": torch.ones(2, dtype=INT32)},
        "a mixed mask": {"causal": torch.tensor([True, False])},
        "an empty mask": {"causal": torch.empty(0, dtype=torch.bool)},
        "a mask elsewhere": {"causal": torch.ones((), dtype=torch.bool, device="meta")},
        "local lengths without ranks": {"dcp_local_seq_lens": common.seq_lens},
        "a block that nobody named": _uniform(count, unnamed),
    }
    if common.max_seq_len:
        pages = -(-common.max_seq_len // problem.page_size)
        faults["table too narrow"] = {"block_table_tensor": table[:, : pages - 1]}
    shortest = min(filter(None, batch.blocks), default=0)
    if shortest > 1 and batch.causal and common.max_seq_len:
        faults["bound below every block"] = {"max_seq_len": shortest - 1}
    if max(batch.blocks) > 1:
        faults["longest block too short"] = {"max_query_len": max(batch.blocks) - 1}
    if count > 1 and max(batch.blocks):
        pad_first = starts.clone()
        pad_first[1] = 0
        faults["a pad first"] = {"query_start_loc_cpu": pad_first}
    if count > 1 and not (varlen and batch.causal):
        mixed = _uniform(count, longest)["query_start_loc_cpu"]
        mixed[-1] += 1
        faults["mixed blocks"] = {"query_start_loc_cpu": mixed}
    if len(problem.masks) == 1 and longest > 1:
        faults["a mask that nobody named"] = {"causal": not batch.causal}
    return {name: replace(common, **fault) for name, fault in faults.items()}


def _uniform(count, query_len):
    starts = torch.arange(count + 1, dtype=INT32) * query_len
    return {
        "query_start_loc": starts,
        "query_start_loc_cpu": starts,
        "num_actual_tokens": count * query_len,
        "max_query_len": query_len,
    }


def table_faults(batch, problem):
    """Batches that only the device can tell from a valid one, by name."""
    common = batch.common
    starts, lens = common.query_start_loc_cpu, common.seq_lens
    used = [index for index, length in enumerate(batch.lens) if length]
    faults = {
        "device starts differ": {"query_start_loc": starts + 1},
        "a negative length": {"seq_lens": _with(lens, 0, -1)},
        "a length past the bound": {"seq_lens": _with(lens, 0, common.max_seq_len + 1)},
    }
    pads = [index for index, block in enumerate(batch.blocks) if not block]
    if pads and common.max_seq_len:
        faults["a pad with keys"] = {"seq_lens": _with(lens, pads[-1], 1)}
    if used:
        table = common.block_table_tensor.clone()
        slot = (batch.lens[used[-1]] - 1) // problem.page_size
        table[used[-1], slot] = -1
        faults["a used slot is negative"] = {"block_table_tensor": table}
        if batch.causal and batch.blocks[used[0]] > 1:
            short = _with(lens, used[0], batch.blocks[used[0]] - 1)
            faults["a causal block of too few keys"] = {"seq_lens": short}
    return {name: replace(common, **fault) for name, fault in faults.items()}


def page_past_cache(batch, problem, pages):
    """A batch whose table names a page that the cache lacks; None without a key."""
    used = [index for index, length in enumerate(batch.lens) if length]
    if not used:
        return None
    table = batch.common.block_table_tensor.clone()
    table[used[0], (batch.lens[used[0]] - 1) // problem.page_size] = pages
    return replace(batch.common, block_table_tensor=table)


def _with(tensor, index, value):
    changed = tensor.clone()
    changed[index] = value
    return changed


def alien_call(arguments, name, alien):
    """A call with one argument of another type; None where that is no fault."""
    value = aliens()[alien]
    if alien == "None" and (name in {"out", "lse"} or arguments.get(name) is None):
        return None
    if name == "softmax_scale" and alien == "a fraction":
        return None
    return {**arguments, name: value}


def call_faults(arguments, problem, rows):
    """Calls that differ from a valid one by one fault, by name.

    Args:
        arguments: Of a valid call, q in one piece.
        problem: Its problem.
        rows: Query rows of the batch, pads included.
    """
    q, cache = arguments["q"], arguments["kv_cache"]
    heads, size = problem.num_q_heads, problem.page_size
    out = torch.empty((rows, heads, 512), dtype=torch.float64)
    nope, rope = q[..., :512].contiguous(), q[..., 512:].contiguous()
    faults = {
        "q of another dtype": {"q": q.double()},
        "q of a row more": {"q": torch.cat((q, q[:1]))},
        "q of no row": {"q": q[:0]},
        "q of a head more": {"q": torch.cat((q, q[:, :1]), 1)},
        "q too narrow": {"q": q[..., :512]},
        "q in two axes": {"q": q.flatten(1)},
        "q elsewhere": {"q": q.to("meta")},
        "q by columns": {"q": _strided(q)},
        "q of three parts": {"q": (nope, rope, rope)},
        "q of one part": {"q": (q,)},
        "q of no part": {"q": ()},
        "q's parts exchanged": {"q": (rope, nope)},
        "q's parts of two dtypes": {"q": (nope, rope.double())},
        "q without storage": {"q": q.float().to_sparse().to(q.dtype)},
        "q as a list": {"q": [nope, rope]},
        "a cache of another dtype": {"kv_cache": cache.double()},
        "a cache of smaller pages": {"kv_cache": _pages(cache, size - 1)},
        "a cache of larger pages": {"kv_cache": _pages(cache, size + 1)},
        "a cache too narrow": {"kv_cache": cache[..., :512]},
        "a cache in two axes": {"kv_cache": cache.flatten(1)},
        "a cache in four axes": {"kv_cache": cache[:, :, None]},
        "a cache elsewhere": {"kv_cache": cache.to("meta")},
        "a cache of another stride": {"kv_cache": _restrided(cache, problem)},
        "a scale of 0": {"softmax_scale": 0.0},
        "a negative scale": {"softmax_scale": -0.07},
        "a scale that is no number": {"softmax_scale": float("nan")},
        "an infinite scale": {"softmax_scale": float("inf")},
        "a scale as an int": {"softmax_scale": 1},
        "a scale as a tensor": {"softmax_scale": torch.tensor(0.07)},
        "an output of another dtype": {"out": out},
        "an output of a row more": {"out": _output(problem, rows + 1, heads)},
        "an output by columns": {"out": _strided(_output(problem, rows, heads))},
        "an lse of another dtype": {"lse": out[..., 0].contiguous()},
        "an lse of another shape": {"lse": torch.empty(rows, heads + 1)},
        "metadata that nobody built": {"plan": _unbuilt()},
    }
    if size > 1:
        turned = torch.empty((cache.shape[0], ROW_WIDTH, size), dtype=cache.dtype)
        faults["a cache by columns"] = {"kv_cache": turned.transpose(1, 2)}
    if not problem.needs_lse:
        faults["an lse that nobody needs"] = {"lse": torch.empty(rows, heads)}
    for name, dtype in (("q_scale", problem.q_dtype), ("kv_scale", problem.kv_dtype)):
        if dtype == "fp8":
            faults[f"{name} on the host"] = {name: 0.5}
            faults[f"{name} as double"] = {name: torch.ones(1).double()}
            faults[f"{name} without an axis"] = {name: torch.ones(())}
            faults[f"two of {name}"] = {name: torch.ones(2)}
            faults[f"{name} elsewhere"] = {name: torch.ones(1, device="meta")}
            faults[f"{name} missing"] = {name: None}
        else:
            faults[f"{name} without fp8"] = {name: torch.ones(1)}
    return {name: {**arguments, **fault} for name, fault in faults.items()}


def _pages(cache, size):
    return torch.empty((cache.shape[0], size, ROW_WIDTH), dtype=cache.dtype)


def _restrided(cache, problem):
    """The same shape over pages that lie further apart than the problem declares."""
    wide = torch.empty((cache.shape[0], problem.page_stride + 576), dtype=cache.dtype)
    return wide[:, : problem.page_size * ROW_WIDTH].view(cache.shape)


def _output(problem, rows, heads):
    words = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    return torch.empty((rows, heads, 512), dtype=words[problem.out_dtype])


def _unbuilt():
    empty = torch.zeros(1, dtype=INT32)
    return DecodeMetadata(
        block_table=empty[None],
        seq_lens=empty,
        query_start_loc=empty,
        max_seq_len=1,
        num_reqs=1,
        num_decode_tokens=1,
    )


PROBLEM_FAULTS = {
    "num_q_heads": (0, -1, 1.0, True, "16"),
    "q_dtype": ("int8", "BF16", "", 16),
    "kv_dtype": ("fp4", torch.bfloat16),
    "out_dtype": ("fp8", "float"),
    "page_size": (0, -16, 16.0),
    "query_lens": ((), {0}, {-1}, {1.5}, {True}, "14", 4, {10**9}, [[1]], {"1"}),
    "masks": ((), {"causal"}, {True}, "causal", [["causal"]]),
    "needs_lse": (1, None, "yes"),
    "graphs": (1, None),
    "dcp": (2, (2, 0), {"world": 2}),
    "kv_page_stride": (0, 575, -1, 2.0, True),
    "max_num_reqs": (0, -4, 1.5),
    "max_model_len": (0, -1, 32.0),
}
"""Values that a field of `DecodeProblem` may not have."""
ALIENS_ALLOWED = {("dcp", "None"), ("kv_page_stride", "None"), ("query_lens", "a list")}


def spoilt_problem(field, choice):
    """A value for a field of a problem that must be refused."""
    own = PROBLEM_FAULTS[field]
    strange = [
        value for name, value in aliens().items() if (field, name) not in ALIENS_ALLOWED
    ]
    values = [*own, *strange]
    return values[choice % len(values)]


DECODER_FAULTS = (
    {"backend": "no_such_backend"},
    {"backend": 3},
    {"backend": []},
    {"lowering": "perhaps"},
    {"lowering": None},
    {"lowering": []},
    {"validate": "everything"},
    {"validate": None},
    {"validate": []},
    {"device": "xpu"},
    {"device": "nonsense"},
    {"device": 3.5},
    {"device": "cuda:99"},
    {"device": torch.device("meta")},
)
"""Arguments of `MLADecoder` that must be refused."""
CUTS = (0, -1, 99, 2.5, None, "2", [0], [10**9], [1.5], ["1"], [[1]])
"""Cuts into which no batch of more than one row can be split."""
