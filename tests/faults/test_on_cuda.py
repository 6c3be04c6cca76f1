"""Reported faults on an NVIDIA GPU: the same steps, the same truth, the real kernels."""

import pytest
import torch
from fault_steps import CPU, SCALE, Step, decoder_of, problem_of

from mla_decode import detect_device
from mla_decode.backend import DecodeOutput

GPU = "cuda"
DRAFT = {"q": 8, "causal": False, "needs_lse": True}
STEPS = {
    "HEADS-04": ({"heads": 12, "needs_lse": True}, [3, 70], {}),
    "QLEN-01": ({"q": 7}, [40, 100], {}),
    "QLEN-06": ({"q": 4}, [40, 9, 100], {"pads": 2}),
    "QLEN-07": ({"q": 4, "needs_lse": True}, [70, 2], {}),
    "NONCAUSAL-02": (DRAFT, [40], {"causal": False}),
    "NONCAUSAL-06": ({"causal": False}, [40, 3], {"causal": False}),
    "SEQLEN-02": ({"needs_lse": True}, [5], {"pads": 2, "slot": -1}),
    "SEQLEN-03": ({"q": 2}, [9, 70], {"pads": 1}),
    "SEQLEN-04": ({"needs_lse": True}, [0, 7], {}),
    "SEQLEN-07": ({"q": 4, "needs_lse": True}, [], {"pads": 8}),
    "LSE-03": ({"needs_lse": True, "max_model_len": 8192}, [4160, 64], {}),
    "LSE-04": ({"needs_lse": True, "max_model_len": 65536}, [64, 65536], {}),
    "LSE-09": ({"heads": 3, "q": 2, "needs_lse": True}, [9, 70], {}),
    "DTYPE-05": ({"dtypes": "bf16 fp8"}, [9, 70], {}),
}
"""By fault: the problem, the lengths, and what the step has beside them."""


@pytest.mark.fault("HEADS-04", "QLEN-01", "QLEN-06", "QLEN-07", "NONCAUSAL-02")
@pytest.mark.fault("NONCAUSAL-06", "SEQLEN-02", "SEQLEN-03", "SEQLEN-04", "SEQLEN-07")
@pytest.mark.fault("LSE-03", "LSE-04", "LSE-09", "DTYPE-05")
@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_step_on_the_gpu_is_the_truth(fault_id):
    fields, lens, words = STEPS[fault_id]
    problem = problem_of(**fields)
    decoder = decoder_of(problem, ("triton_mla", detect_device(GPU)))
    step = Step(problem, CPU, lens, **words)
    common = step.common
    on_gpu = step.changed(
        query_start_loc=common.query_start_loc.to(GPU),
        seq_lens=common.seq_lens.to(GPU),
        block_table_tensor=common.block_table_tensor.to(GPU),
    )
    found = decoder.run(
        step.q.to(GPU),
        step.kv_cache.to(GPU),
        decoder.plan(on_gpu.common),
        softmax_scale=SCALE,
        **{name: scale.to(GPU) for name, scale in step.scales.items()},
        **{name: buffer.to(GPU) for name, buffer in step.outputs().items()},
    )
    lse = None if found.lse is None else found.lse.cpu()
    step.check(DecodeOutput(found.out.cpu(), lse))
