"""The reference against the float64 oracle; whatever nobody may read is poison."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mla_decode import Cost, Dcp, DecodeProblem, DeviceInfo, Mask
from mla_decode.dcp import local_seq_lens
from mla_decode.reference import backend
from mla_decode.reference.pieces import PieceReader

TOLERANCE = {"bf16": 4e-3, "fp16": 1e-3, "fp32": 1e-5}
"""Relative error of a row's output, by its dtype."""

FORMS = [
    ("bf16", "bf16", "bf16"),
    ("fp16", "fp16", "fp16"),
    ("fp32", "fp32", "fp32"),
    ("bf16", "fp8", "bf16"),
    ("fp8", "fp8", "bf16"),
    ("fp8", "fp8", "fp16"),
    ("fp32", "bf16", "bf16"),
    ("bf16", "bf16", "fp32"),
    ("fp16", "bf16", "bf16"),
]


def decode(step, cpu, **changes):
    builder = backend.builder_cls(step.problem, cpu, validate="device")
    metadata = builder.build(step.common)
    arguments = {"q": step.q, "kv_cache": step.kv_cache, **step.arguments, **changes}
    return backend.forward(metadata=metadata, **arguments)


def compare(step, output):
    """Hold an output to the oracle's, row by row, and EMPTY rows to their values."""
    truth, lse = step.truth()
    difference = (output.out.double() - truth).flatten(1).norm(dim=1)
    allowed = TOLERANCE[step.problem.out_dtype] * truth.flatten(1).norm(dim=1)
    assert (difference <= allowed).all()
    if output.lse is None:
        assert not step.problem.needs_lse
        return
    is_empty = lse == -torch.inf
    assert torch.equal(output.lse == -torch.inf, is_empty)
    assert (output.out[is_empty] == 0).all()
    seen = ~is_empty
    assert torch.allclose(output.lse[seen].double(), lse[seen], rtol=1e-5, atol=2e-4)


@st.composite
def drawn_steps(draw):
    causal = draw(st.booleans())
    query_len = draw(st.integers(1, 5))
    num_reqs = draw(st.integers(1, 4))
    blocks = [query_len] * num_reqs
    if causal and draw(st.booleans()):
        blocks = [draw(st.integers(1, query_len)) for _ in blocks]
    seq_lens = [
        draw(
            st.one_of(
                st.just(0),
                st.integers(block, 40),
                st.integers(500, 540),
                st.integers(1020, 1100),
                st.integers(2040, 2060),
                st.integers(4090, 4110),
            )
        )
        for block in blocks
    ]
    q_dtype, kv_dtype, out_dtype = draw(st.sampled_from(FORMS))
    return {
        "causal": causal,
        "query_lens": blocks,
        "seq_lens": seq_lens,
        "pads": draw(st.integers(0, 2)),
        "heads": draw(st.sampled_from([1, 3, 16])),
        "page_size": draw(st.sampled_from([1, 16, 64])),
        "shared": draw(st.booleans()),
        "page_gap": draw(st.sampled_from([0, 64])),
        "needs_lse": draw(st.booleans()),
        "softmax_scale": draw(st.sampled_from([0.01, 192**-0.5, 0.5])),
        "q_dtype": q_dtype,
        "kv_dtype": kv_dtype,
        "out_dtype": out_dtype,
        "seed": draw(st.integers(0, 2**16)),
    }


@settings(max_examples=120)
@given(fields=drawn_steps())
def test_is_what_the_oracle_says(make_step, cpu, fields):
    step = make_step(**fields)
    compare(step, decode(step, cpu))


@given(
    requests=st.lists(
        st.tuples(st.integers(1, 6), st.none() | st.integers(0, 3)),
        min_size=1,
        max_size=5,
    ),
    pads=st.integers(0, 2),
)
def test_a_causal_block_of_an_empty_request_may_be_any_length(
    make_step, cpu, requests, pads
):
    """LENGTHS: seq_len is 0 or at least Q, each request by itself."""
    blocks = [block for block, _ in requests]
    lens = [0 if more is None else block + more for block, more in requests]
    step = make_step(seq_lens=lens, query_lens=blocks, pads=pads)
    assert step.common.max_seq_len == max(lens)
    compare(step, decode(step, cpu))


