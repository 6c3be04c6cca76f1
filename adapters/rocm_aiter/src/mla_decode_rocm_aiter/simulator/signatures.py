"""The parameters of AITER's functions, release by release."""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any

from packaging.version import Version
from torch.utils._python_dispatch import _disable_current_modes

if TYPE_CHECKING:
    from collections.abc import Callable

_SCHEDULE = (
    "work_meta_data=None, work_indptr=None, work_info_set=None, reduce_indptr=None, "
    "reduce_final_map=None, reduce_partial_map=None"
)
_DECODE = (
    "q, kv_buffer, o, qo_indptr, kv_indptr, kv_indices, kv_last_page_lens, "
    "max_seqlen_q, page_size=1, nhead_kv=1, sm_scale=None, logit_cap=0.0, "
    f"num_kv_splits=None, num_kv_splits_indptr=None, {_SCHEDULE}, q_scale=None, "
    "kv_scale=None, intra_batch_mode=False, return_logits=False, return_lse=False"
)
_METADATA = (
    "seqlens_qo_indptr, seqlens_kv_indptr, kv_last_page_lens, num_heads_per_head_k, "
    "num_heads_k, is_causal, work_metadata_ptrs, work_info_set, work_indptr, "
    "reduce_indptr, reduce_final_map, reduce_partial_map, page_size=1, "
    "kv_granularity=16, max_seqlen_qo=-1, uni_seqlen_qo=-1, fast_mode=True, topk=-1, "
    "max_split_per_batch=-1, intra_batch_mode=False"
)
_INFO = (
    "batch_size, max_seqlen_qo, num_head_qo, q_dtype, kv_dtype, is_sparse, "
    "fast_mode=True, num_kv_splits=32, intra_batch_mode=False"
)


def decode_parameters(release: Version) -> str:
    """Parameters of `mla_decode_fwd`."""
    text = _DECODE
    if release >= Version("0.1.17"):
        text += ", g_kv_indptr=None, cp_world_size=1, cp_rank=0"
    if release >= Version("0.1.20"):
        text += ", causal=True"
    return text


def metadata_parameters(release: Version) -> str:
    """Parameters of `get_mla_metadata_v1`; 0.1.18 moved the dtypes to the end."""
    if release >= Version("0.1.18"):
        return (
            f"{_METADATA}, is_cp_round_robin=False, mla_version=0, dtype_q_nope=None, "
            "dtype_q_rope=None, dtype_kv_nope=None, dtype_kv_rope=None, dtype_q=None, "
            "dtype_kv=None"
        )
    text = f"{_METADATA}, dtype_q=None, dtype_kv=None"
    if release >= Version("0.1.17"):
        text += ", is_cp_round_robin=False"
    return text


def info_parameters(release: Version) -> str:
    """Parameters of `get_mla_metadata_info_v1`."""
    if release >= Version("0.1.16"):
        return f"{_INFO}, max_split_per_batch=-1"
    return _INFO


def with_signature(
    parameters: str, name: str, implementation: Callable[..., Any]
) -> Callable[..., Any]:
    """A function that takes exactly these parameters, and says so to `inspect`.

    The implementation gets every one of them by name. What does not fit is a TypeError
    as it would be of a Python function with this signature.
    """
    signature = inspect.Signature([_parameter(word) for word in _split(parameters)])

    @functools.wraps(implementation)
    def call(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        # To a dispatch mode a compiled library is one opaque call.
        with _disable_current_modes():
            return implementation(**bound.arguments)

    call.__name__ = name
    call.__signature__ = signature  # type: ignore[attr-defined] # read by inspect
    return call


def _split(parameters: str) -> list[str]:
    return [word.strip() for word in parameters.split(",")]


def _parameter(word: str) -> inspect.Parameter:
    name, has_default, text = word.partition("=")
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    if not has_default:
        return inspect.Parameter(name, kind)
    constants = {"None": None, "True": True, "False": False}
    default = constants[text] if text in constants else float(text)
    if isinstance(default, float) and "." not in text:
        default = int(text)
    return inspect.Parameter(name, kind, default=default)
