"""The builder: frozen signature, final build, mask and state of the ubatch."""

import inspect
from dataclasses import replace

import numpy as np
import pytest
import torch

from mla_decode import (
    ArgumentError,
    BackendRefused,
    BatchError,
    Dcp,
    GraphSupport,
    Mask,
    MaskError,
    MLADecodeMetadataBuilder,
    QueryLenSupport,
    StaleMetadataError,
)
from mla_decode.builder import BUILD_DECODE_PARAMETERS


def test_the_signature_is_frozen_at_seven_parameters_without_a_mask():
    parameters = inspect.signature(MLADecodeMetadataBuilder._build_decode).parameters
    assert tuple(parameters) == (
        "self",
        "block_table_tensor",
        "seq_lens_device",
        "max_seq_len",
        "query_start_loc_cpu",
        "query_start_loc_device",
        "num_decode_tokens",
        "dcp_tot_seq_lens_device",
    )
    assert tuple(parameters) == BUILD_DECODE_PARAMETERS


def test_a_subclass_cannot_add_a_parameter(plain_builder):
    with pytest.raises(TypeError, match="state on the builder's instance"):

        class Masked(plain_builder):
            def _build_decode(self, block_table_tensor, causal):
                raise NotImplementedError


@pytest.mark.parametrize("name", ["build", "build_for_capture"])
def test_a_subclass_cannot_override_a_final_method(plain_builder, name):
    with pytest.raises(TypeError, match="final method"):
        type("Own", (plain_builder,), {name: plain_builder.build})


def test_the_class_attributes_default_to_the_least():
    cls = MLADecodeMetadataBuilder
    assert cls.query_len_support is QueryLenSupport.SINGLE
    assert cls.graph_support is GraphSupport.NEVER
    assert cls.supports_non_causal_multi_token_decode is False
    assert cls.supports_non_causal_multi_token_dcp is False
    assert cls.host_reads_lengths is False
    assert (
        GraphSupport.NEVER
        < GraphSupport.SINGLE_TOKEN
        < GraphSupport.UNIFORM_BATCH
        < GraphSupport.ALWAYS
    )


@pytest.mark.parametrize(
    "causal", [True, False, np.bool_(False), torch.tensor([False, False])]
)
def test_build_records_the_mask_and_block_before_the_adapter_sees_them(
    make_step, plain_builder, cpu, causal
):
    step = make_step(seq_lens=(9, 9), query_len=4).with_common(causal=causal)
    builder = plain_builder(step.problem, cpu)
    metadata = builder.build(step.common)
    expected = bool(torch.as_tensor(causal).all())
    assert metadata.causal is metadata.decode_causal is builder._decode_causal
    assert metadata.causal is expected
    assert metadata.decode_query_len == metadata.query_len == 4
    assert metadata.mask is (Mask.CAUSAL if expected else Mask.NON_CAUSAL)


def test_a_mask_that_names_nothing_leaves_the_builder_as_it_was(
    make_step, plain_builder, cpu
):
    step = make_step(seq_lens=(9, 9), query_len=4, causal=False)
    builder = plain_builder(step.problem, cpu)
    metadata = builder.build(step.common)
    for spoilt in ({"causal": None}, {"num_reqs": 0}):
        with pytest.raises((MaskError, BatchError)):
            builder.build(replace(step.common, **spoilt))
    assert builder._decode_causal is False
    assert metadata.require_current() is builder


def test_the_adapter_gets_uniform_blocks_pads_included(make_step, plain_builder, cpu):
    step = make_step(seq_lens=(9, 9), query_len=4, pads=2)
    metadata = plain_builder(step.problem, cpu).build(step.common)
    expected = [0, 4, 8, 12, 16]
    assert metadata.query_start_loc.tolist() == expected
    assert metadata.handed["query_start_loc_cpu"].tolist() == expected
    assert metadata.num_decode_tokens == 16


def test_the_adapter_gets_a_ragged_batch_as_it_is(make_step, plain_builder, cpu):
    varlen = type("V", (plain_builder,), {"query_len_support": QueryLenSupport.VARLEN})
    step = make_step(seq_lens=(9, 9), query_lens=(4, 1), pads=1)
    builder = varlen(step.problem, cpu)
    metadata = builder.build(step.common)
    assert metadata.query_start_loc.tolist() == [0, 4, 5, 5]
    assert (metadata.query_len, metadata.num_decode_tokens) == (0, 6)


def test_the_table_is_cut_to_the_batch(make_step, plain_builder, cpu):
    step = make_step(seq_lens=(9, 9))
    taller = torch.cat([step.common.block_table_tensor] * 3)
    metadata = plain_builder(step.problem, cpu).build(
        replace(step.common, block_table_tensor=taller)
    )
    assert metadata.block_table.shape[0] == 2


