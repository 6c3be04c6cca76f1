"""An engine's side of decoding: requests that grow, pages that are reused, the truth."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import ClassVar

import numpy as np
import torch
from fuzz_targets import MAX_REQS

from mla_decode import CommonAttentionMetadata
from mla_decode.dtypes import torch_dtype
from mla_decode.problem import LATENT_WIDTH, ROW_WIDTH
from mla_decode.reference.oracle import decode_oracle
from mla_decode_contract.scene import poison

SCALE = 192**-0.5
Q_SCALE, KV_SCALE = 0.25, 0.5
FREE_SLOTS = (-1, -(2**31), 2_147_480_000)
TOLERANCE = {"bf16": 2e-2, "fp16": 1e-2, "fp32": 1e-4, "fp8": 1.5e-1}
"""Of a row's norm: several times what rounding loses, less than a lost key costs."""
CAUSAL_FORMS = (bool, np.bool_, torch.tensor, lambda causal: torch.full((2, 1), causal))


@dataclass(kw_only=True, eq=False)
class Sequence:
    """A request: its pages, and how many of their rows hold keys."""

    pages: list[int] = field(default_factory=list)
    length: int = 0


@dataclass(frozen=True, kw_only=True)
class Draw:
    """What hypothesis draws of a step: one number, read digit by digit."""

    COUNT: ClassVar[int] = 4 * 2 * 2 * 4 * 3 * 2 * 3 * 4 * 2 * 12

    block: int
    ragged: int
    is_non_causal: int
    causal_form: int
    pads: int
    hides_pads: int
    """Whether num_actual_tokens leaves the rows of pads out."""
    free_slot: int
    form: int
    """How the engine holds its tensors: see `Engine.arguments`; 3 brings buffers."""
    layer: int
    filled: int
    """The request that has no key, counted from 1; 0 and what is past all: none."""

    @classmethod
    def of(cls, number):
        """Every number below `COUNT` is a step of its own; 0 is the plainest."""
        digits = []
        for base in (4, 2, 2, 4, 3, 2, 3, 4, 2, 12):
            number, digit = divmod(number, base)
            digits.append(digit)
        names = (field.name for field in fields(cls))
        return cls(**dict(zip(names, digits, strict=True)))


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """A batch, and on the host what its tensors say."""

    common: CommonAttentionMetadata
    lens: tuple[int, ...]
    blocks: tuple[int, ...]
    query_len: int
    """0 where the batch is ragged."""
    rows: int
    causal: bool
    table: torch.Tensor

    @property
    def starts(self):
        """int32 [requests + 1]."""
        starts = torch.zeros(len(self.blocks) + 1, dtype=torch.int32)
        starts[1:] = torch.tensor(self.blocks).cumsum(0)
        return starts

    def part(self, common, first, last):
        """Some of its requests, told by its own numbers and not by the part's."""
        blocks = self.blocks[first:last]
        return Batch(
            common=common,
            lens=self.lens[first:last],
            blocks=blocks,
            query_len=self.query_len,
            rows=self.query_len * len(blocks),
            causal=self.causal,
            table=self.table[first:last],
        )


