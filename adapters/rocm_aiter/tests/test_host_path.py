"""What the adapter's own host side asks of torch: operators counted, AITER stilled."""

from dataclasses import replace

import pytest
import torch
from aiter_steps import Step, device_of, problem_of

from mla_decode_rocm_aiter import backend


@pytest.mark.parametrize("graphs", [False, True])
def test_a_build_cuts_no_buffer_twice(operators, graphs):
    problem = problem_of(16, 4, graphs=graphs)
    builder = backend.builder_cls(problem, device_of())
    builder.library = replace(builder.library, build_metadata=lambda *_, **__: None)
    common = Step(problem, device_of(), [40, 9]).common
    common = replace(
        common,
        block_table_tensor=common.block_table_tensor[:, : problem.table_width].clone(),
    )
    builder.build(common)
    copies = ["_foreach_copy_"] if graphs else []
    assert operators(lambda: builder.build(common)) == [
        "equal",
        *copies,
        "cumsum",
        "expand_pages",
        "view",
        "le",
    ]


@pytest.mark.parametrize("needs_lse", [False, True])
def test_a_forward_fixes_each_output_with_one_kernel(operators, needs_lse):
    problem = problem_of(16, 4, needs_lse=needs_lse)
    builder = backend.builder_cls(problem, device_of())
    step = Step(problem, device_of(), [40, 9])
    lse = torch.zeros(8, 16)
    builder.library = replace(builder.library, decode=lambda **_: (None, lse))
    metadata = builder.build(step.common)
    step.decode(metadata)
    found = operators(lambda: step.decode(metadata))
    views = [name for name in found if name in {"view", "slice", "alias"}]
    makes = {"view", "slice", "alias", "empty", "full"}
    per_lse = ["copy_", "masked_fill_"] if needs_lse else []
    assert [name for name in found if name not in makes] == ["masked_fill_", *per_lse]
    assert len(views) == 3 + 2 * needs_lse
