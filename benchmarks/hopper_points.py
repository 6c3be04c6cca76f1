"""The points that the Hopper kernel is measured at, and the least time of each."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import dataclass

BANDWIDTH, PEAK = 4.3e12, 790e12  # measured on an H200: bytes/s, flop/s


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One shape; `mean` is the length of every request, or a lognormal's mean."""

    heads: int
    query_len: int
    requests: int
    mean: int
    causal: bool
    ragged: bool = False
    seed: int = 0

    def lengths(self) -> list[int]:
        """The batch's lengths."""
        if not self.ragged:
            return [self.mean] * self.requests
        rng = random.Random(self.seed)  # noqa: S311 - not for secrets
        drawn = [
            rng.lognormvariate(math.log(self.mean) - 0.5, 1.0)
            for _ in range(self.requests)
        ]
        return [min(32768, max(64, int(n))) for n in drawn]

    def roofline_us(self) -> float:
        """Least time by bytes read once or by arithmetic."""
        tokens = sum(self.lengths())
        flops = 2 * self.query_len * self.heads * tokens * 1088
        return max(tokens * 1152 / BANDWIDTH, flops / PEAK) * 1e6


def all_points() -> list[Point]:
    """Uniform points of both masks, then ragged ones; shuffled once, so that any prefix is a sample."""
    grid = itertools.product(
        (16, 64, 128), (1, 4, 8), (1, 16, 64, 128), (1024, 4096, 16384), (False, True)
    )
    points = [
        Point(heads=h, query_len=q, requests=b, mean=s, causal=c)
        for h, q, b, s, c in grid
        if q > 1 or c
    ]
    shapes = (
        (16, 1, 64, 8192),
        (16, 4, 128, 4096),
        (64, 4, 16, 8192),
        (128, 1, 64, 8192),
        (128, 1, 128, 4096),
        (128, 4, 64, 4096),
    )
    points += [
        Point(
            heads=h,
            query_len=q,
            requests=b,
            mean=s,
            causal=q > 1,
            ragged=True,
            seed=seed,
        )
        for seed in range(4)
        for h, q, b, s in shapes
    ]
    random.Random(7).shuffle(points)  # noqa: S311 - not for secrets
    return points
