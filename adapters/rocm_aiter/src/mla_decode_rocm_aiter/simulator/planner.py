"""The schedule of a persistent decode, planned as AITER's device planners plan it."""

from __future__ import annotations

from dataclasses import dataclass, field

from mla_decode_rocm_aiter.tiling import ceil_div

OUT_OF_BOUNDS = -7_777_777
"""What a read past a buffer finds: nothing that a right answer can be made of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """What the planner is told, after the host side has decided how heads fold."""

    page_starts: tuple[int, ...]
    """First page of each request, and the total at the end."""
    last_page_lens: tuple[int, ...]
    """Valid tokens of each request's last page."""
    query_starts: tuple[int, ...]
    """First query row of each request, and the total at the end."""
    page_size: int
    """Tokens per page."""
    granularity: int
    """Pages of one block; a block is the unit of splitting."""
    heads: int
    """Heads of one folded request."""
    call_heads: int
    """Heads of the call, which alone decide whether query rows are tiled."""
    ratio: int
    """Folded requests per request."""
    max_q: int
    """Query tokens of the longest request."""
    uniform_q: int
    """Query tokens of every request; -1 reads them from `query_starts`."""
    tile_rows: int
    """Heads times tokens of one tile."""
    causal: bool
    """Whether tiles are trimmed to the keys that their rows see."""
    round_robin: bool
    """Whether the trim is left to the kernel because keys are dealt over ranks."""
    cus: int
    """Compute units."""
    splits: int
    """Compute units that the payload is divided by."""


