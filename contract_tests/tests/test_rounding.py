"""The unit of error: as large as honest rounding, far smaller than a fault."""

import pytest
import torch

from mla_decode.device import DeviceInfo
from mla_decode.dtypes import torch_dtype
from mla_decode_contract.call import Result, check, units_apart
from mla_decode_contract.context import CaseContext
from mla_decode_contract.rounding import lse_units, out_units, rounded_decode
from mla_decode_contract.scene import draw_scene
from mla_decode_contract.violations import ValueViolation


def _context(reference):
    return CaseContext(
        case_id="a test", backend=reference, device=DeviceInfo.assume("sm_90")
    )


def _scene(reference, pair, lens=(20, 300), **kwargs):
    ctx = _context(reference)
    problem = ctx.problem(dtypes=pair, query_lens=(2,))
    return draw_scene(ctx, problem, lens, **kwargs)


def _as_result(scene, out, lse):
    dtype = torch_dtype(scene.problem.out_dtype, scene.ctx.device)
    return Result(out=out.to(dtype), lse=lse.float())


@pytest.mark.parametrize(
    "pair", [("bf16", "bf16"), ("fp16", "fp16"), ("bf16", "fp8"), ("fp8", "fp8")]
)
def test_a_kernel_that_only_rounds_is_within_a_unit(reference, pair):
    scene = _scene(reference, pair)
    check(scene, _as_result(scene, *rounded_decode(scene)))
    assert max(m.units for m in scene.ctx.measurements) <= 1.0


@pytest.mark.parametrize("pair", [("bf16", "bf16"), ("fp16", "fp16"), ("bf16", "fp8")])
@pytest.mark.parametrize("lens", [(10,), (300,)])
def test_a_key_too_few_is_outside_the_budget(reference, pair, lens):
    scene = _scene(reference, pair, lens)
    short = torch.tensor([n - 1 for n in lens])
    with pytest.raises(ValueViolation, match="units of the dtype's own rounding"):
        check(scene, _as_result(scene, *scene.truth(seq_lens=short)))


def test_a_forgotten_fp8_scale_is_outside_the_budget(reference):
    scene = _scene(reference, ("fp8", "fp8"))
    for name in ("q_scale", "kv_scale"):
        with pytest.raises(ValueViolation):
            check(scene, _as_result(scene, *scene.truth(**{name: 1.0})))


def test_another_softmax_scale_is_outside_the_budget(reference):
    scene = _scene(reference, ("bf16", "bf16"))
    with pytest.raises(ValueViolation):
        check(scene, _as_result(scene, *scene.truth(softmax_scale=576**-0.5)))


def test_a_nan_is_never_within_the_budget(reference):
    scene = _scene(reference, ("bf16", "bf16"))
    out, lse = scene.truth()
    out[0, 0, 0] = torch.nan
    with pytest.raises(
        ValueViolation, match="1 of 64 rows are wrong; 1 of them hold NaN"
    ):
        check(scene, _as_result(scene, out, lse))


def test_a_missing_lse_is_a_violation(reference):
    scene = _scene(reference, ("bf16", "bf16"))
    out, _ = scene.truth()
    with pytest.raises(ValueViolation, match="lse is None"):
        check(scene, Result(out=out.to(torch.bfloat16), lse=None))


def test_an_empty_row_must_be_exact(reference):
    scene = _scene(reference, ("bf16", "bf16"), (0, 20))
    out, lse = scene.truth()
    out[0] = 1e-20
    with pytest.raises(ValueViolation, match="rows without a key"):
        check(scene, _as_result(scene, out, lse))


def test_units_are_at_least_half_a_last_place():
    truth = torch.full((1, 1, 512), 3.0, dtype=torch.float64)
    assert float(out_units(truth, truth, 2.0**-7)) == 3.0 * 2.0**-8
    lse = torch.tensor([[-torch.inf, 0.0]], dtype=torch.float64)
    assert lse_units(lse, lse)[0, 1] == 2.0**-18


def test_the_scene_poisons_what_must_not_be_read(reference):
    scene = _scene(reference, ("fp8", "fp8"), (3,), num_pads=1)
    assert scene.q[2:].float().isnan().all()
    assert scene.kv_cache.float().isnan().any(-1).sum() > 0
    assert (scene.common.block_table_tensor[0, 1:] == -1).all()
    assert scene.common.block_table_tensor.stride(0) > scene.problem.table_width


def test_units_apart_sees_the_mask(reference):
    scene = _scene(reference, ("bf16", "bf16"), (10,))
    out, _ = scene.truth()
    other, _ = scene.truth(causal=False)
    assert units_apart(scene, out, other) > 40
    assert units_apart(scene, out, out) == 0
