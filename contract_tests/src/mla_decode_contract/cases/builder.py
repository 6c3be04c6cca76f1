"""BUILDER: core's build, the adapter's `_build_decode`, and nothing between them."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from mla_decode.builder import MLADecodeMetadataBuilder
from mla_decode_contract.call import check, decode
from mla_decode_contract.cases.common import CAUSAL, NON_CAUSAL, longer_block
from mla_decode_contract.registry import implements
from mla_decode_contract.scene import draw_scene
from mla_decode_contract.violations import require

if TYPE_CHECKING:
    from mla_decode_contract.context import CaseContext

FROZEN = (
    "self",
    "block_table_tensor",
    "seq_lens_device",
    "max_seq_len",
    "query_start_loc_cpu",
    "query_start_loc_device",
    "num_decode_tokens",
    "dcp_tot_seq_lens_device",
)
"""The kit's own snapshot: a core that changed its copy would be found out."""


@implements("builder.signature_is_frozen")
def signature_is_frozen(ctx: CaseContext) -> None:
    """Core's and the adapter's against the kit's snapshot."""
    for cls in (MLADecodeMetadataBuilder, ctx.backend.builder_cls):
        found = tuple(inspect.signature(cls._build_decode).parameters)
        require(
            found == FROZEN,
            f"{cls.__name__}._build_decode takes {found}; the contract froze {FROZEN}",
        )


@implements("builder.build_is_final")
def build_is_final(ctx: CaseContext) -> None:
    """The adapter's class has core's functions."""
    cls = ctx.backend.builder_cls
    require(
        issubclass(cls, MLADecodeMetadataBuilder),
        f"{cls.__name__} does not derive from MLADecodeMetadataBuilder",
    )
    for name in ("build", "build_for_capture"):
        require(
            getattr(cls, name) is getattr(MLADecodeMetadataBuilder, name),
            f"{cls.__name__}.{name} is not core's",
        )


@implements("builder.called_by_keyword")
def called_by_keyword(ctx: CaseContext) -> None:
    """A builder that watches its own `_build_decode`."""
    problem = ctx.problem()
    scene = draw_scene(ctx, problem, [20, 45], num_pads=1)
    builder = ctx.builder(problem)
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    inner = builder._build_decode  # noqa: SLF001 - the contract froze this name

    def watched(*args: Any, **kwargs: Any) -> Any:
        calls.append((args, kwargs))
        return inner(*args, **kwargs)

    builder._build_decode = watched  # type: ignore[method-assign] # noqa: SLF001 - on this instance alone
    check(scene, decode(scene, builder))
    require(len(calls) == 1, f"one build made {len(calls)} calls of _build_decode")
    args, kwargs = calls[0]
    require(not args, "_build_decode was called by position")
    require(tuple(kwargs) == FROZEN[1:], f"_build_decode got {tuple(kwargs)}")
    require(kwargs["num_decode_tokens"] == 3, "num_decode_tokens is not num_reqs * Q")


@implements("builder.state_is_recorded")
def state_is_recorded(ctx: CaseContext) -> None:
    """`_decode_causal` and `_decode_query_len` after each of two builds."""
    query_len = longer_block(ctx, causal=False)
    allowed = ctx.row.query_lens.get(CAUSAL[0], ())
    both = query_len in allowed
    masks = (*CAUSAL, *NON_CAUSAL) if both else NON_CAUSAL
    problem = ctx.problem(query_lens=(query_len,), masks=masks)
    builder = ctx.builder(problem)
    for causal in (False, True) if both else (False,):
        scene = draw_scene(ctx, problem, [20, 45], causal=causal)
        metadata = builder.build(scene.common)
        state = (builder._decode_causal, builder._decode_query_len)  # noqa: SLF001 - state that the contract names
        require(
            state == (causal, query_len),
            f"the builder's state is {state} after a batch of {(causal, query_len)}",
        )
        require(metadata.causal is causal, "the metadata's mask is not the batch's")