def test_under_dcp_the_adapter_gets_local_lengths_and_the_totals(
    make_step, plain_builder, cpu
):
    step = make_step(seq_lens=(9, 5), dcp=Dcp(world=2))
    local = torch.tensor([5, 3], dtype=torch.int32)
    metadata = plain_builder(step.problem, cpu).build(
        replace(step.common, dcp_local_seq_lens=local)
    )
    assert metadata.seq_lens.tolist() == [5, 3]
    assert metadata.dcp_tot_seq_lens.tolist() == [9, 5]


def test_a_one_token_block_is_causal_to_a_builder_without_non_causal(
    make_step, plain_builder, cpu
):
    causal_only = type(
        "C", (plain_builder,), {"supports_non_causal_multi_token_decode": False}
    )
    step = make_step(causal=False)
    assert causal_only(step.problem, cpu).build(step.common).causal is True
    assert plain_builder(step.problem, cpu).build(step.common).causal is False


def test_metadata_is_stale_after_a_later_build(make_step, plain_builder, cpu):
    step = make_step(seq_lens=(9, 9))
    builder = plain_builder(step.problem, cpu)
    first = builder.build(step.common)
    assert first.require_current() is builder
    second = builder.build(step.common)
    with pytest.raises(StaleMetadataError) as caught:
        first.require_current()
    assert caught.value.got == "metadata #1, newest #2"
    assert second.require_current() is builder


def test_metadata_that_no_builder_made_is_stale(make_step, plain_builder, cpu):
    step = make_step()
    metadata = plain_builder(step.problem, cpu).build(step.common)
    metadata.builder = None
    with pytest.raises(StaleMetadataError, match="no builder"):
        metadata.require_current()


def test_interleaved_builders_give_what_each_gives_alone(make_step, plain_builder, cpu):
    steps = [
        make_step(seq_lens=(9, 9), query_len=4, causal=True),
        make_step(seq_lens=(7, 5), query_len=4, causal=False),
    ]
    builders = [plain_builder(step.problem, cpu) for step in steps]
    for order in ((0, 1), (1, 0), (0, 0, 1), (1, 0, 1, 0)):
        made = {who: builders[who].build(steps[who].common) for who in order}
        for who, metadata in made.items():
            assert metadata.require_current() is builders[who]
            assert metadata.decode_causal is steps[who].common.causal
            assert metadata.seq_lens.tolist() == steps[who].common.seq_lens.tolist()


@pytest.mark.parametrize("validate", ["all", None, True, ["host"]])
def test_refuses_a_level_of_validation_that_does_not_exist(
    make_step, plain_builder, cpu, validate
):
    with pytest.raises(ArgumentError) as caught:
        plain_builder(make_step().problem, cpu, validate=validate)
    assert caught.value.got == repr(validate)


@pytest.mark.parametrize(
    ("attributes", "fields", "code"),
    [
        ({"supports_non_causal_multi_token_decode": False}, {}, "mask"),
        (
            {"supports_non_causal_multi_token_dcp": False},
            {"dcp": Dcp(world=2)},
            "mask",
        ),
        (
            {"query_len_support": QueryLenSupport.SINGLE},
            {"masks": {Mask.CAUSAL}},
            "query_len",
        ),
        ({"graph_support": GraphSupport.NEVER}, {"graphs": True}, "feature"),
        ({"graph_support": GraphSupport.SINGLE_TOKEN}, {"graphs": True}, "feature"),
        (
            {"graph_support": GraphSupport.NEVER},
            {"graphs": True, "query_lens": {1}},
            "feature",
        ),
    ],
)
def test_refuses_at_construction_what_the_class_does_not_declare(
    make_step, plain_builder, cpu, attributes, fields, code
):
    problem = replace(make_step(query_len=4).problem, **fields)
    with pytest.raises(BackendRefused) as caught:
        type("Less", (plain_builder,), attributes)(problem, cpu)
    assert caught.value.codes == {code}


def test_a_causal_block_under_dcp_never_meets_a_mask_on_local_indices(
    make_step, plain_builder, cpu
):
    problem = make_step(query_len=4, dcp=Dcp(world=2)).problem
    with pytest.raises(BackendRefused) as caught:
        plain_builder(problem, cpu)
    assert caught.value.codes == {"dcp"}
    plain_builder(replace(problem, masks={Mask.NON_CAUSAL}), cpu)
    plain_builder(replace(problem, query_lens={1}), cpu)


def test_single_token_graphs_are_enough_for_single_tokens(make_step, plain_builder):
    single = type("S", (plain_builder,), {"graph_support": GraphSupport.SINGLE_TOKEN})
    step = make_step(graphs=True)
    metadata = single(step.problem, "cpu").build_for_capture(step.common)
    assert metadata.query_len == 1


def test_join_query_keeps_its_buffer(make_step, plain_builder, cpu):
    step = make_step(seq_lens=(9, 9), query_len=2)
    builder = plain_builder(step.problem, cpu)
    nope, rope = step.q[..., :512], step.q[..., 512:]
    joined = builder.join_query(nope, rope)
    assert torch.equal(joined, step.q)
    again = builder.join_query(nope[:1], rope[:1])
    assert again.data_ptr() == joined.data_ptr()
    assert again.shape == (1, 2, 576)
