"""What the soak keeps busy: layer groups with their poisoned caches, streams and graphs."""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from batches import SCALE, uniform_batch

from mla_decode import DecodeProblem, Mask, MLADecoder, split_ubatches
from mla_decode.dtypes import torch_dtype
from mla_decode.problem import LATENT_WIDTH, ROW_WIDTH
from mla_decode.reference.oracle import decode_oracle

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from mla_decode import CommonAttentionMetadata, DeviceInfo

KINDS = ("eager", "ubatches", "replay")
"""Two layers on one stream; two micro-batches on two streams; a graph after a build."""
OUT_TOLERANCE = 2e-2
"""Of a row's norm: several times what bf16 weights and outputs lose."""
LSE_TOLERANCE = 2e-3
KV_SCALE = 0.5
CHECKED_REQUESTS = 4
"""Of a batch, those that are compared with float64: the oracle runs on the CPU."""
FREE_SLOTS = (-1, 2_147_480_000)
POISON = {2: (torch.int16, 0x7FC0), 1: (torch.uint8, 0x7F)}
"""By element size: the integers whose bits are NaN in bf16 and in fp8 e4m3."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How large a soak's batches and caches are."""

    requests: int
    seq_len: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneShape:
    """A layer group."""

    heads: int
    query_lens: tuple[int, ...]
    masks: tuple[Mask, ...] = (Mask.CAUSAL, Mask.NON_CAUSAL)
    kv_dtype: str = "bf16"
    page_size: int = 64

    def problem(self, size: Size, *, graphs: bool) -> DecodeProblem:
        """What its decoders are made for."""
        return DecodeProblem(
            num_q_heads=self.heads,
            kv_dtype=self.kv_dtype,
            page_size=self.page_size,
            query_lens=frozenset(self.query_lens),
            masks=frozenset(self.masks),
            needs_lse=True,
            graphs=graphs,
            max_num_reqs=size.requests,
            max_model_len=size.seq_len,
        )


LANES = {
    "triton_mla": (
        LaneShape(heads=16, query_lens=(1, 4, 8)),
        LaneShape(heads=128, query_lens=(1, 2)),
        LaneShape(heads=16, query_lens=(1, 4), kv_dtype="fp8"),
        LaneShape(heads=8, query_lens=(1, 3), page_size=16),
    ),
    "cuda_flashmla": (
        LaneShape(heads=16, query_lens=(1, 4, 8)),
        LaneShape(heads=128, query_lens=(1, 2), masks=(Mask.CAUSAL,)),
    ),
    "reference": (
        LaneShape(heads=2, query_lens=(1, 2, 4), page_size=16),
        LaneShape(heads=5, query_lens=(1, 3), kv_dtype="fp8", page_size=16),
    ),
}
"""FlashMLA's non-causal blocks are exact rewrites."""


@dataclass(slots=True, kw_only=True, eq=False)
class Step:
    """One drawn batch with the rows that its layers read and write."""

    common: CommonAttentionMetadata
    lens: list[int]
    query_len: int
    causal: bool
    q: Tensor
    pages: Tensor
    """int64 [requests, width] on the CPU: the table, unused slots 0."""


@dataclass(slots=True, kw_only=True, eq=False)
class Captured:
    """A graph, and the tensors that it reads and writes."""

    graph: torch.cuda.CUDAGraph
    q: Tensor
    out: Tensor
    lse: Tensor


