"""How a step is cut: rows into tiles, keys into splits, and the scratch that takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mla_decode.problem import LATENT_WIDTH

if TYPE_CHECKING:
    from mla_decode.problem import DecodeProblem
    from mla_decode_triton.tiles import ArchTiles, Tile

MAX_SPLITS = 128
_LEAST_TILES_OF_A_SPLIT = 2
"""A split of one tile costs more in the merge than it saves in the walk."""
_MERGE_TILES = 2
"""What the merge costs, in steps of a walk (about 3 us each on an H200)."""
_INVARIANT_SPLITS = 16
"""Pieces of the longest request where they may not depend on the batch: enough to fill
a device from a few requests, few enough that partial outputs stay in bounds."""
MERGE_SIZES = (8, 32, 64, 128)
"""Numbers of splits that merge kernels are compiled for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """The launch shapes of one step: they depend on nothing but its arguments' sizes."""

    tile: Tile
    num_reqs: int
    num_rows: int
    """Q * H of one request."""
    num_splits: int
    tiles_per_split: int = 0
    """Tiles of the walk in each split, whatever a request's length; 0: an equal share."""

    @property
    def row_tiles(self) -> int:
        """Programs that share a request's rows; each walks the KV once."""
        return -(-self.num_rows // self.tile.rows)

    @property
    def grid(self) -> tuple[int, int, int]:
        """The decode kernel's grid."""
        return self.row_tiles, self.num_splits, self.num_reqs

    @property
    def partial_rows(self) -> int:
        """Rows of the partial outputs; 0 where nothing is split."""
        if self.num_splits == 1:
            return 0
        return self.num_reqs * self.num_rows * self.num_splits

    @property
    def merge_size(self) -> int:
        """The least compiled size that holds the splits."""
        return next(size for size in MERGE_SIZES if size >= self.num_splits)


def plan_step(
    problem: DecodeProblem,
    arch: ArchTiles,
    *,
    num_reqs: int,
    query_len: int,
    max_seq_len: int,
) -> StepPlan:
    """Cut a step so that the device is full and no wave is much shorter than the rest.

    Args:
        problem: Gives the heads and the cache's dtype.
        arch: Gives the tile and how many programs fill the device.
        num_reqs: Requests, pads included.
        query_len: Q of the uniform block.
        max_seq_len: Upper bound of the lengths; ``max_model_len`` under graphs.
    """
    num_rows = query_len * problem.num_q_heads
    tile = _tile(problem, arch, num_rows)
    if problem.batch_invariant:
        share, splits = _fixed_splits(problem, tile)
        return StepPlan(
            tile=tile,
            num_reqs=num_reqs,
            num_rows=num_rows,
            num_splits=splits,
            tiles_per_split=share if splits > 1 else 0,
        )
    programs = num_reqs * -(-num_rows // tile.rows)
    return StepPlan(
        tile=tile,
        num_reqs=num_reqs,
        num_rows=num_rows,
        num_splits=_choose_splits(
            programs=programs,
            capacity=arch.num_units * tile.residents,
            steps=-(-max_seq_len // tile.tokens),
            cap=_cap(problem),
        ),
    )


def workspace_rows(problem: DecodeProblem, arch: ArchTiles) -> int:
    """Most partial rows that any step of the problem can need."""
    most = 0
    for query_len in problem.query_lens:
        num_rows = query_len * problem.num_q_heads
        tile = _tile(problem, arch, num_rows)
        if problem.batch_invariant:
            _, splits = _fixed_splits(problem, tile)
            if splits > 1:
                most = max(most, problem.max_num_reqs * num_rows * splits)
            continue
        capacity = arch.num_units * tile.residents
        steps = -(-problem.max_model_len // tile.tokens)
        row_tiles = -(-num_rows // tile.rows)
        num_reqs = 1
        while num_reqs <= problem.max_num_reqs:
            splits = _most_splits(
                programs=num_reqs * row_tiles,
                capacity=capacity,
                steps=steps,
                cap=_cap(problem),
            )
            if splits == 1:
                break
            # The most requests that may still be cut into as many pieces.
            last = min(problem.max_num_reqs, 2 * capacity // (splits * row_tiles))
            most = max(most, last * num_rows * splits)
            num_reqs = last + 1
    return most


def workspace_bytes(problem: DecodeProblem, arch: ArchTiles) -> int:
    """Bytes of partial outputs and log-sum-exps, float32."""
    return workspace_rows(problem, arch) * (LATENT_WIDTH + 1) * 4


def _tile(problem: DecodeProblem, arch: ArchTiles, num_rows: int) -> Tile:
    """The tile of a block; one for all blocks where bits may not depend on the block."""
    if problem.batch_invariant:
        num_rows = problem.max_query_len * problem.num_q_heads
    return arch.tile(num_rows, problem.kv_dtype)


def _cap(problem: DecodeProblem) -> int:
    return min(MAX_SPLITS, problem.max_splits or MAX_SPLITS)


def _fixed_splits(problem: DecodeProblem, tile: Tile) -> tuple[int, int]:
    """Tiles of a split and splits of a request, from the longest request alone."""
    steps = -(-problem.max_model_len // tile.tokens)
    most = min(_cap(problem), _INVARIANT_SPLITS)
    share = max(_LEAST_TILES_OF_A_SPLIT, -(-steps // most))
    return share, -(-steps // share)


def _most_splits(*, programs: int, capacity: int, steps: int, cap: int) -> int:
    """Bound of `_choose_splits`; grows with the steps, so the longest is enough."""
    useful = -(-steps // _LEAST_TILES_OF_A_SPLIT)
    return max(1, min(cap, useful, 2 * capacity // max(programs, 1)))


def _choose_splits(*, programs: int, capacity: int, steps: int, cap: int) -> int:
    """The number of splits whose waves of programs finish first, the fewest of equals."""
    best, best_cost = 1, -(-programs // capacity) * steps
    most = _most_splits(programs=programs, capacity=capacity, steps=steps, cap=cap)
    for splits in range(2, 1 + most):
        waves = -(-programs * splits // capacity)
        cost = waves * -(-steps // splits) + _MERGE_TILES
        if cost < best_cost:
            best, best_cost = splits, cost
    return best
