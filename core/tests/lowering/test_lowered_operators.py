"""What a lowering asks of torch beyond its inner backend: operators counted."""

import torch

from mla_decode import DecodeProblem, Mask


def test_a_fold_adds_three_views(operators, narrow, decoder, batch_of):
    problem = DecodeProblem(
        num_q_heads=4,
        q_dtype="fp32",
        kv_dtype="fp32",
        out_dtype="fp32",
        page_size=16,
        query_lens={4},
        masks={Mask.NON_CAUSAL},
        needs_lse=True,
        max_num_reqs=4,
        max_model_len=128,
    )
    lowered = decoder(narrow({(1, Mask.CAUSAL, 16): 1}), problem)
    assert lowered.selection.plan.kind == "fold"
    common, q, cache = batch_of([9, 40], [4, 4], causal=False)
    mine = torch.ones(2, 16, 512), torch.ones(2, 16)

    def bring(call):
        call.out, call.lse = mine

    lowered.backend.inner._forward = bring
    lowered.plan(common)
    plan = lowered.plan(common)

    def run():
        return lowered.run(q, cache, plan, softmax_scale=0.07)

    assert run().out.data_ptr() == mine[0].data_ptr()
    assert operators(run) == ["view", "view", "view"]
    assert operators(lambda: lowered.plan(common)) == ["equal", "equal"]
