"""All codes of an fp8 cache as the kernels widen them."""

import pytest
import torch
from hopper_simulator.assembly import run_packed


def all_codes():
    return torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)


def require_values(widened, codes):
    finite = ~codes.float().isnan()
    assert finite.sum() == 254
    expected = codes.float()[finite]
    assert torch.equal(widened.float()[finite], expected)
    assert torch.equal(widened.float()[finite].signbit(), expected.signbit())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_code_becomes_its_value(dtype):
    from mla_decode_triton.hopper import widening

    assembly = widening.TO_BF16 if dtype == torch.bfloat16 else widening.TO_FP16
    require_values(run_packed(assembly.value, all_codes(), dtype), all_codes())


def test_every_code_becomes_its_value_but_for_the_unit():
    from mla_decode_triton.hopper import widening

    low = run_packed(widening.TO_LOW_BF16.value, all_codes(), torch.bfloat16)
    require_values(low.double() / widening.UNIT.value, all_codes())


@pytest.mark.parametrize("second", [False, True])
def test_codes_of_pairs_become_their_values_but_for_the_unit(second):
    from mla_decode_triton.hopper import widening

    pairs = torch.arange(65536).to(torch.uint16).view(torch.int16)
    assembly = widening.SECOND_TO_LOW_BF16 if second else widening.FIRST_TO_LOW_BF16
    values = run_packed(assembly.value, pairs, torch.bfloat16)
    codes = pairs.view(torch.float8_e4m3fn)[int(second) :: 2].double()
    finite = ~codes.isnan()
    assert torch.equal(values.double()[finite] / widening.UNIT.value, codes[finite])


@pytest.mark.cuda
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_code_becomes_its_value_on_a_device(dtype):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs an sm_90 GPU")
    from hopper_codes import widen_codes

    values = torch.empty(256, dtype=dtype, device="cuda")
    widen_codes[(1,)](all_codes().cuda(), values, num_warps=1)
    require_values(values.cpu(), all_codes())
