"""Layers launched by what an earlier one found out, as far as it goes without a GPU."""

import sys
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton.experimental.gluon", reason="needs Triton's Gluon")

from mla_decode import (
    CommonAttentionMetadata,
    DecodeProblem,
    DeviceInfo,
    Mask,
    StaleMetadataError,
)
from mla_decode_triton import chosen_backend
from mla_decode_triton.hopper import boxes, direct, grid, known, launch, variants
from mla_decode_triton.hopper.compat import DriverRun

SCALE = 0.25
NUM_REQS = 3
hopper = chosen_backend("hopper")


class Kernels:
    """The kernels' three ways, which run nothing: Triton's two and the driver's."""

    def __init__(self, monkeypatch):
        self.calls = []
        self.params = {}
        attending = "swap", "swap_fp8", "asym", "asym_fp8"
        for name in ("plan", *attending, "merge", "merge_rows"):
            kernel = getattr(variants, f"{name}_kernel")
            monkeypatch.setattr(variants, f"{name}_kernel", Kernel(self, name, kernel))
        monkeypatch.setattr(direct, "driver_run", self.driver_run)
        for module in (direct, known, launch):
            monkeypatch.setattr(module, "hooks_are_set", lambda: self.is_profiled)
        self.is_profiled = False

    def driver_run(self, compiled, num_boxes):
        def encode(index, box):
            assert index < num_boxes
            return (box.address, box.dtype, tuple(box.shape), tuple(box.strides))

        return DriverRun(
            lambda *given: self.calls.append((compiled.name, "driver", *given)), encode
        )

    def taken(self):
        """The calls of one forward or build, which are forgotten."""
        calls, self.calls = self.calls, []
        return calls

    def ways(self):
        return [call[1] for call in self.taken()]


class Kernel:
    def __init__(self, kernels, name, kernel):
        self.calls, self.name = kernels, name
        self.arg_names, self.params = kernel.arg_names, kernel.params

    def __getitem__(self, grid):
        def by_front_door(*_, **__):
            self.calls.calls.append((self.name, "front door", grid))
            return Compiled(self)

        return by_front_door


class Compiled:
    def __init__(self, kernel):
        self.kernel, self.name = kernel, kernel.name

    def __getitem__(self, grid):
        return lambda *_: self.kernel.calls.calls.append((self.name, "triton", grid))


@pytest.fixture
def kernels(monkeypatch):
    return Kernels(monkeypatch)


class Step:
    """A builder and the tensors of its calls."""

    def __init__(self, num_q_heads=16, query_len=2, *, pair=False, **fields):
        problem = DecodeProblem(
            num_q_heads=num_q_heads,
            query_lens={query_len},
            masks=set(Mask),
            page_size=32,
            max_num_reqs=8,
            max_model_len=1024,
            **fields,
        )
        self.builder = hopper.builder_cls(problem, DeviceInfo.assume("sm_90"))
        self.builder.has_only_gpu = True  # as it would be on the card
        self.is_fp8 = problem.kv_dtype == "fp8"
        starts = torch.arange(NUM_REQS + 1, dtype=torch.int32) * query_len
        self.common = {
            "query_start_loc": starts,
            "query_start_loc_cpu": starts,
            "seq_lens": torch.full((NUM_REQS,), 70, dtype=torch.int32),
            "num_reqs": NUM_REQS,
            "num_actual_tokens": NUM_REQS * query_len,
            "max_query_len": query_len,
            "max_seq_len": 1024,
            "block_table_tensor": torch.zeros(NUM_REQS, 32, dtype=torch.int32),
        }
        self.rows = NUM_REQS * query_len, num_q_heads
        q = torch.zeros(*self.rows, 576, dtype=torch.bfloat16)
        halves = q[..., :512].contiguous(), q[..., 512:].contiguous()
        dtype = torch.float8_e4m3fn if self.is_fp8 else torch.bfloat16
        self.layer = {
            "q": halves if pair else q,
            "kv_cache": torch.zeros(7, 32, 576, dtype=dtype),
            "kv_scale": torch.ones(1) if self.is_fp8 else None,
            "out": torch.zeros(*self.rows, 512, dtype=torch.bfloat16),
            "lse": torch.zeros(self.rows) if problem.needs_lse else None,
        }
        self.build()

    def build(self, **others):
        common = CommonAttentionMetadata(**{**self.common, **others})
        self.metadata = self.builder.build(common)
        self.step = self.metadata.step

    def forward(self, **others):
        return hopper.forward(
            **{**self.layer, **others}, metadata=self.metadata, softmax_scale=SCALE
        )

    def forget(self):
        self.step.known.clear()
        self.metadata.known = None

    def learn(self, kernels):
        """Three layers: compiled, launched directly, known."""
        for expected in (["front door"] * 2, ["driver"] * 2, ["driver"] * 2):
            self.forward()
            assert kernels.ways()[-2:] == expected


