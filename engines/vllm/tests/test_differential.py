"""Our AITER adapter beside vLLM's own, argument by argument, on drawn batches.

Everything that vLLM 0.33 hands to AITER is what the adapter hands, except for the rows of
`DIFFERENCES`, each of which docs/vllm.md gives with its reason.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = os.environ.get("MLA_DECODE_VLLM_SOURCE")
COMPARE = Path(__file__).parent / "differential" / "compare.py"
PAGE = Path(__file__).parents[3] / "docs" / "vllm.md"
COUNT = 150
SCHEDULE = (
    "mla_decode_fwd.work_meta_data",
    "mla_decode_fwd.work_indptr",
    "mla_decode_fwd.work_info_set",
    "mla_decode_fwd.reduce_indptr",
    "mla_decode_fwd.reduce_final_map",
    "mla_decode_fwd.reduce_partial_map",
    "mla_decode_fwd.num_kv_splits_indptr",
    "get_mla_metadata_v1",
)


def always(case):
    del case
    return True


def has_bf16_cache(case):
    return case["kv"] == "bf16"


def has_pads(case):
    return case["pads"] > 0


def has_one_token_pads(case):
    return case["pads"] > 0 and case["q"] == 1


def is_long_verify_of_few_heads(case):
    few = case["heads"] < 16 and case["kv"] == "bf16"
    return few and case["causal"] and case["q"] > 4


DIFFERENCES = {
    "mla_decode_fwd.num_kv_splits": always,
    "mla_decode_fwd.q_scale": has_bf16_cache,
    "mla_decode_fwd.kv_scale": has_bf16_cache,
    "mla_decode_fwd.kv_indptr": has_pads,
    "mla_decode_fwd.kv_indices": has_pads,
    "get_mla_metadata_v1.seqlens_kv_indptr": has_pads,
    "mla_decode_fwd.qo_indptr": has_one_token_pads,
    "get_mla_metadata_v1.seqlens_qo_indptr": has_one_token_pads,
    "get_mla_metadata_v1.uni_seqlen_qo": has_one_token_pads,
    **dict.fromkeys(SCHEDULE, is_long_verify_of_few_heads),
}

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        SOURCE is None,
        reason="needs vLLM 0.33's Python: run `nox -s engine_vllm`, which fetches it",
    ),
]


@pytest.fixture(scope="module")
def compared():
    done = subprocess.run(
        [sys.executable, str(COMPARE), "7", str(COUNT)],
        env={**os.environ, "PYTHONPATH": SOURCE, "VLLM_TARGET_DEVICE": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_arguments_differ_only_where_the_page_says_so(compared):
    unlisted = [
        (name, line["case"], pair)
        for line in compared
        for name, pair in line["differs"].items()
        if name not in DIFFERENCES or not DIFFERENCES[name](line["case"])
    ]
    assert unlisted == []


def test_most_batches_are_served_by_both_and_the_rest_by_neither(compared):
    served = [line for line in compared if line["served"]]
    assert len(served) > 0.9 * COUNT
    refused = [line["case"] for line in compared if not line["served"]]
    assert refused
    for case in refused:
        assert (case["kv"], case["q"], case["causal"]) == ("fp8", 2, False)


def test_batches_of_both_masks_without_pads_agree_but_for_the_splits(compared):
    masks = {
        line["case"]["causal"]
        for line in compared
        if line["differs"].keys() == {"mla_decode_fwd.num_kv_splits"}
    }
    assert masks == {True, False}


def test_page_lists_every_difference():
    text = PAGE.read_text(encoding="utf-8")
    names = {name.rpartition(".")[2] for name in DIFFERENCES}
    assert {name for name in names if f"`{name}`" not in text} == set()
