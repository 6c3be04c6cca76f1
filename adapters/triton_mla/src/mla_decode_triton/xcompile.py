"""Compile the kernels for GPUs that are not here: `python -m mla_decode_triton.xcompile`.

Exit codes: 0 every kernel fits its architecture, 1 one does not, 4 usage.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mla_decode.device import DeviceInfo
from mla_decode.dtypes import fp8_dtype
from mla_decode.problem import DecodeProblem
from mla_decode_triton.listing import Footprint, read_footprint
from mla_decode_triton.loading import load_kernels
from mla_decode_triton.planning import MERGE_SIZES
from mla_decode_triton.tiles import ARCH_TILES
from mla_decode_triton.variants import DecodeVariant, MergeVariant

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

DEFAULT_ARCHS = ("gfx942", "gfx950", "sm_90", "sm_100")
_POINTERS = {"bf16": "*bf16", "fp16": "*fp16", "fp32": "*fp32"}
_FP8_POINTERS = {"float8_e4m3fn": "*fp8e4nv", "float8_e4m3fnuz": "*fp8e4b8"}
_DECODE_STRIDES = (
    "q_latent_token_stride",
    "q_latent_head_stride",
    "q_rope_token_stride",
    "q_rope_head_stride",
    "page_stride",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One kernel variant for one architecture."""

    arch: str
    q_dtype: str
    kv_dtype: str
    variant: DecodeVariant | MergeVariant

    def __str__(self) -> str:
        variant = self.variant
        if isinstance(variant, MergeVariant):
            return f"{self.arch} merge {variant.max_splits} splits"
        tile = variant.tile
        words = [
            f"{self.arch} decode {tile.rows}x{tile.tokens}",
            f"{self.q_dtype}/{self.kv_dtype} page {variant.page_size}",
            "causal" if variant.causal else "non_causal",
            "split" if variant.is_split else "whole",
        ]
        return " ".join(words)


def targets(arch_name: str, *, is_quick: bool) -> Iterator[Target]:
    """The variants to compile for an architecture.

    Args:
        arch_name: A key of `ARCH_TILES`.
        is_quick: One variant a tile and cache dtype, instead of the whole grid.
    """
    arch = ARCH_TILES[arch_name]
    pairs = [("bf16", "bf16", arch.tiles), ("fp16", "fp16", arch.tiles)]
    pairs += [("bf16", "fp8", arch.fp8_tiles)]
    if is_quick:
        del pairs[1]
    modes = (
        [(64, True, True)]
        if is_quick
        else [
            (page, causal, split)
            for page in (1, 16, 64)
            for causal in (False, True)
            for split in (False, True)
        ]
    )
    for q_dtype, kv_dtype, tiles in pairs:
        for tile in tiles:
            for page, causal, split in modes:
                problem = DecodeProblem(
                    num_q_heads=1,
                    q_dtype=q_dtype,
                    kv_dtype=kv_dtype,
                    page_size=page,
                    needs_lse=True,
                )
                yield Target(
                    arch=arch_name,
                    q_dtype=q_dtype,
                    kv_dtype=kv_dtype,
                    variant=DecodeVariant.of(
                        problem, arch, tile, causal=causal, is_split=split
                    ),
                )
    for size in MERGE_SIZES[:1] if is_quick else MERGE_SIZES:
        yield Target(
            arch=arch_name,
            q_dtype="bf16",
            kv_dtype="bf16",
            variant=MergeVariant(max_splits=size, needs_lse=True),
        )


def compile_target(target: Target) -> Footprint:
    """Compile one variant, without a GPU, and read what it needs."""
    import triton  # noqa: PLC0415 - listing the targets needs no Triton
    from triton.backends.compiler import GPUTarget  # noqa: PLC0415 - as above
    from triton.compiler import ASTSource  # noqa: PLC0415 - as above

    arch = ARCH_TILES[target.arch]
    kernels = load_kernels(interpreted=False)
    variant = target.variant
    is_decode = isinstance(variant, DecodeVariant)
    kernel = kernels.decode if is_decode else kernels.merge
    types = _decode_types(target) if is_decode else _merge_types(target)
    constants: dict[str, Any] = variant.constants(interpreted=False)
    if is_decode and target.kv_dtype != "fp8":
        constants["kv_scale_ptr"] = None
    names = list(kernel.arg_names)
    unaligned = {"table_ptr", "seq_lens_ptr", "kv_scale_ptr", "lse_ptr"}
    unaligned |= {"partial_lse_ptr"}
    aligned = [
        name
        for name in names
        if name not in constants
        and name not in unaligned
        and (types[name].startswith("*") or name in _DECODE_STRIDES)
    ]
    source = ASTSource(
        kernel,
        {name: "constexpr" if name in constants else types[name] for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    gpu = (
        GPUTarget("cuda", int(target.arch.removeprefix("sm_")), 32)
        if target.arch.startswith("sm_")
        else GPUTarget("hip", target.arch, arch.warp_size)
    )
    compiled = triton.compile(source, target=gpu, options=variant.options)
    return read_footprint(compiled, arch)


def _decode_types(target: Target) -> dict[str, str]:
    variant = target.variant
    if not isinstance(variant, DecodeVariant):
        raise TypeError(f"not a decode variant: {variant!r}")
    query = _POINTERS[target.q_dtype]
    cache = query
    if target.kv_dtype == "fp8":
        dtype = fp8_dtype(DeviceInfo.assume(target.arch))
        cache = _FP8_POINTERS[str(dtype).removeprefix("torch.")]
    integers = ("num_heads", "query_len", *_DECODE_STRIDES, "table_stride")
    return {
        "q_latent_ptr": query,
        "q_rope_ptr": query,
        "kv_ptr": cache,
        "table_ptr": "*i32",
        "seq_lens_ptr": "*i32",
        "kv_scale_ptr": "*fp32",
        "out_ptr": "*fp32" if variant.is_split else _POINTERS[target.q_dtype],
        "lse_ptr": "*fp32",
        "scale_log2": "fp32",
        **dict.fromkeys((*integers, "num_splits"), "i32"),
    }


def _merge_types(target: Target) -> dict[str, str]:
    return {
        "partial_out_ptr": "*fp32",
        "partial_lse_ptr": "*fp32",
        "out_ptr": _POINTERS[target.q_dtype],
        "lse_ptr": "*fp32",
        "num_splits": "i32",
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile what the command line names and print a line a kernel."""
    parser = argparse.ArgumentParser(prog="mla_decode_triton.xcompile")
    parser.exit_on_error = False
    parser.add_argument(
        "--arch", action="append", choices=list(ARCH_TILES), help="repeatable"
    )
    parser.add_argument("--quick", action="store_true", help="one variant a tile")
    try:
        options = parser.parse_args(arguments)
    except argparse.ArgumentError as error:
        sys.stderr.write(f"{error}\n")
        return 4
    failed = 0
    for arch_name in options.arch or DEFAULT_ARCHS:
        arch = ARCH_TILES[arch_name]
        for target in targets(arch_name, is_quick=options.quick):
            footprint = compile_target(target)
            needs_matrix = isinstance(target.variant, DecodeVariant)
            faults = footprint.faults(arch, needs_matrix=needs_matrix)
            failed += bool(faults)
            sys.stdout.write(
                f"{'FAILED' if faults else 'ok':6} {target!s:58} "
                f"shared {footprint.shared_bytes:6} registers {footprint.registers:3} "
                f"spills {footprint.spilled_bytes:3} "
                f"matrix {footprint.matrix_instructions:3} {'; '.join(faults)}\n"
            )
            sys.stdout.flush()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
