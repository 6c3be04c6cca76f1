"""The work table, by its own kernel under the interpreter."""

import random

import pytest
import torch

TILE = 64


class Table:
    def __init__(self, raw, num_parts, block_parts):
        raw = raw.tolist()
        bounds = raw[8 : 8 + 4 * (num_parts + 1)]
        self.bounds = list(zip(bounds[::4], bounds[1::4], strict=True))
        self.lengths = bounds[2::4]
        entries = raw[8 + 4 * block_parts :]
        self.splits = [
            (
                entries[4 * i],
                entries[4 * i + 1],
                entries[4 * i + 6] - entries[4 * i + 2] + 1,
            )
            for i in range(raw[0])
        ]


def plan(plan_kernel, lens, num_parts, *, overhead=3, snap=2, min_tiles=1):
    steps = len(lens).bit_length()
    block_reqs, block_parts = 1 << steps, 1 << num_parts.bit_length()
    raw = torch.full((8 + 8 * block_parts,), -7, dtype=torch.int32)
    scratch = torch.full((2 * block_reqs + 8 * block_parts,), 2**30, dtype=torch.int32)
    plan_kernel[(1,)](
        torch.tensor(lens, dtype=torch.int32),
        raw,
        scratch,
        len(lens),
        num_parts,
        OVERHEAD=overhead,
        MERGE=3,
        PIECE=2,
        SNAP=snap,
        MIN_TILES=min_tiles,
        BLOCK_REQS=block_reqs,
        BLOCK_PARTS=block_parts,
        STEPS=steps,
    )
    return Table(raw, num_parts, block_parts)


def pieces_of(table, lens):
    """(request, first, last) of every piece of every part, as the kernels walk them."""
    tiles = [(n + TILE - 1) // TILE for n in lens]
    parts = []
    for (req0, tile0), (req1, tile1) in zip(
        table.bounds, table.bounds[1:], strict=False
    ):
        found = []
        for req in range(req0, req1 + (tile1 > 0)):
            first = tile0 if req == req0 else 0
            last = tile1 if req == req1 else tiles[req]
            if first < last:
                found.append((req, first, last))
        parts.append(found)
    return parts


def check(table, lens):
    tiles = [(n + TILE - 1) // TILE for n in lens]
    walked = [[] for _ in lens]
    owners = {}
    for part, found in enumerate(pieces_of(table, lens)):
        for req, first, last in found:
            assert 0 <= first < last <= tiles[req]
            walked[req].extend(range(first, last))
            owners.setdefault(req, []).append((part, first))
    assert walked == [list(range(n)) for n in tiles]
    assert table.lengths == [([*lens, 0])[req] for req, _ in table.bounds]
    splits = {req: (part, count) for req, part, count in table.splits}
    assert len(splits) == len(table.splits)
    for req, pieces in owners.items():
        if len(pieces) > 1:
            assert splits.pop(req) == (pieces[0][0], len(pieces))
            # Slots are implied: pieces lie in consecutive parts, the first at tile 0.
            assert [part for part, _ in pieces] == list(
                range(pieces[0][0], pieces[0][0] + len(pieces))
            )
            assert [first == 0 for _, first in pieces] == [True] + [False] * (
                len(pieces) - 1
            )
    assert not splits


def makespan(table, lens, overhead=3):
    return max(
        sum(last - first + overhead for _, first, last in found)
        for found in pieces_of(table, lens)
    )


@pytest.mark.parametrize("num_parts", [1, 2, 8, 33, 66, 132])
@pytest.mark.parametrize(
    "lens",
    [
        [1],
        [64],
        [0],
        [0, 0, 0],
        [1024],
        [16384],
        [65] * 200,
        [4096] * 128,
        [4096] * 64,
        [1000] * 16,
        [0, 5, 0, 0, 70000, 1, 0],
        [100000] + [64] * 300,
        [64] * 300 + [100000] + [0] * 17,
    ],
    ids=lambda lens: f"{len(lens)}x{max(lens)}",
)
def test_every_tile_is_walked_once_and_split_requests_are_listed(
    plan_kernel, lens, num_parts
):
    check(plan(plan_kernel, lens, num_parts), lens)


@pytest.mark.parametrize("seed", range(12))
def test_ragged_batches_are_balanced(plan_kernel, seed):
    rng = random.Random(seed)  # noqa: S311 - not for secrets
    num_parts = rng.choice([8, 16, 33, 66, 132])
    lens = [
        min(65536, int(rng.lognormvariate(8.5, 1.0)))
        for _ in range(rng.choice([16, 64, 128]))
    ]
    lens[rng.randrange(len(lens))] = 0
    table = plan(plan_kernel, lens, num_parts)
    check(table, lens)
    ideal = sum((n + TILE - 1) // TILE + 3 for n in lens) / num_parts
    assert makespan(table, lens) <= 1.02 * ideal + 3 + 2 + 3


@pytest.mark.parametrize(
    ("count", "length", "num_parts", "splits", "span"),
    [
        (128, 4096, 132, 0, 64),
        (64, 4096, 132, 64, 32),
        (64, 4096, 66, 0, 64),
        (256, 4096, 132, 0, 128),
        (16, 4096, 132, 16, 8),
        (1, 1024, 132, 1, 1),
        (64, 4096, 16, 0, 256),
    ],
)
def test_uniform_batches_are_cut_evenly_or_not_at_all(
    plan_kernel, count, length, num_parts, splits, span
):
    table = plan(plan_kernel, [length] * count, num_parts)
    check(table, [length] * count)
    assert len(table.splits) == splits
    assert (
        max(
            sum(last - first for _, first, last in found)
            for found in pieces_of(table, [length] * count)
        )
        == span
    )


def test_small_parts_are_avoided_on_request(plan_kernel):
    table = plan(plan_kernel, [4096], 132, min_tiles=4)
    check(table, [4096])
    assert table.splits == [(0, 0, 16)]
