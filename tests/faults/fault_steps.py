"""Decode steps as an engine would make them, poisoned where nothing may be read."""

from dataclasses import replace

import torch

from mla_decode import (
    BackendRefused,
    Candidate,
    Capability,
    CommonAttentionMetadata,
    DecodeProblem,
    DeviceInfo,
    Mask,
    MLADecoder,
)
from mla_decode.dtypes import torch_dtype
from mla_decode.reference import ReferenceBackend
from mla_decode.reference.oracle import decode_oracle
from mla_decode_cuda_flashmla.simulator.graph import SimulatedGraph

SCALE = 192**-0.5
CPU = DeviceInfo.assume("cpu")
HOPPER = DeviceInfo.assume("sm_90", libraries={"flash-mla": "2026.4"})
HOPPER_FP8 = DeviceInfo.assume("sm_90", libraries={"sgl-flash-mla": "1.0.0"})
BAD_SLOTS = (-1, 2_147_480_000)


def amd(arch="gfx950", release="0.1.20.post1"):
    """A described AMD device whose AITER is simulated."""
    return DeviceInfo.assume(arch, libraries={"amd-aiter": release})


SERVERS = {
    "reference": ("reference", CPU),
    "simulated AITER": ("rocm_aiter", amd()),
    "simulated FlashMLA": ("cuda_flashmla", HOPPER),
    "interpreted Triton": ("triton_mla", DeviceInfo.assume("sm_90")),
}
"""Every level that a CPU has: a backend's name, and the device that it is asked on."""


def problem_of(heads=16, q=1, *, causal=True, dtypes="bf16 bf16", **words):
    """A small problem of one mask; `q` is a block length or several."""
    q_dtype, kv_dtype = dtypes.split()
    given = {"page_size": 64, "max_num_reqs": 8, "max_model_len": 1024} | words
    return DecodeProblem(
        num_q_heads=heads,
        q_dtype=q_dtype,
        kv_dtype=kv_dtype,
        query_lens=frozenset({q} if isinstance(q, int) else q),
        masks=frozenset({Mask.CAUSAL if causal else Mask.NON_CAUSAL}),
        **given,
    )