class Lane:
    """One layer group: decoders, a cache of which all but live rows is NaN, graphs.

    Args:
        backend: Who decodes.
        shape: The layer group.
        device: Where its tensors live.
        size: How large its batches are.

    Raises:
        BackendRefused: The backend does not serve the layer group here.

    Attributes:
        decoders: One a micro-batch.
        graphed: A third one for captured steps; None where graphs are not captured.
        cache: [P, S, 576]: P is what the largest batch needs, and two more.
    """

    def __init__(
        self, backend: str, shape: LaneShape, device: DeviceInfo, size: Size
    ) -> None:
        self.backend, self.shape, self.device, self.size = backend, shape, device, size
        problem = shape.problem(size, graphs=False)
        self.decoders = (self._decoder(problem), self._decoder(problem))
        self.graphed: MLADecoder | None = None
        if self.on_gpu:
            self.graphed = self._decoder(shape.problem(size, graphs=True))
        self.captured: dict[tuple[int, int, bool], Captured] = {}
        where = device.torch_device
        dtype = torch_dtype(shape.kv_dtype, device)
        pages = size.requests * problem.table_width + 2
        numbers = torch.randn((pages, shape.page_size, ROW_WIDTH), device=where)
        if shape.kv_dtype == "fp8":
            numbers /= KV_SCALE
        self.cache: Tensor = numbers.to(dtype)
        self._cache_bits = self.cache.view(POISON[self.cache.element_size()][0])
        self._numbers = self._cache_bits.clone()
        rows = size.requests * problem.max_query_len
        shape_of_out = (2, rows, shape.heads, LATENT_WIDTH)
        self._out = torch.empty(shape_of_out, dtype=torch.bfloat16, device=where)
        self._lse = torch.empty(shape_of_out[:-1], device=where)
        self._scale = torch.tensor([KV_SCALE], device=where)
        self._streams: tuple[Any, ...] = ()
        if self.on_gpu:
            self._streams = (_stream(), _stream())

    @property
    def on_gpu(self) -> bool:
        """Whether streams and graphs are real."""
        return self.device.torch_device.startswith("cuda")

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of step that can be taken here."""
        return KINDS if self.graphed is not None else KINDS[:2]

    def _decoder(self, problem: DecodeProblem) -> MLADecoder:
        return MLADecoder(problem, self.backend, "exact", device=self.device)

    def draw(self, generator: torch.Generator, kind: str) -> Step:
        """Draw a ragged batch, and leave numbers in its keys' rows alone.

        Lengths are spread over their logarithm; some requests are empty, some are pads
        at the tail. A replay has one of few shapes: each is captured once.
        """

        def number(low: int, high: int) -> int:
            return int(torch.randint(low, high + 1, (), generator=generator))

        shape, size = self.shape, self.size
        query_len = shape.query_lens[number(0, len(shape.query_lens) - 1)]
        causal = shape.masks[number(0, len(shape.masks) - 1)] is Mask.CAUSAL
        count = number(1, size.requests)
        if kind == "replay":
            count = (1, max(size.requests // 4, 1), size.requests)[number(0, 2)]
        elif kind == "ubatches":
            count = max(count, 2)
        spread = torch.rand(count, generator=generator).double()
        longest = math.log(size.seq_len / query_len)
        lens = (query_len * (spread * longest).exp()).long().clamp(max=size.seq_len)
        lens[torch.rand(count, generator=generator) < 0.05] = 0
        num_pads = number(0, 2) if number(0, 3) == 0 else 0
        num_pads = min(num_pads, count - 1)
        lens[count - num_pads :] = 0
        q = torch.randn(
            (count * query_len, shape.heads, ROW_WIDTH), generator=generator
        )
        q[(count - num_pads) * query_len :] = math.nan
        pages = self._place(lens, generator)
        free = FREE_SLOTS[number(0, 1)]
        used = torch.arange(pages.shape[1])[None] < self._page_counts(lens)[:, None]
        table = torch.where(used, pages, free).int()
        where = self.device.torch_device
        common = uniform_batch(
            table.to(where),
            lens.int().to(where),
            query_len=query_len,
            max_seq_len=int(lens.max()),
            causal=causal,
            num_pads=num_pads,
        )
        return Step(
            common=common,
            lens=lens.tolist(),
            query_len=query_len,
            causal=causal,
            q=q.to(where, torch.bfloat16),
            pages=pages,
        )

    def _page_counts(self, lens: Tensor) -> Tensor:
        return -(-lens // self.shape.page_size)

    def _place(self, lens: Tensor, generator: torch.Generator) -> Tensor:
        """Give each request pages at random; poison every row that is not its."""
        counts = self._page_counts(lens).tolist()
        order = torch.randperm(self.cache.shape[0], generator=generator)
        width = -(-self.size.seq_len // self.shape.page_size)
        pages = torch.zeros((len(counts), width), dtype=torch.int64)
        filled = torch.zeros(self.cache.shape[0], dtype=torch.int64)
        first = 0
        for request, count in enumerate(counts):
            mine = order[first : first + count]
            pages[request, :count] = mine
            filled[mine] = self.shape.page_size
            if count:
                past = count * self.shape.page_size - int(lens[request])
                filled[mine[-1]] -= past
            first += count
        rows = torch.arange(self.shape.page_size)
        is_live = (rows[None] < filled[:, None]).to(self._cache_bits.device)
        poison = POISON[self.cache.element_size()][1]
        self._cache_bits.copy_(self._numbers)
        self._cache_bits.masked_fill_(~is_live[..., None], poison)
        return pages

    def _arguments(self) -> dict[str, Any]:
        is_fp8 = self.shape.kv_dtype == "fp8"
        return {
            "kv_cache": self.cache,
            "softmax_scale": SCALE,
            "kv_scale": self._scale if is_fp8 else None,
        }

    def run(self, step: Step, kind: str) -> tuple[Tensor, Tensor]:
        """Take a step of a kind; returns its out and lse, all rows of the batch."""
        if kind == "replay":
            return self._replay(step)
        rows = step.q.shape[0]
        out, lse = self._out[0, :rows], self._lse[0, :rows]
        out.fill_(math.nan)
        lse.fill_(math.nan)
        if kind == "ubatches":
            self._run_ubatches(step, out, lse)
            return out, lse
        decoder = self.decoders[0]
        plan = decoder.plan(step.common)
        for layer in (1, 0):  # the second layer's answer stays
            decoder.run(
                step.q,
                plan=plan,
                out=self._out[layer, :rows],
                lse=self._lse[layer, :rows],
                **self._arguments(),
            )
        return out, lse

    def _run_ubatches(self, step: Step, out: Tensor, lse: Tensor) -> None:
        """Two decoders interleaved, each on a stream of its own."""
        parts = split_ubatches(step.common, 2)
        plans: list[Any] = []
        for decoder, part, number in zip(self.decoders, parts, (0, 1), strict=True):
            with self._on_stream(number):
                plans.append(decoder.plan(part))
        first = 0
        for number, part in enumerate(parts):
            rows = slice(first, first + part.num_reqs * step.query_len)
            first = rows.stop
            with self._on_stream(number):
                self.decoders[number].run(
                    step.q[rows],
                    plan=plans[number],
                    out=out[rows],
                    lse=lse[rows],
                    **self._arguments(),
                )
        for stream in self._streams:
            torch.cuda.current_stream().wait_stream(stream)

    @contextlib.contextmanager
    def _on_stream(self, number: int) -> Iterator[None]:
        if not self._streams:
            yield
            return
        stream = self._streams[number]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            yield

    def _replay(self, step: Step) -> tuple[Tensor, Tensor]:
        """Build, then replay the graph of the step's shape, captured when first met."""
        decoder = self.graphed
        if decoder is None:
            raise RuntimeError("a replay was drawn where there are no graphs")
        key = (step.common.num_reqs, step.query_len, step.causal)
        if key not in self.captured:
            self.captured[key] = self._capture(decoder, step)
        found = self.captured[key]
        found.out.fill_(math.nan)
        found.lse.fill_(math.nan)
        found.q.copy_(step.q)
        decoder.plan(step.common)
        found.graph.replay()
        return found.out, found.lse

    def _capture(self, decoder: MLADecoder, step: Step) -> Captured:
        q = step.q.clone()
        out = torch.empty((*q.shape[:2], LATENT_WIDTH), dtype=q.dtype, device=q.device)
        lse = torch.empty(q.shape[:2], device=q.device)
        plan = decoder.plan_for_capture(step.common)
        arguments = {**self._arguments(), "plan": plan, "out": out, "lse": lse}
        decoder.run(q, **arguments)  # compiles what is not compiled yet
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            decoder.run(q, **arguments)
        return Captured(graph=graph, q=q, out=out, lse=lse)

    def errors(
        self, step: Step, out: Tensor, lse: Tensor, generator: torch.Generator
    ) -> dict[str, float]:
        """Compare a result with float64: some requests' values, every row's emptiness.

        Returns:
            ``out``: the worst row's relative error; ``lse``: the worst absolute one;
            ``rows``: rows that are not finite, or not (0, -inf) without a key.
        """
        lens, block = torch.tensor(step.lens), step.query_len
        is_empty = lens.repeat_interleave(block) == 0
        found, found_lse = out.cpu().double(), lse.cpu().double()
        wrong = ~found.flatten(1).isfinite().all(1)
        wrong |= is_empty & (found != 0).flatten(1).any(1)
        wrong |= (found_lse == -math.inf).all(1) != is_empty
        chosen = torch.randperm(len(lens), generator=generator)[:CHECKED_REQUESTS]
        rows = (chosen[:, None] * block + torch.arange(block)).flatten()
        q, live = step.q.cpu()[rows], lens[chosen]
        q[is_empty[rows]] = 0.0  # a pad's rows are NaN, and the oracle would see them
        truth, truth_lse = decode_oracle(
            q,
            self.cache,
            step.pages[chosen].to(self.cache.device),
            live,
            torch.arange(len(chosen) + 1) * block,
            causal=step.causal,
            softmax_scale=SCALE,
            kv_scale=KV_SCALE if self.shape.kv_dtype == "fp8" else 1.0,
        )
        full = ~is_empty[rows]
        gap = (found[rows] - truth)[full].norm(dim=-1) / truth[full].norm(dim=-1)
        lse_gap = (found_lse[rows] - truth_lse)[full].abs()
        return {
            "out": _worst(gap),
            "lse": _worst(lse_gap),
            "rows": float(wrong.sum()),
        }

    def accepts(self, errors: dict[str, float]) -> bool:
        """Whether errors are within what rounding explains."""
        return (
            errors["out"] <= OUT_TOLERANCE
            and errors["lse"] <= LSE_TOLERANCE
            and not errors["rows"]
        )


def _stream() -> Any:
    return torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch leaves it so


def _worst(values: Tensor) -> float:
    if not values.numel():
        return 0.0
    return math.inf if values.isnan().any() else float(values.max())
