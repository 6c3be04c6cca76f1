"""All codes of an fp8 cache as the kernels widen them."""

import pytest
import torch
from hopper_simulator.assembly import run_packed


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_code_becomes_its_value(dtype):
    from mla_decode_triton.hopper import widening

    assembly = widening.TO_BF16 if dtype == torch.bfloat16 else widening.TO_FP16
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    widened = run_packed(assembly.value, codes, dtype)
    finite = ~codes.float().isnan()
    assert finite.sum() == 254
    expected = codes[finite].float()
    assert torch.equal(widened[finite].float(), expected)
    assert torch.equal(widened[finite].signbit(), expected.signbit())
