"""What the report says of limits: the backend's own answers, shape by shape."""

from dataclasses import replace

from mla_decode.capability import Capability
from mla_decode.device import DeviceInfo
from mla_decode.mask import Mask
from mla_decode.problem import DecodeProblem
from mla_decode.reference import ReferenceBackend
from mla_decode_contract.declaration import (
    GRID_HEADS,
    GRID_QUERY_LENS,
    declaration,
)

CPU = DeviceInfo.assume("cpu")


def _with_row(**changes):
    row = replace(ReferenceBackend.capability.row("cpu"), **changes)
    made = ReferenceBackend()
    made.capability = Capability(rows=(row,))
    return made


def test_every_shape_is_asked_once_and_one_token_is_causal():
    found = declaration(ReferenceBackend(), CPU)
    shapes = [(c["num_q_heads"], c["query_len"], c["mask"]) for c in found["cells"]]
    assert len(set(shapes)) == len(shapes)
    blocks = 2 * len(GRID_QUERY_LENS) - 1
    assert len(shapes) == len(GRID_HEADS) * blocks
    assert {mask for _, q, mask in shapes if q == 1} == {"causal"}
    assert all(cell["refused"] == [] for cell in found["cells"])


def test_refusals_carry_their_codes_and_limits_their_form():
    backend = _with_row(
        num_q_heads=frozenset({32, 16}), query_lens={Mask.CAUSAL: range(1, 5)}
    )
    found = declaration(backend, CPU)
    cells = {
        (c["num_q_heads"], c["query_len"], c["mask"]): c["refused"]
        for c in found["cells"]
    }
    assert cells[16, 4, "causal"] == []
    assert cells[16, 5, "causal"] == ["query_len"]
    assert cells[16, 2, "non_causal"] == ["mask"]
    assert cells[64, 2, "non_causal"] == ["mask", "num_heads"]
    assert found["row"]["num_q_heads"] == [16, 32]
    assert found["row"]["query_lens"] == {"causal": {"first": 1, "last": 4, "step": 1}}
    assert found["base"]["num_q_heads"] == 16


def test_a_check_that_raises_is_an_answer_too():
    backend = ReferenceBackend()
    whole = backend.refusals

    def refusals(problem, device):
        if problem.num_q_heads == 64:
            raise KeyError("a defect")
        return whole(problem, device)

    backend.refusals = refusals
    found = declaration(backend, CPU)
    codes = {c["num_q_heads"]: c["refused"] for c in found["cells"]}
    assert codes[64] == ["checker_error"]
    assert codes[32] == []


def test_a_backend_that_accepts_nothing_has_limits_and_no_cells():
    backend = ReferenceBackend()
    problem = DecodeProblem(num_q_heads=16)
    reasons = backend.refusals(problem, DeviceInfo.assume("gfx1100"))
    assert reasons
    backend.refusals = lambda *_: reasons
    found = declaration(backend, CPU)
    assert (found["base"], found["cells"]) == (None, [])
    assert found["row"]["arch"] == "cpu"


def test_without_a_row_there_is_no_declaration():
    assert declaration(ReferenceBackend(), DeviceInfo.assume("gfx1100")) is None