class Engine:
    """The requests of one layer group over two layers' caches.

    Whatever holds no key holds NaN: fresh pages, forgotten rows, given-back pages.
    """

    def __init__(self, problem, device, seed):
        self.problem, self.device = problem, device
        self.generator = torch.Generator().manual_seed(seed)
        self.layers = tuple(self._cache() for _ in range(2))
        self.free = self.shuffled(self.layers[0].shape[0])
        self.requests = [Sequence(), Sequence()]

    def shuffled(self, count):
        """0..count in an order of this engine's."""
        return torch.randperm(count, generator=self.generator).tolist()

    def number(self, below):
        """A number of this engine's."""
        return int(torch.randint(below, (), generator=self.generator))

    def _cache(self):
        problem = self.problem
        pages, size = MAX_REQS * problem.table_width + 2, problem.page_size
        dtype = torch_dtype(problem.kv_dtype, self.device)
        storage = poison(torch.empty((pages, problem.page_stride), dtype=dtype))
        return storage[:, : size * ROW_WIDTH].view(pages, size, ROW_WIDTH)

    def grow(self, request, tokens):
        """Write new keys at a request's end, in every layer."""
        size = self.problem.page_size
        for position in range(request.length, request.length + tokens):
            if position % size == 0:
                request.pages.append(self.free.pop())
        for layer in self.layers:
            rows = self._normal((tokens, ROW_WIDTH), self.problem.kv_dtype, KV_SCALE)
            for page, inside, place in self._runs(request, request.length, tokens):
                layer[page, inside] = rows[place]
        request.length += tokens

    def cut(self, request, length):
        """Forget a request's last keys and give their pages back, poisoned."""
        forgotten = max(0, request.length - length)
        request.length -= forgotten
        for layer in self.layers:
            for page, inside, _ in self._runs(request, request.length, forgotten):
                poison(layer[page, inside])
        kept = -(-request.length // self.problem.page_size)
        self.free = [*reversed(request.pages[kept:]), *self.free]
        del request.pages[kept:]

    def _runs(self, request, begin, tokens):
        """(page, rows of the page, places in the run) of consecutive keys."""
        size, end = self.problem.page_size, begin + tokens
        for number in range(begin // size, -(-end // size)):
            first, last = max(begin, number * size), min(end, (number + 1) * size)
            inside = slice(first - number * size, last - number * size)
            yield request.pages[number], inside, slice(first - begin, last - begin)

    def batch(self, draw, *, varlen):
        """The step's batch: every request's new block is written, then described."""
        problem = self.problem
        known = sorted(problem.query_lens)
        real = len(self.requests)
        is_ragged = varlen and draw.ragged and not draw.is_non_causal
        blocks = [
            known[(draw.block + is_ragged * index) % len(known)]
            for index in range(real)
        ]
        for request, block in zip(self.requests, blocks, strict=True):
            if request.length + block > problem.max_model_len:
                self.cut(request, self.number(problem.max_model_len - block))
            self.grow(request, block)
        lens = [request.length for request in self.requests]
        tables = [request.pages for request in self.requests]
        if 0 < draw.filled <= real:
            lens[draw.filled - 1], tables[draw.filled - 1] = 0, []
        pads = min(draw.pads, MAX_REQS - real)
        return self._describe(draw, blocks + [0] * pads, lens, tables, max(blocks))

    def all_pads(self, draw, requests):
        """A batch of nothing but pads."""
        known = sorted(self.problem.query_lens)
        query_len = known[draw.block % len(known)]
        return self._describe(draw, [0] * requests, [], [], query_len)

    def _describe(self, draw, blocks, lens, tables, longest):
        count = len(blocks)
        lens = [*lens, *[0] * (count - len(lens))]
        is_uniform = set(blocks) <= {0, longest}
        real = sum(blocks)
        rows = count * longest if is_uniform else real
        if not is_uniform and not draw.hides_pads:
            rows = min(real + draw.pads, MAX_REQS * self.problem.max_query_len)
        width = self.problem.table_width
        free = FREE_SLOTS[draw.free_slot % len(FREE_SLOTS)]
        wide = torch.full((count + 1, width + 3), free, dtype=torch.int32)
        for index, pages in enumerate(tables):
            wide[index, : len(pages)] = torch.tensor(pages, dtype=torch.int32)
        starts = torch.zeros(count + 1, dtype=torch.int32)
        starts[1:] = torch.tensor(blocks).cumsum(0)
        causal = not draw.is_non_causal
        bound = max(lens)
        if causal and bound:  # a bound below a block is refused, whoever has the block
            bound = max(bound, longest)
        common = CommonAttentionMetadata(
            query_start_loc=starts.clone(),
            query_start_loc_cpu=starts,
            seq_lens=torch.tensor(lens, dtype=torch.int32),
            num_reqs=count,
            num_actual_tokens=real if draw.hides_pads else rows,
            max_query_len=longest,
            max_seq_len=bound,
            block_table_tensor=wide[:, :width],
            causal=CAUSAL_FORMS[draw.causal_form % len(CAUSAL_FORMS)](causal),
        )
        return Batch(
            common=common,
            lens=tuple(lens),
            blocks=tuple(blocks),
            query_len=longest if is_uniform else 0,
            rows=rows,
            causal=causal,
            table=wide[:count, :width].clone(),
        )

    def query(self, batch):
        """[rows, H, 576], pad rows NaN."""
        shape = (batch.rows, self.problem.num_q_heads, ROW_WIDTH)
        q = self._normal(shape, self.problem.q_dtype, Q_SCALE)
        poison(q[sum(batch.blocks) :])
        return q

    def arguments(self, q, form=0, layer=0):
        """Keyword arguments of a call: the forms in which an engine may hold tensors."""
        problem, cache = self.problem, self.layers[layer]
        if form == 1:
            q = (q[..., :LATENT_WIDTH].contiguous(), q[..., LATENT_WIDTH:].contiguous())
        if form == 2:
            wide = poison(torch.empty((*q.shape[:2], ROW_WIDTH + 32), dtype=q.dtype))
            wide[..., :ROW_WIDTH] = q
            q = wide[..., :ROW_WIDTH]
        is_fp8 = problem.kv_dtype == "fp8"
        if is_fp8 and form:
            cache = cache.view(torch.uint8)
        return {
            "q": q,
            "kv_cache": cache,
            "softmax_scale": SCALE,
            "q_scale": torch.tensor([Q_SCALE]) if problem.q_dtype == "fp8" else None,
            "kv_scale": torch.tensor([KV_SCALE]) if is_fp8 else None,
        }

    def check(self, batch, q, output, layer=0):
        """Hold an output to the float64 oracle and to the clauses EMPTY, LSE and OUT."""
        problem = self.problem
        truth, lse = decode_oracle(
            q,
            self.layers[layer],
            batch.table,
            torch.tensor(batch.lens),
            batch.starts,
            causal=batch.causal,
            softmax_scale=SCALE,
            q_scale=Q_SCALE if problem.q_dtype == "fp8" else 1.0,
            kv_scale=KV_SCALE if problem.kv_dtype == "fp8" else 1.0,
        )
        out, empty = output.out, lse == -torch.inf
        assert out.shape == truth.shape, f"out {out.shape}, not {truth.shape}"
        assert out.dtype == torch_dtype(problem.out_dtype, self.device), out.dtype
        assert bool(out.isfinite().all()), "out is not finite"
        assert bool((out[empty] == 0).all()), "an empty row's out is not 0"
        words = {problem.q_dtype, problem.out_dtype}
        tolerance = max(TOLERANCE[word] for word in words)
        size = truth.norm(dim=-1)
        worst = ((out.double() - truth).norm(dim=-1) / size.clamp(min=1e-9)).max()
        assert worst <= tolerance, f"out is off by {float(worst):.3g} of a row's norm"
        if not problem.needs_lse:
            assert output.lse is None, "an lse that nobody asked for"
            return
        found = output.lse.double()
        assert bool((found[empty] == -torch.inf).all()), "an empty row's lse"
        error = (found - lse)[~empty].abs()
        assert bool((error <= 2e-3).all()), f"lse is off by {float(error.max()):.3g}"

    def _normal(self, shape, dtype, scale):
        numbers = torch.randn(shape, generator=self.generator)
        if dtype == "fp8":
            numbers /= scale
        return numbers.to(torch_dtype(dtype, self.device))