class Step:
    """One batch of a problem with its tensors, and what is true of it.

    `blocks` are the requests' query lengths, Q each by default. `pads` requests at the
    tail have neither queries nor keys; rows of theirs are there and hold NaN. Requests
    take `pages` in order, from a `cache` of the caller's where one is given.
    """

    def __init__(
        self,
        problem,
        device,
        seq_lens,
        *,
        blocks=None,
        pads=0,
        causal=True,
        seed=0,
        slot=None,
        cache=None,
        pages=None,
    ):
        generator = torch.Generator().manual_seed(seed)
        self.problem, self.device, self.causal = problem, device, causal
        live = list(blocks or [problem.max_query_len] * len(seq_lens))
        lens, blocks = [*seq_lens, *[0] * pads], [*live, *[0] * pads]
        size, stride = problem.page_size, problem.page_stride
        counts = [-(-length // size) for length in lens]
        order = torch.randperm(sum(counts) + 2, generator=generator).tolist()
        order = [*reversed(pages)] if pages else order
        if cache is None:
            shape, strides = (max(order) + 1, size, 576), (stride, 576, 1)
            flat = torch.full((shape[0] * stride,), torch.nan)
            flat = flat.to(torch_dtype(problem.kv_dtype, device))
            cache = flat.as_strided(shape, strides)
        width = max([*counts, 1]) + 2
        bad = (BAD_SLOTS if slot is None else (slot,)) * width
        table = torch.tensor([bad[:width]] * len(lens), dtype=torch.int32)
        for request, length in enumerate(lens):
            for at in range(counts[request]):
                page = table[request, at] = order.pop()
                rows = min(size, length - at * size)
                drawn = torch.randn(rows, 576, generator=generator) * 0.3
                cache[int(page), :rows] = drawn.to(cache.dtype)
        starts = torch.tensor([0, *blocks], dtype=torch.int32).cumsum(0).int()
        longest = max(live or [problem.max_query_len])
        rows = int(starts[-1]) + pads
        if set(blocks) <= {0, longest}:
            rows = len(lens) * longest
        query = torch.randn(rows, problem.num_q_heads, 576, generator=generator)
        query[int(starts[-1]) :] = torch.nan
        self.q = query.to(torch_dtype(problem.q_dtype, device))
        self.kv_cache = cache
        self.common = CommonAttentionMetadata(
            query_start_loc=starts.clone(),
            query_start_loc_cpu=starts,
            seq_lens=torch.tensor(lens, dtype=torch.int32),
            num_reqs=len(lens),
            num_actual_tokens=rows,
            max_query_len=longest,
            max_seq_len=max([*lens, 0]),
            block_table_tensor=table,
            causal=causal,
        )
        self.scales = {}
        if problem.q_dtype == "fp8":
            self.scales["q_scale"] = torch.tensor([0.7])
        if problem.kv_dtype == "fp8":
            self.scales["kv_scale"] = torch.tensor([1.3])

    def changed(self, **fields):
        """The same tensors under a batch of which some fields differ."""
        step = object.__new__(Step)
        step.__dict__.update(self.__dict__)
        step.common = replace(self.common, **fields)
        step.causal = fields.get("causal", self.causal)
        return step

    def with_lens(self, lens, live=None):
        """The same tensors with shorter lengths; requests past `live` become pads."""
        live = len(lens) if live is None else live
        blocks = self.common.query_start_loc_cpu.diff()
        blocks[live:] = 0
        starts = torch.cat((torch.zeros(1), blocks.cumsum(0))).int()
        return self.changed(
            query_start_loc=starts.clone(),
            query_start_loc_cpu=starts,
            seq_lens=torch.tensor(lens, dtype=torch.int32),
            max_seq_len=max([*lens, 0]),
        )

    def outputs(self, fill=torch.nan):
        """Buffers for `out` and, where the problem asks for it, `lse`."""
        rows, heads = self.q.shape[:2]
        dtype = torch_dtype(self.problem.out_dtype, self.device)
        found = {"out": torch.full((rows, heads, 512), fill, dtype=dtype)}
        if self.problem.needs_lse:
            found["lse"] = torch.full((rows, heads), fill)
        return found

    def run(self, decoder, plan=None, **words):
        """Plan, unless a plan is given, and decode into buffers full of NaN."""
        plan = decoder.plan(self.common) if plan is None else plan
        given = {"softmax_scale": SCALE, **self.scales, **self.outputs()} | words
        return decoder.run(given.pop("q", self.q), self.kv_cache, plan, **given)

    def truth(self, softmax_scale=SCALE):
        """(out, lse) in float64."""
        return decode_oracle(
            self.q.float().nan_to_num(1e6),
            self.kv_cache,
            self.common.block_table_tensor,
            self.common.seq_lens,
            self.common.query_start_loc_cpu,
            causal=self.causal,
            softmax_scale=softmax_scale,
            q_scale=float(self.scales.get("q_scale", 1.0)),
            kv_scale=float(self.scales.get("kv_scale", 1.0)),
        )

    def check(self, found, *, atol=0.02, softmax_scale=SCALE):
        """Demand the truth of every row: empty ones exactly, no NaN anywhere."""
        out, lse = self.truth(softmax_scale)
        empty = lse.isneginf().all(-1)
        assert torch.equal(found.out[empty], torch.zeros_like(found.out[empty]))
        torch.testing.assert_close(found.out.double(), out, rtol=0.02, atol=atol)
        assert (found.lse is None) == (not self.problem.needs_lse)
        if found.lse is not None:
            assert found.lse.dtype == torch.float32
            torch.testing.assert_close(found.lse.double(), lse, rtol=1e-3, atol=1e-3)


def decoder_of(problem, server, lowering="refuse", **words):
    """A decoder of a backend, by its name or by its object, on a device."""
    backend, device = server
    if isinstance(backend, str):
        return MLADecoder(problem, backend, lowering, device=device, **words)
    words["candidates"] = candidate(backend)
    return MLADecoder(problem, backend.name, lowering, device=device, **words)


def serve(problem, server, seq_lens, *, lowering="refuse", **words):
    """Decode one step through the decoder and check it; (decoder, step, output).

    Args:
        problem: What is asked.
        server: (backend, device), such as a value of `SERVERS`.
        seq_lens: Lengths of the live requests.
        lowering: As `MLADecoder` takes it.
        words: To `Step`.
    """
    decoder = decoder_of(problem, server, lowering)
    step = Step(problem, decoder.device, seq_lens, **words)
    found = step.run(decoder)
    step.check(found)
    return decoder, step, found


def refusals(problem, server, lowering="refuse"):
    """Every reason of a refused problem; a served one fails the test."""
    try:
        decoder = decoder_of(problem, server, lowering)
    except BackendRefused as refused:
        return refused.refusals
    raise AssertionError(f"served by {decoder.selection}")


def codes(problem, server, lowering="refuse"):
    """The codes of `refusals`."""
    return {str(reason.code) for reason in refusals(problem, server, lowering)}


def candidate(backend):
    """A backend object as the candidates of a decoder: chosen by its name."""
    return {backend.name: Candidate(name=backend.name, backend=backend)}


def narrow(**fields):
    """The reference backend as one whose kernels serve less: fields of its row."""
    capability = ReferenceBackend.capability
    row = replace(capability.row("cpu"), **fields)
    namespace = {"capability": Capability(rows=(row,))}
    return type("Narrow", (ReferenceBackend,), namespace)()


class Recorded:
    """A step as a graph records it: over its own tensors, replayed after later plans.

    A simulated FlashMLA is captured operator by operator. Elsewhere a replay is the
    recorded metadata run again, whose tensors a later plan must have refreshed.

    Args:
        decoder: Of a problem with graphs.
        step: Its tensors stay; later steps change lengths and tables alone.
    """

    def __init__(self, decoder, step):
        self.decoder, self.step = decoder, step
        self.plan = decoder.plan_for_capture(step.common)
        self.given = step.outputs()
        self.found = step.run(decoder, self.plan, **self.given)  # engines warm up
        self.graph = None
        if "FlashMLA" in type(self.plan).__name__ or "FlashMLA" in str(
            type(getattr(self.plan, "inner", None))
        ):
            self.graph = SimulatedGraph()
            with self.graph.capture():
                self.found = step.run(decoder, self.plan, **self.given)

    def replay(self, step=None):
        """Plan another step of the same shape, replay the recorded one, and check."""
        step = step or self.step
        newest = self.newest = self.decoder.plan(step.common)
        for tensor in self.given.values():
            tensor.fill_(torch.nan)
        if self.graph is not None:
            self.graph.replay()
        else:
            self.plan.generation = newest.generation
            self.found = self.step.run(self.decoder, self.plan, **self.given)
        step.check(self.found)
        return self.found
