"""The compile-time side of a launch: which variant of a kernel, and how it is built."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mla_decode.problem import LATENT_WIDTH

if TYPE_CHECKING:
    from mla_decode.problem import DecodeProblem
    from mla_decode_triton.tiles import ArchTiles, Tile

_MIN_COLUMNS = 64
_MERGE_ELEMENTS = 4096
"""Partial outputs that one program of the merge holds at a time."""
_MERGE_WARPS = 4
_FUSION = {"enable_fp_fusion": True}
"""Said aloud: the default is about to change between Triton releases."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeVariant:
    """What the decode kernel is specialised to."""

    tile: Tile
    page_size: int
    causal: bool
    is_split: bool
    needs_lse: bool
    operand: str
    """What the matrix unit multiplies: ``bf16`` or ``fp16``."""
    widens_fp8_in_ptx: bool
    tiles_per_split: int = 0
    """Of every split, whatever a request's length; 0: an equal share of its tiles."""

    @classmethod
    def of(
        cls,
        problem: DecodeProblem,
        arch: ArchTiles,
        tile: Tile,
        *,
        causal: bool,
        is_split: bool,
        tiles_per_split: int = 0,
    ) -> DecodeVariant:
        """The variant of one mask and tile of a problem."""
        widens = problem.kv_dtype == "fp8" and arch.widens_fp8_in_ptx
        return cls(
            tile=tile,
            page_size=problem.page_size,
            causal=causal,
            is_split=is_split,
            needs_lse=problem.needs_lse,
            operand="fp16" if widens and tile.paired else problem.q_dtype,
            widens_fp8_in_ptx=widens,
            tiles_per_split=tiles_per_split if is_split else 0,
        )

    def constants(self, *, interpreted: bool) -> dict[str, Any]:
        """The kernel's compile-time parameters, in its order."""
        import triton.language as tl  # noqa: PLC0415 - describing a variant needs no Triton

        return {
            "PAGE": self.page_size,
            "CAUSAL": self.causal,
            "SPLIT": self.is_split,
            "NEEDS_LSE": self.needs_lse,
            "OPERAND": tl.float16 if self.operand == "fp16" else tl.bfloat16,
            "BLOCK_ROWS": self.tile.rows,
            "BLOCK_TOKENS": self.tile.tokens,
            "STAGES": self.tile.stages,
            "DETACHED": self.tile.detached,
            "WIDEN_IN_PTX": self.widens_fp8_in_ptx and not interpreted,
            "SCALE_ROWS": self.widens_fp8_in_ptx and self.tile.paired,
            "PAIRED": self.widens_fp8_in_ptx and self.tile.paired,
            "UPCAST": interpreted,
            "TILES_PER_SPLIT": self.tiles_per_split,
        }

    @property
    def options(self) -> dict[str, Any]:
        """The compiler's options."""
        most = self.tile.max_registers
        return {
            "num_warps": self.tile.num_warps,
            "num_stages": self.tile.stages,
            **({} if most is None else {"maxnreg": most}),
            **_FUSION,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeVariant:
    """What the merge kernel is specialised to."""

    max_splits: int
    needs_lse: bool

    def constants(self, *, interpreted: bool) -> dict[str, Any]:
        """The kernel's compile-time parameters, in its order."""
        return {
            "NEEDS_LSE": self.needs_lse,
            "MAX_SPLITS": self.max_splits,
            "BLOCK_SPLITS": min(self.max_splits, _MERGE_ELEMENTS // _MIN_COLUMNS),
            "BLOCK_COLUMNS": self.columns(interpreted=interpreted),
        }

    def columns(self, *, interpreted: bool) -> int:
        """Of the 512 columns of a row, how many one program merges."""
        if interpreted:  # a program costs milliseconds, whatever it does
            return LATENT_WIDTH
        return min(LATENT_WIDTH, max(_MIN_COLUMNS, _MERGE_ELEMENTS // self.max_splits))

    @property
    def options(self) -> dict[str, Any]:
        """The compiler's options."""
        return {"num_warps": _MERGE_WARPS, **_FUSION}
