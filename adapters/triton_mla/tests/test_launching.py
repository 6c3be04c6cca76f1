"""The direct launch, interpreted: the front door's own answer, from addresses alone."""

from dataclasses import replace

import pytest
import torch
from triton_steps import SCALE, make_step

from mla_decode import DecodeProblem, DeviceInfo, Mask
from mla_decode_triton import chosen_backend

backend = chosen_backend("portable")
SM_90 = DeviceInfo.assume("sm_90")


def direct_kernels(builder, tensors):
    """Give every launch a direct way that finds the tensors behind the addresses.

    Returns:
        A list that gets the name of each kernel that was launched so.
    """
    known = {tensor.data_ptr(): tensor for tensor in tensors if tensor.numel()}
    taken = []
    bind = builder.launcher.bind

    def directly(kernel, name):
        def launch(*arguments):
            taken.append(name)
            found = (
                known.get(argument, argument) if type(argument) is int else argument
                for argument in arguments
            )
            kernel.by_front_door(*found)

        return replace(kernel, directly=launch)

    def bound(*arguments, **words):
        step = bind(*arguments, **words)
        merge = step.merge and directly(step.merge, "merge")
        return replace(step, decode=directly(step.decode, "decode"), merge=merge)

    builder.launcher.bind = bound
    return taken


def prepare(*, kv_dtype="bf16", needs_lse=True, pair=False, max_splits=None):
    problem = DecodeProblem(
        num_q_heads=3,
        kv_dtype=kv_dtype,
        page_size=16,
        query_lens={2},
        masks=frozenset(Mask),
        needs_lse=needs_lse,
        max_num_reqs=4,
        max_model_len=512,
        max_splits=max_splits,
        graphs=True,
    )
    step = make_step(problem, SM_90, [140, 30, 0], query_len=2, causal=True)
    builder = backend.builder_cls(problem, SM_90)
    builder.partial_out.fill_(torch.nan)
    builder.partial_lse.fill_(torch.nan)
    if pair:
        q = (step.q[..., :512].contiguous(), step.q[..., 512:].contiguous())
    else:
        q = step.q
    return builder, step, q


@pytest.mark.parametrize(
    "words",
    [
        {},
        {"needs_lse": False},
        {"max_splits": 1},
        {"max_splits": 1, "needs_lse": False},
        {"pair": True},
        {"kv_dtype": "fp8"},
    ],
    ids=str,
)
def test_the_direct_launch_gives_the_bits_of_the_front_door(words):
    builder, step, q = prepare(**words)
    arguments = {"softmax_scale": SCALE, "kv_scale": step.kv_scale}
    right = backend.forward(q, step.kv_cache, builder.build(step.common), **arguments)
    out = torch.full_like(right.out, torch.nan)
    lse = None if right.lse is None else torch.full_like(right.lse, torch.nan)
    builder, step, q = prepare(**words)
    first = builder.build(step.common)
    parts = q if isinstance(q, tuple) else (q, q[..., 512:])
    scales = [] if step.kv_scale is None else [step.kv_scale]
    outputs = [out] if lse is None else [out, lse]
    taken = direct_kernels(
        builder,
        [
            *parts,
            *scales,
            *outputs,
            step.kv_cache,
            first.block_table,
            first.seq_lens,
            builder.partial_out,
            builder.partial_lse,
        ],
    )
    builder._steps.clear()
    arguments["kv_scale"] = step.kv_scale
    found = backend.forward(
        q, step.kv_cache, builder.build(step.common), out=out, lse=lse, **arguments
    )
    assert taken == (["decode"] if "max_splits" in words else ["decode", "merge"])
    assert torch.equal(found.out, right.out)
    if lse is not None:
        assert torch.equal(found.lse, right.lse)


def test_what_is_not_aligned_takes_the_front_door():
    builder, step, _ = prepare()
    taken = direct_kernels(builder, [])
    shifted = torch.zeros(step.q.numel() + 1, dtype=step.q.dtype)[1:]
    q = shifted.view(step.q.shape).copy_(step.q)
    assert q.data_ptr() % 16
    backend.forward(q, step.kv_cache, builder.build(step.common), softmax_scale=SCALE)
    assert taken == []


def test_without_a_direct_merge_nothing_is_launched_directly():
    builder, step, q = prepare()
    taken = direct_kernels(builder, [])
    bind = builder.launcher.bind

    def lame(*arguments, **words):
        step = bind(*arguments, **words)
        return replace(step, merge=replace(step.merge, directly=None))

    builder.launcher.bind = lame
    metadata = builder.build(step.common)
    found = backend.forward(q, step.kv_cache, metadata, softmax_scale=SCALE)
    assert taken == []
    assert not found.out.isnan().any()


@pytest.mark.parametrize(("passes_out", "number"), [(False, 2), (True, 0)])
def test_a_forward_makes_its_outputs_and_no_view(operators, passes_out, number):
    builder, step, q = prepare()
    bind = builder.launcher.bind

    def still(*arguments, **words):
        step = bind(*arguments, **words)
        return replace(
            step,
            decode=replace(step.decode, directly=lambda *_: None),
            merge=replace(step.merge, directly=lambda *_: None),
        )

    builder.launcher.bind = still
    metadata = builder.build(step.common)
    outputs = {}
    if passes_out:
        outputs = {
            "out": torch.zeros(6, 3, 512, dtype=torch.bfloat16),
            "lse": torch.zeros(6, 3),
        }

    def forward():
        backend.forward(q, step.kv_cache, metadata, softmax_scale=SCALE, **outputs)

    assert len(operators(forward)) == number
