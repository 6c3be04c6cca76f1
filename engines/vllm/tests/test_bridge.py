"""The bridge's pieces on vLLM's own classes, without an engine."""

import inspect
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from mla_decode import ArgumentError, BackendRefused, Mask, MaskError
from mla_decode_vllm.decoders import Decoders
from mla_decode_vllm.problem import Group, cache_word, draft_blocks

pytest.importorskip("vllm", reason="run by `nox -s engine_vllm`")

from vllm.model_executor.layers.attention.mla_attention import MLACommonMetadata
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from mla_decode_vllm import register
from mla_decode_vllm.builder import BridgedMetadataBuilder
from mla_decode_vllm.platforms.cpu import CpuBackend


def config(method=None, tokens=0, dtype=torch.bfloat16):
    speculative = method and SimpleNamespace(
        method=method, num_speculative_tokens=tokens
    )
    return SimpleNamespace(
        speculative_config=speculative,
        scheduler_config=SimpleNamespace(max_num_seqs=8),
        model_config=SimpleNamespace(dtype=dtype, max_model_len=256),
    )


def group(*, has_drafts=False, is_draft_only=False, vllm_config=None, **spec):
    spec = {"dtype": torch.bfloat16, "block_size": 64, "cache_dtype_str": "auto"} | spec
    return Group(
        vllm_config=vllm_config or config("dflash", 6),
        spec=SimpleNamespace(**spec),
        has_drafts=has_drafts,
        is_draft_only=is_draft_only,
        num_q_heads=16,
        threshold=7,
        dcp=None,
        has_graphs=False,
        quantises_query=True,
    )


@pytest.mark.parametrize(
    ("method", "tokens", "blocks"),
    [("dflash", 6, {7}), ("dspark", 6, {6, 7}), (None, 0, {1})],
)
def test_draft_blocks_are_the_drafters(method, tokens, blocks):
    assert draft_blocks(config(method, tokens)) == blocks


def test_a_group_names_every_block_that_vllm_decodes():
    problems = group(has_drafts=True).problems()
    assert problems[Mask.CAUSAL].query_lens == set(range(1, 8))
    assert problems[Mask.NON_CAUSAL].query_lens == {7}
    assert set(group().problems()) == {Mask.CAUSAL}


def test_dtypes_are_the_groups_and_not_the_runs():
    problem = group(dtype=torch.uint8, cache_dtype_str="fp8").problems()[Mask.CAUSAL]
    assert (problem.q_dtype, problem.kv_dtype, problem.out_dtype) == (
        "fp8",
        "fp8",
        "bf16",
    )
    assert group().problems()[Mask.CAUSAL].kv_dtype == "bf16"


@pytest.mark.parametrize("name", ["fp8_e5m2", "fp8_ds_mla", "int8"])
def test_refuses_a_cache_that_the_contract_does_not_have(name):
    with pytest.raises(ArgumentError, match="cache"):
        cache_word(name, "bf16")


def test_registers_once_and_again(monkeypatch):
    monkeypatch.delenv("MLA_DECODE_VLLM", raising=False)
    member = AttentionBackendEnum.CPU_MLA
    try:
        register()
        register()
        assert member.get_class() is CpuBackend
    finally:
        member.clear_override()


def test_off_registers_nothing(monkeypatch):
    monkeypatch.setenv("MLA_DECODE_VLLM", "off")
    register()
    assert not AttentionBackendEnum.CPU_MLA.is_overridden()


@pytest.mark.parametrize("with_bound", [False, True])
def test_takes_the_seven_parameters_and_the_eight(with_bound):
    parameters = inspect.signature(BridgedMetadataBuilder._build_decode).parameters
    stock = {
        "self",
        "block_table_tensor",
        "seq_lens_device",
        "max_seq_len",
        "query_start_loc_cpu",
        "query_start_loc_device",
        "num_decode_tokens",
        "dcp_tot_seq_lens_device",
    } | ({"max_query_len"} if with_bound else set())
    required = {n for n, p in parameters.items() if p.default is p.empty}
    assert required <= stock <= set(parameters)


@pytest.fixture
def builder():
    """A drafter's builder with what vLLM's constructor would read off an engine."""
    made = object.__new__(BridgedMetadataBuilder)
    drafts = group(has_drafts=True, is_draft_only=True)
    vars(made).update(
        decoders=Decoders(drafts, torch.device("cpu"), ["model.layers.2.attn"]),
        reorder_batch_threshold=7,
        non_causal_multi_token_decode=True,
        use_pcp=False,
        dcp_world_size=1,
        metadata_cls=MLACommonMetadata,
        model_config=SimpleNamespace(get_head_size=lambda: 576),
        page_size=64,
        device=torch.device("cpu"),
    )
    return made


def batch(query_lens, causal, *, tokens=None):
    starts = torch.tensor([0, *query_lens], dtype=torch.int32).cumsum(0).int()
    reqs = len(query_lens)
    return CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=torch.tensor([50 if q else 0 for q in query_lens], dtype=torch.int32),
        num_reqs=reqs,
        num_actual_tokens=sum(query_lens) if tokens is None else tokens,
        max_query_len=max(query_lens) or 7,
        max_seq_len=50,
        block_table_tensor=torch.arange(4 * reqs, dtype=torch.int32).view(reqs, 4),
        slot_mapping=torch.zeros(16, dtype=torch.int64),
        causal=causal,
    )


@pytest.mark.parametrize("causal", [False, np.False_, torch.tensor(False)])
def test_every_form_of_the_flag_is_one_mask(builder, causal):
    metadata = builder.build(0, batch([7, 7], causal))
    plan = metadata.decode.plan
    assert (metadata.causal, plan.causal, plan.query_len) == (False, False, 7)


@pytest.mark.parametrize("causal", [None, 0, torch.tensor([True, False])])
def test_a_flag_that_names_no_mask_is_refused_and_not_guessed(builder, causal):
    with pytest.raises(MaskError):
        builder.build(0, batch([7, 7], causal))


def test_a_causal_step_reaches_a_group_of_drafts_alone(builder):
    plan = builder.build(0, batch([3, 3], causal=True)).decode.plan
    assert (plan.causal, plan.query_len) == (True, 3)


def test_an_idle_rank_s_batch_of_pads_is_served_non_causal(builder):
    metadata = builder.build(0, batch([0, 0], causal=False, tokens=14))
    plan = metadata.decode.plan
    assert (metadata.causal, plan.causal, plan.query_len) == (False, False, 7)


def test_pads_at_the_tail_keep_the_block(builder):
    plan = builder.build(0, batch([7, 0], causal=False, tokens=14)).decode.plan
    assert (plan.query_len, plan.num_decode_tokens) == (7, 14)


def test_a_non_causal_block_that_was_not_named_is_refused(builder):
    with pytest.raises(BackendRefused, match="outside the problem"):
        builder.build(0, batch([5, 5], causal=False))


def test_a_ragged_non_causal_batch_is_refused_by_vllm(builder):
    with pytest.raises(ValueError, match="uniform query block"):
        builder.build(0, batch([7, 6], causal=False))