def attended(monkeypatch):
    """How often a layer is put together, from now on."""
    count = []
    attend = launch.HopperStep.attend

    def counted(*given):
        count.append(1)
        return attend(*given)

    monkeypatch.setattr(launch.HopperStep, "attend", counted)
    return count


STEPS = {
    "few rows": {},
    "few rows, LSE, graphs": {"needs_lse": True, "graphs": True},
    "few rows of fp8": {"kv_dtype": "fp8", "needs_lse": True},
    "many rows": {"query_len": 4, "num_q_heads": 128},
    "many rows of fp8": {
        "query_len": 4,
        "num_q_heads": 128,
        "kv_dtype": "fp8",
        "needs_lse": True,
    },
    "a pair": {"query_len": 3, "pair": True},
}


@pytest.mark.parametrize("words", STEPS.values(), ids=STEPS)
def test_a_known_layer_gives_the_driver_what_attend_gives_it(
    monkeypatch, kernels, words
):
    case = Step(**words)
    case.learn(kernels)
    new = {
        name: tuple(part.clone() for part in tensor)
        if isinstance(tensor, tuple)
        else tensor.clone()
        for name, tensor in case.layer.items()
        if tensor is not None
    }
    count = attended(monkeypatch)
    for moved in ({}, *({name: tensor} for name, tensor in new.items()), new):
        case.forget()
        case.forward(**moved)
        (*expected,) = kernels.taken()
        assert len(expected) == len(count) * 2 == 2
        count.clear()
        case.forward(**moved)
        assert kernels.taken() == expected
        assert not count


def test_known_layers_follow_a_build(monkeypatch, kernels):
    case = Step(needs_lse=True)
    case.learn(kernels)
    count = attended(monkeypatch)
    moved = {
        "block_table_tensor": case.common["block_table_tensor"].clone(),
        "seq_lens": case.common["seq_lens"].clone(),
    }
    case.build(**moved)
    kernels.taken()
    case.forward()
    found = kernels.taken()
    assert not count  # the first layer of the step, too
    case.forget()
    case.forward()
    assert kernels.taken() == found
    assert {table.data_ptr() for table in moved.values()} < set(found[0][3])


def test_stale_metadata_is_refused_though_its_layers_are_known(kernels):
    case = Step()
    case.learn(kernels)
    stale = case.metadata
    case.build()
    case.forward()
    kernels.taken()
    case.metadata = stale
    with pytest.raises(StaleMetadataError):
        case.forward()
    assert not kernels.taken()


def forwards(case, kernels, count, **moved):
    """How many of three layers are put together."""
    found = []
    for _ in range(3):
        count.clear()
        case.forward(**moved)
        found.append(len(count))
        kernels.taken()
    return found


def test_layers_that_differ_in_more_than_addresses_are_put_together(
    monkeypatch, kernels
):
    case = Step(query_len=2)
    case.learn(kernels)
    count = attended(monkeypatch)
    more_pages = torch.zeros(9, 32, 576, dtype=torch.bfloat16)
    assert forwards(case, kernels, count, kv_cache=more_pages) == [1, 0, 0]
    assert forwards(case, kernels, count) == [0, 0, 0]
    case.build(block_table_tensor=torch.zeros(NUM_REQS, 37, dtype=torch.int32))
    assert forwards(case, kernels, count) == [1, 0, 0]
    case.build(causal=False)
    assert forwards(case, kernels, count) == [1, 0, 0]
    fewer = {name: case.common[name][:2] for name in ("seq_lens", "block_table_tensor")}
    starts = case.common["query_start_loc"][:3]
    case.build(
        **fewer,
        **dict.fromkeys(("query_start_loc", "query_start_loc_cpu"), starts),
        num_reqs=2,
        num_actual_tokens=4,
    )
    cut = {name: case.layer[name][:4] for name in ("q", "out")}
    assert forwards(case, kernels, count, **cut) == [1, 0, 0]
    case.build()
    assert forwards(case, kernels, count) == [0, 0, 0]