@pytest.mark.parametrize("form", FORMS, ids="-".join)
@pytest.mark.parametrize("causal", [True, False])
def test_serves_every_dtype_over_several_pieces(make_step, cpu, form, causal):
    step = make_step(
        seq_lens=(2600, 4700, 513, 5, 2052, 600),
        query_len=4,
        heads=4,
        page_size=64,
        causal=causal,
        pads=1,
        **dict(zip(("q_dtype", "kv_dtype", "out_dtype"), form, strict=True)),
    )
    compare(step, decode(step, cpu))


@pytest.mark.parametrize("page_size", [1, 3, 48, 512, 600, 1024, 4096])
@pytest.mark.parametrize("out_dtype", ["bf16", "fp32"])
def test_walks_pages_of_any_size(make_step, cpu, page_size, out_dtype):
    step = make_step(
        seq_lens=(1700, 700, 40), query_len=2, page_size=page_size, out_dtype=out_dtype
    )
    compare(step, decode(step, cpu))


def test_an_all_pad_batch_is_empty(make_step, cpu):
    step = make_step(seq_lens=(), query_len=3, pads=2)
    output = decode(step, cpu)
    assert output.out.shape == (6, 2, 512)
    assert not output.out.any()
    assert (output.lse == -torch.inf).all()


def test_writes_every_row_of_the_callers_own_outputs(make_step, cpu):
    step = make_step(seq_lens=(9, 0), query_len=2, causal=False, pads=1)
    out = torch.full((6, 2, 512), torch.nan, dtype=torch.bfloat16)
    lse = torch.full((6, 2), torch.nan)
    output = decode(step, cpu, out=out, lse=lse)
    assert output.out is out
    compare(step, output)


def test_takes_a_query_pair_a_view_and_bytes(make_step, cpu):
    step = make_step(seq_lens=(600, 9), query_len=2, kv_dtype="fp8")
    expected = decode(step, cpu)
    pair = (step.q[..., :512].contiguous(), step.q[..., 512:].contiguous())
    wide = torch.full((4, 5, 600), torch.nan, dtype=torch.bfloat16)
    wide[:, 1:3, 4:580] = step.q
    for changes in (
        {"q": pair},
        {"q": (step.q[..., :512], step.q[..., 512:])},
        {"q": wide[:, 1:3, 4:580]},
        {"kv_cache": step.kv_cache.view(torch.uint8)},
    ):
        output = decode(step, cpu, **changes)
        assert torch.equal(output.out, expected.out)
        assert torch.equal(output.lse, expected.lse)


def test_repeats_itself_bit_by_bit(make_step, cpu):
    step = make_step(seq_lens=(1700, 40), query_len=4, heads=16, page_size=64)
    first, second = decode(step, cpu), decode(step, cpu)
    assert torch.equal(first.out, second.out)
    assert torch.equal(first.lse, second.lse)


def test_a_request_does_not_depend_on_the_others_of_its_batch(make_step, cpu):
    step = make_step(seq_lens=(1700, 40, 513), query_len=4, heads=16, page_size=64)
    together = decode(step, cpu)
    for request, (start, stop) in enumerate(pairwise(range(0, 13, 4))):
        one = slice(request, request + 1)
        starts = torch.tensor([0, 4], dtype=torch.int32)
        alone = replace(
            step,
            q=step.q[start:stop],
            common=replace(
                step.common,
                query_start_loc=starts,
                query_start_loc_cpu=starts,
                seq_lens=step.common.seq_lens[one],
                block_table_tensor=step.common.block_table_tensor[one],
                num_reqs=1,
                num_actual_tokens=4,
            ),
        )
        assert torch.equal(decode(alone, cpu).out, together.out[start:stop])


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("seq_len", [300, 515, 1540, 2051, 4610])
def test_a_token_of_a_causal_block_has_the_bits_that_it_has_alone(
    make_step, cpu, dtype, seq_len
):
    form = {"q_dtype": dtype, "kv_dtype": dtype, "out_dtype": dtype}
    step = make_step(seq_lens=(seq_len,), query_len=7, heads=4, **form)
    block = decode(step, cpu)
    starts = torch.tensor([0, 1], dtype=torch.int32)
    for token in range(7):
        alone = replace(
            step,
            q=step.q[token : token + 1],
            problem=replace(step.problem, query_lens={1}),
            common=replace(
                step.common,
                query_start_loc=starts,
                query_start_loc_cpu=starts,
                num_actual_tokens=1,
                max_query_len=1,
                seq_lens=step.common.seq_lens - 6 + token,
            ),
        )
        output = decode(alone, cpu)
        assert torch.equal(output.out[0], block.out[token]), token
        assert torch.equal(output.lse[0], block.lse[token]), token


