import pytest

from mla_decode import Capability, CapabilityRow, Dcp, DecodeProblem, DeviceInfo, Mask
from mla_decode.capability import Feature, Source, Support, describe

ROW = CapabilityRow(
    arch="gfx950",
    dtypes=frozenset({("bf16", "bf16"), ("fp8", "fp8"), ("bf16", "fp8")}),
    out_dtypes=frozenset({"bf16"}),
    page_sizes=frozenset({1, 64}),
    num_q_heads=range(16, 129, 16),
    query_lens={Mask.CAUSAL: range(1, 5), Mask.NON_CAUSAL: frozenset({4, 8})},
    features={Feature.LSE: Support.YES, Feature.DCP: Support.HARDWARE_CANNOT},
    source=Source.MANIFEST,
    max_num_reqs=512,
    max_model_len=65536,
)
CAPABILITY = Capability(rows=(ROW,))
GFX950 = DeviceInfo.assume("gfx950")


def refusals(**fields):
    problem = DecodeProblem(**{"num_q_heads": 16, **fields})
    return CAPABILITY.refusals(problem, GFX950)


def test_accepts_what_lies_inside_a_row():
    assert refusals() == []
    assert refusals(query_lens={4}, masks=frozenset(Mask), needs_lse=True) == []


def test_an_architecture_without_a_row_is_one_refusal():
    problem = DecodeProblem(num_q_heads=16)
    (reason,) = CAPABILITY.refusals(problem, DeviceInfo.assume("gfx942"))
    assert (reason.code.value, reason.got, reason.allowed) == (
        "arch",
        "gfx942",
        "gfx950",
    )
    assert "has gfx942 among its architectures" in reason.fix


def test_on_a_cpu_the_advice_is_the_reference_or_an_assumed_architecture():
    problem = DecodeProblem(num_q_heads=16)
    (reason,) = CAPABILITY.refusals(problem, DeviceInfo.assume("cpu"))
    assert reason.fix.startswith("use reference, or assume")
    assert "triton_mla" not in reason.fix


@pytest.mark.parametrize(
    ("fields", "code", "got", "allowed"),
    [
        ({"q_dtype": "fp16"}, "dtype", "fp16", "bf16, fp8"),
        ({"kv_dtype": "fp16"}, "kv_dtype", "fp16", "bf16, fp8"),
        ({"q_dtype": "fp8"}, "kv_dtype", "bf16", "fp8"),
        ({"out_dtype": "fp32"}, "dtype", "fp32", "bf16"),
        ({"page_size": 16}, "page_size", "16", "1, 64"),
        ({"num_q_heads": 17}, "num_heads", "17", "16..128 step 16"),
        ({"max_num_reqs": 513}, "feature", "max_num_reqs=513", "max_num_reqs <= 512"),
        ({"max_model_len": 65537}, "feature", "max_model_len=65537", "<= 65536"),
        ({"query_lens": {5}}, "query_len", "5", "1..4"),
        (
            {"query_lens": {3}, "masks": {Mask.NON_CAUSAL}},
            "query_len",
            "3",
            "4, 8",
        ),
        ({"graphs": True}, "feature", "graphs", "lse"),
        ({"kv_page_stride": 40000}, "feature", "page_stride", "lse"),
        ({"max_splits": 4}, "feature", "split_cap", "lse"),
        ({"batch_invariant": True}, "determinism", "batch_invariance", "lse"),
    ],
)
def test_refuses_one_field_with_what_was_asked_and_what_is_allowed(
    fields, code, got, allowed
):
    (reason,) = refusals(**fields)
    assert reason.code.value == code
    assert reason.got == got
    assert allowed in reason.allowed
    assert reason.fix


def test_a_head_count_is_refused_with_the_width_that_it_may_be_padded_to():
    (reason,) = refusals(num_q_heads=17)
    assert "pads to 32 heads (1.88 times the rows)" in reason.fix
    (reason,) = refusals(num_q_heads=129)
    assert "pads" not in reason.fix


def test_collects_every_reason_and_not_the_first():
    found = refusals(
        q_dtype="fp16", out_dtype="fp32", page_size=2, num_q_heads=1, graphs=True
    )
    assert [reason.code.value for reason in found] == [
        "dtype",
        "dtype",
        "page_size",
        "num_heads",
        "feature",
    ]


def test_a_causal_block_under_dcp_is_refused_whatever_the_row_says():
    found = refusals(dcp=Dcp(world=2), query_lens={4})
    assert [reason.code.value for reason in found] == ["dcp", "dcp"]
    assert "hardware_cannot" in found[0].message
    assert "rank-local" in found[1].message
    assert [r.code.value for r in refusals(dcp=Dcp(world=2))] == ["dcp"]


def test_a_mask_without_kernels_is_named_for_each_block():
    causal = Capability(
        rows=(
            CapabilityRow(
                arch="sm_90",
                dtypes=frozenset({("bf16", "bf16")}),
                out_dtypes=frozenset({"bf16"}),
                page_sizes=frozenset({64}),
                num_q_heads=frozenset(),
                query_lens={Mask.CAUSAL: range(1, 9)},
            ),
        )
    )
    problem = DecodeProblem(
        num_q_heads=16, query_lens={1, 4, 8}, masks={Mask.NON_CAUSAL}, needs_lse=True
    )
    found = causal.refusals(problem, DeviceInfo.assume("sm_90"))
    assert [r.code.value for r in found] == ["num_heads", "mask", "mask", "lse"]
    assert found[0].allowed == "none"
    assert found[1].allowed == "causal"
    assert "not_implemented" in found[3].message
    assert causal.archs == ("sm_90",)


def test_a_row_cannot_be_changed():
    with pytest.raises(TypeError):
        ROW.features[Feature.GRAPHS] = Support.YES


def test_describes_sets_for_people():
    assert describe(range(1, 9)) == "1..8"
    assert describe(range(0)) == "none"
    assert describe(frozenset({2, 1})) == "1, 2"
    assert describe([]) == "none"