def test_an_output_that_is_not_aligned_takes_the_front_door(kernels):
    case = Step(needs_lse=True)
    case.learn(kernels)
    room = torch.zeros(case.layer["out"].numel() + 1, dtype=torch.bfloat16)
    odd = room[1:].view(case.layer["out"].shape)
    case.forward(out=odd)
    assert kernels.ways() == ["front door"] * 2
    lse = torch.zeros(case.layer["lse"].numel() + 1)[1:].view(case.rows)
    case.forward(lse=lse)
    assert kernels.ways() == ["driver"] * 2


def test_a_profiler_hears_of_known_layers_and_of_builds(kernels):
    case = Step()
    case.learn(kernels)
    case.build()
    assert kernels.ways() == ["driver"]
    kernels.is_profiled = True
    case.build()
    case.forward()
    assert kernels.ways() == ["triton"] * 3
    kernels.is_profiled = False
    case.build()
    case.forward()
    assert kernels.ways() == ["driver"] * 3


def test_the_longest_request_chooses_the_kernels(kernels):
    case = Step(query_len=4, num_q_heads=128)
    for longest, names in [
        (70, ["swap", "merge_rows"]),
        (1024, ["asym", "merge_rows"]),
        (70, ["swap", "merge_rows"]),
    ]:
        case.build(max_seq_len=longest)
        kernels.taken()
        case.forward()
        assert [call[0] for call in kernels.taken()] == names


@pytest.mark.parametrize(
    ("longest", "merge"), [(70, "merge_rows"), (512, "merge_rows"), (513, "merge")]
)
def test_known_layers_have_the_merge_of_their_step(kernels, longest, merge):
    case = Step()
    case.learn(kernels)
    case.build(max_seq_len=longest)
    for _ in range(3):
        kernels.taken()
        case.forward()
        assert [call[0] for call in kernels.taken()] == ["swap", merge]
    assert len(case.step.known) == 1 + (merge == "merge_rows")


@pytest.mark.parametrize(
    ("kernel", "name"),
    [
        ("plan", "seq_lens"),
        ("swap", "table"),
        ("swap", "lse"),
        ("merge", "lse"),
        ("merge_rows", "lse"),
    ],
)
def test_an_address_that_a_kernel_demands_something_of_is_looked_at(
    monkeypatch, kernels, kernel, name
):
    if kernel == "merge_rows":
        monkeypatch.setattr(grid, "H200_MULTIPROCESSORS", 8)
    free = getattr(variants, f"{kernel}_kernel")
    free.params = [
        SimpleNamespace(
            do_not_specialize_on_alignment=parameter.do_not_specialize_on_alignment
            and parameter.name != name
        )
        for parameter in free.params
    ]
    case = Step(needs_lse=True)
    case.learn(kernels)
    count = attended(monkeypatch)
    case.forward()
    assert len(count) == (kernel != "plan")
    tensors = {
        "seq_lens": case.common["seq_lens"],
        "table": case.common["block_table_tensor"],
        "lse": case.layer["lse"],
    }
    tensor = tensors[name]
    odd = torch.zeros(tensor.numel() + 1, dtype=tensor.dtype)[1:].view(tensor.shape)
    kernels.taken()
    built = {"seq_lens": "seq_lens", "table": "block_table_tensor"}
    case.build(**({built[name]: odd} if name in built else {}))
    case.forward(**({name: odd} if name == "lse" else {}))
    ways = {call[0]: call[1] for call in kernels.taken()}
    assert ways.pop(kernel) == "front door"
    assert set(ways.values()) == {"driver"}


def test_a_query_that_has_to_be_joined_is_joined_each_time(monkeypatch, kernels):
    case = Step()
    case.learn(kernels)
    count = attended(monkeypatch)
    transposed = torch.zeros(16, case.rows[0], 576, dtype=torch.bfloat16)
    transposed = transposed.transpose(0, 1)
    assert case.step.boxes.queries(transposed, None) is None
    assert forwards(case, kernels, count, q=transposed) == [1, 1, 1]


def test_no_tensor_is_kept_and_few_addresses(monkeypatch, kernels):
    monkeypatch.setattr(boxes, "MOST_HELD", 4)
    case = Step()
    case.learn(kernels)
    count = attended(monkeypatch)
    queries = [case.layer["q"].clone() for _ in range(8)]
    before = [sys.getrefcount(q) for q in queries]
    for q in queries:
        case.forward(q=q)
    assert len(count) == 8
    count.clear()
    case.forward(q=queries[-1])
    assert not count
    case.forward(q=queries[0])
    assert len(count) == 1
    del q
    assert [sys.getrefcount(q) for q in queries] == before