@dataclass(slots=True, kw_only=True)
class Plan:
    """The arrays that the planner writes; what it leaves alone is absent."""

    works: list[tuple[int, ...]] = field(default_factory=list)
    """Request, partial row or -1, query rows, pages, tokens after the pages, pad."""
    work_indptr: list[int] = field(default_factory=list)
    """Works of each compute unit."""
    reduce_indptr: list[int] = field(default_factory=list)
    """Partials of each query tile; 0 of them where a single work writes the output."""
    final_map: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Query rows of the tiles that are reduced, by tile."""
    partial_map: list[int] = field(default_factory=list)
    """First partial row of each partial."""


class Planner:
    """Walk the requests once, handing blocks to compute units until each is full."""

    def __init__(self, request: PlanRequest) -> None:
        self.request = request
        self.batches = (len(request.page_starts) - 1) * request.ratio
        self.overhead = max(1, ceil_div(16, request.page_size))
        self.is_tiled = not 0 < request.max_q * request.call_heads <= request.tile_rows
        total = sum(
            (self.blocks(batch) + self.overhead) * self.num_tiles(batch)
            for batch in range(self.batches)
        )
        if self.is_tiled and request.uniform_q < 1:
            # The device sums over lengths that it has not read yet.
            total = 0
        self.payload = ceil_div(total, request.splits) + self.overhead

    def pages(self, batch: int) -> tuple[int, int]:
        """First and last page of a folded request."""
        real = batch // self.request.ratio
        return self.request.page_starts[real], self.request.page_starts[real + 1]

    def blocks(self, batch: int) -> int:
        """Blocks of a folded request."""
        start, end = self.pages(batch)
        return ceil_div(end - start, self.request.granularity)

    def query_rows(self, batch: int) -> tuple[int, int]:
        """First and last query row of a folded request."""
        if self.request.uniform_q > 0:
            uniform = self.request.uniform_q
            return batch * uniform, (batch + 1) * uniform
        return self.request.query_starts[batch], self.request.query_starts[batch + 1]

    def num_tiles(self, batch: int) -> int:
        """Query tiles of a folded request."""
        if not self.is_tiled:
            return 1
        start, end = self.query_rows(batch)
        if 2 * self.request.heads > self.request.tile_rows:
            return end - start
        return ceil_div((end - start) * self.request.heads, self.request.tile_rows)

    def kv_range(
        self,
        batch: int,
        tile: int,
        first_row: int,
        block: int,
        count: int,
        *,
        tail: bool,
    ) -> tuple[int, int, int]:
        """First page, last page and tokens after them, of `count` blocks of a tile."""
        request = self.request
        start, end = self.pages(batch)
        first = start + block * request.granularity
        wanted = first + count * request.granularity
        if request.page_size > 1:
            last = min(wanted, end)
            # The folded index reads the last-page length of another request.
            after = (
                0
                if last == end
                else (end - last - 1) * request.page_size + self._last_page_len(batch)
            )
            return first, last, after
        trim = 0
        if request.causal:
            tiles = self.num_tiles(batch)
            behind = 0 if request.round_robin else tiles - 1 - tile
            if request.ratio != 1:
                behind = tiles - (first_row // request.ratio) % request.uniform_q - 1
            trim = max(behind, 0)
        last = min(wanted, end - trim)
        if tail or 0 < end - last < request.max_q:
            last = end - trim
        return first, last, end - last

    def _last_page_len(self, batch: int) -> int:
        lens = self.request.last_page_lens
        return lens[batch] if batch < len(lens) else OUT_OF_BOUNDS

    def run(self) -> Plan:
        """Plan serially, tile by tile."""
        plan = Plan(work_indptr=[0], reduce_indptr=[0])
        batch = tile = block = cuts = partial = reduced = 0
        tail_done = False
        for _ in range(self.request.cus):
            room = self.payload
            while batch < self.batches:
                tiles = self.num_tiles(batch)
                first_row, end_row = self.query_rows(batch)
                rows = ceil_div(end_row - first_row, tiles) if tiles else 0
                first_row += tile * rows
                last_row = min(first_row + rows, end_row)
                rest = self.blocks(batch) - block
                if room >= rest + self.overhead or tail_done:
                    kv = self.kv_range(
                        batch, tile, first_row, block, rest, tail=tail_done
                    )
                    at = partial if cuts else -1
                    plan.works.append((batch, at, first_row, last_row, *kv, 0))
                    if cuts:
                        index = len(plan.reduce_indptr) - 1
                        plan.final_map[index] = (first_row, last_row)
                        plan.partial_map.extend(
                            partial - (cuts - cut) * rows for cut in range(cuts + 1)
                        )
                        partial += rows
                        reduced += cuts + 1
                    plan.reduce_indptr.append(reduced)
                    room -= rest + self.overhead
                    tile = 0 if tile == tiles - 1 else tile + 1
                    batch += tile == 0 or not self.is_tiled
                    block = cuts = 0
                    tail_done = False
                    continue
                if room > self.overhead:
                    count = room - self.overhead
                    first, last, after = self.kv_range(
                        batch, tile, first_row, block, count, tail=False
                    )
                    if self._leaves_a_tail(batch, last):
                        tail_done = True
                        continue
                    plan.works.append(
                        (batch, partial, first_row, last_row, first, last, after, 0)
                    )
                    partial += rows
                    block += count
                    cuts += 1
                break
            plan.work_indptr.append(len(plan.works))
        return plan

    def _leaves_a_tail(self, batch: int, last: int) -> bool:
        """Whether what a cut would leave is too short for a work of its own."""
        _, end = self.pages(batch)
        return self.request.page_size == 1 and end - last < self.request.max_q

    def run_parallel(self) -> Plan:
        """Plan single-token requests by the closed form, each on its own.

        An empty request that meets a full compute unit gets no work at all.
        """
        plan = Plan(reduce_indptr=[0])
        cus = self.request.cus
        per_cu = self.payload - self.overhead
        closed: dict[int, int] = {}
        unit, room, partial, reduced = 0, self.payload, 0, 0
        for batch in range(self.batches):
            blocks = self.blocks(batch)
            before = len(plan.works)
            fits = blocks + self.overhead <= room
            leading = 0 if fits else max(room - self.overhead, 0)
            fresh = 0 if fits else ceil_div(blocks - leading, per_cu)
            pieces = 1 if fits else fresh + (leading > 0)
            cuts = self._cuts(blocks, leading, per_cu, pieces, fits=fits)
            home = unit if fits or leading else unit + 1
            if not fits and not leading:
                closed[unit + 1] = before
            for piece, (begin, end) in enumerate(cuts):
                start, stop = self.pages(batch)
                first = start + begin * self.request.granularity
                last = min(start + end * self.request.granularity, stop)
                at = partial + piece if pieces > 1 else -1
                rows = self.query_rows(batch)
                plan.works.append((batch, at, *rows, first, last, stop - last, 0))
                if piece < pieces - 1:
                    closed[home + piece + 1] = len(plan.works)
            if pieces > 1:
                plan.final_map[batch] = self.query_rows(batch)
                plan.partial_map.extend(range(partial, partial + pieces))
                partial += pieces
                reduced += pieces
            plan.reduce_indptr.append(reduced)
            if fits:
                room -= blocks + self.overhead
            else:
                unit += fresh
                ends = blocks - leading - (fresh - 1) * per_cu
                room = self.payload - (ends + self.overhead)
        plan.work_indptr = [0] + [
            closed.get(index, len(plan.works)) for index in range(1, cus + 1)
        ]
        return plan

    @staticmethod
    def _cuts(
        blocks: int, leading: int, per_cu: int, pieces: int, *, fits: bool
    ) -> list[tuple[int, int]]:
        """Blocks of each piece of a request."""
        if fits:
            return [(0, blocks)]
        ends = [leading] if leading else []
        ends += [leading + (n + 1) * per_cu for n in range(pieces - len(ends))]
        starts = [0, *ends[:-1]]
        return [
            (start, blocks if index == pieces - 1 else end)
            for index, (start, end) in enumerate(zip(starts, ends, strict=False))
        ]