@given(
    seq_len=st.integers(1, 120),
    world=st.integers(1, 4),
    interleave=st.integers(1, 3),
    seed=st.integers(0, 99),
)
@settings(max_examples=30)
def test_the_ranks_of_a_group_merge_to_the_whole(
    make_step, cpu, seq_len, world, interleave, seed
):
    form = {"q_dtype": "fp32", "kv_dtype": "fp32", "out_dtype": "fp32"}
    step = make_step(seq_lens=(seq_len,), page_size=1, seed=seed, **form)
    pages = step.common.block_table_tensor[0, :seq_len]
    tokens = torch.arange(seq_len)
    outs, lses = [], []
    for rank in range(world):
        dcp = Dcp(world=world, rank=rank, interleave=interleave)
        table = torch.full((1, seq_len), -1, dtype=torch.int32)
        held = pages[(tokens // interleave) % world == rank]
        table[0, : held.shape[0]] = held
        local = replace(
            step,
            problem=replace(step.problem, dcp=dcp),
            common=replace(
                step.common,
                block_table_tensor=table,
                dcp_local_seq_lens=local_seq_lens(step.common.seq_lens, dcp),
            ),
        )
        output = decode(local, cpu)
        outs.append(output.out)
        lses.append(output.lse)
    lse = torch.stack(lses)
    weights = torch.exp(lse - lse.logsumexp(0))[..., None]
    truth, _ = step.truth()
    merged = (torch.stack(outs) * weights).sum(0).double()
    assert torch.allclose(merged, truth, atol=1e-5)


def test_interleaved_builders_give_what_each_gives_alone(make_step, cpu):
    steps = [
        make_step(seq_lens=(600, 9), query_len=4, causal=True),
        make_step(seq_lens=(70, 30), query_len=4, causal=False, seed=1),
    ]
    builders = [backend.builder_cls(step.problem, cpu) for step in steps]
    alone = [decode(step, cpu).out for step in steps]
    for order in ((0, 1), (1, 0)):
        made = {who: builders[who].build(steps[who].common) for who in order}
        for who in reversed(order):
            step = steps[who]
            output = backend.forward(step.q, step.kv_cache, made[who], **step.arguments)
            assert torch.equal(output.out, alone[who])


def test_never_holds_a_copy_of_a_requests_whole_cache(make_step, cpu):
    step = make_step(seq_lens=(8192,), page_size=64, heads=1)
    metadata = backend.builder_cls(step.problem, cpu).build(step.common)
    with torch.profiler.profile(profile_memory=True) as profile:
        backend.forward(step.q, step.kv_cache, metadata, **step.arguments)
    largest = max(event.self_cpu_memory_usage for event in profile.events())
    assert 0 < largest < 8192 * 576 * 2 // 2


@pytest.mark.parametrize("out_dtype", ["bf16", "fp32"])
def test_walks_every_key_once_whatever_the_block(
    make_step, cpu, monkeypatch, out_dtype
):
    walked = []
    gather = PieceReader.gather

    def counting(self, spans):
        walked.extend(end - begin for _, begin, end in spans)
        return gather(self, spans)

    monkeypatch.setattr(PieceReader, "gather", counting)
    lens = (4700, 2300, 900, 30)
    for causal in (True, False):
        walked.clear()
        step = make_step(seq_lens=lens, query_len=8, causal=causal, out_dtype=out_dtype)
        decode(step, cpu)
        assert sum(walked) == sum(lens)
        assert max(walked) <= 2048


def test_declares_what_it_serves(cpu):
    problem = DecodeProblem(
        num_q_heads=128, query_lens={1, 32}, masks=frozenset(Mask), page_size=7
    )
    assert backend.refusals(problem, cpu) == []
    assert backend.supports_non_causal(cpu)
    assert not backend.supports_non_causal(DeviceInfo.assume("gfx1100"))
    cost = backend.cost(problem, cpu)
    assert isinstance(cost, Cost)
    assert (cost.kv_walks, cost.rows) == (1, 32 * 128)
    assert backend.evidence(cpu) == "reference"
    graphs = replace(problem, graphs=True)
    assert [r.code.value for r in backend.refusals(graphs, cpu)] == ["feature"]
