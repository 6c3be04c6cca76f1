"""Launches past Triton's front door, as far as they go without a GPU."""

import sys
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton.experimental.gluon", reason="needs Triton's Gluon")

from mla_decode_triton.hopper import launch
from mla_decode_triton.hopper.boxes import box_cache, box_queries
from mla_decode_triton.hopper.direct import Variant
from mla_decode_triton.hopper.launch import HopperStep

KERNELS = ("plan", "swap", "swap_fp8", "asym", "asym_fp8", "merge")
NUM_REQS = 3


class Door:
    """A kernel's two ways, which run nothing and say what each parameter would get."""

    def __init__(self, name, arg_names, calls):
        self.name, self.arg_names, self.calls = name, arg_names, calls

    def __getitem__(self, grid):
        def by_front_door(*arguments, num_warps, launch_pdl=False, **constants):
            del num_warps, launch_pdl
            named = dict(zip(self.arg_names, arguments, strict=False))
            assert not named.keys() & constants.keys()
            self.calls.append((self.name, "front door", grid, named | constants))
            return self.Compiled(self)

        return by_front_door

    class Compiled:
        def __init__(self, door):
            self.door = door

        def __getitem__(self, grid):
            def directly(*arguments):
                door = self.door
                named = dict(zip(door.arg_names, arguments, strict=True))
                door.calls.append((door.name, "direct", grid, named))

            return directly


@pytest.fixture
def calls(monkeypatch):
    made = []
    for kernel in KERNELS:
        name = f"{kernel}_kernel"
        door = Door(kernel, getattr(launch, name).arg_names, made)
        monkeypatch.setattr(launch, name, door)
    return made


def plain(value):
    """What a launch gives the driver of a parameter."""
    if isinstance(value, torch.Tensor):
        return value.data_ptr()
    if hasattr(value, "block_shape"):
        shapes = (value.shape, value.strides, value.block_shape)
        return value.base.data_ptr(), value.base.dtype, *map(tuple, shapes)
    return value


def shifted(tensor):
    """The same values at an address that is no multiple of 16."""
    room = torch.empty(tensor.numel() + 1, dtype=tensor.dtype)
    return room[1:].view(tensor.shape).copy_(tensor)


class Case:
    """A step and the tensors of its calls."""

    def __init__(self, query_len, num_heads, *, fp8=False, with_lse=True):
        self.step = HopperStep.alone(
            max_num_reqs=8,
            query_len=query_len,
            num_heads=num_heads,
            device=torch.device("cpu"),
            multiprocessors=5,
        )
        rows = NUM_REQS * query_len, num_heads
        dtype = torch.float8_e4m3fn if fp8 else torch.bfloat16
        self.q = torch.zeros(*rows, 576, dtype=torch.bfloat16)
        self.cache = torch.zeros(7, 32, 576, dtype=dtype)
        self.table = torch.zeros(NUM_REQS, 4, dtype=torch.int32)
        self.lens = torch.zeros(NUM_REQS, dtype=torch.int32)
        self.out = torch.zeros(*rows, 512, dtype=torch.bfloat16)
        self.lse = torch.zeros(rows) if with_lse else None
        self.kv_scale = torch.ones(1) if fp8 else None

    def run(self, *, causal=True, **others):
        given = {**vars(self), **others}
        step = given.pop("step")
        step.build(given["lens"])
        step.forward(
            given["q"],
            None,
            *(given[name] for name in ("cache", "table", "lens", "out", "lse")),
            softmax_scale=0.25,
            causal=causal,
            kv_scale=given["kv_scale"],
        )


def ways(calls):
    found = [(name, way) for name, way, _, _ in calls]
    calls.clear()
    return found


def on_the_way(way, kernel):
    return [("plan", way), (kernel, way), ("merge", way)]


@pytest.mark.parametrize(
    ("kernel", "words"),
    [
        ("swap", {"query_len": 1, "num_heads": 16}),
        ("swap", {"query_len": 2, "num_heads": 16, "with_lse": False}),
        ("swap_fp8", {"query_len": 2, "num_heads": 3, "fp8": True}),
        ("asym", {"query_len": 4, "num_heads": 16}),
        ("asym_fp8", {"query_len": 4, "num_heads": 16, "fp8": True}),
        ("asym", {"query_len": 1, "num_heads": 128, "with_lse": False}),
    ],
)
def test_every_parameter_gets_by_position_what_it_gets_by_name(calls, kernel, words):
    case = Case(**words)
    case.run()
    case.run()
    first, second = calls[:3], calls[3:]
    assert [call[:2] for call in first] == on_the_way("front door", kernel)
    assert [call[:2] for call in second] == on_the_way("direct", kernel)
    for (_, _, grid, by_name), (_, _, same_grid, by_position) in zip(
        first, second, strict=True
    ):
        assert grid == same_grid
        assert len(grid) == 3
        assert {name: plain(value) for name, value in by_name.items()} == {
            name: plain(value) for name, value in by_position.items()
        }


def test_a_variant_serves_other_tensors_of_its_types(calls):
    case = Case(1, 16)
    case.run()
    calls.clear()
    other = Case(1, 16)
    others = {name: value for name, value in vars(other).items() if name != "step"}
    case.run(**others)
    named = {name: arguments for name, _, _, arguments in calls}
    assert named["swap"]["table"] == other.table.data_ptr()
    assert named["swap"]["kv"].data_ptr() == other.cache.data_ptr()
    assert named["merge"]["out"] == other.out.data_ptr()
    assert ways(calls) == on_the_way("direct", "swap")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("lens", ["front door", "front door", "direct"]),
        ("table", ["direct", "front door", "direct"]),
        ("out", ["direct", "front door", "front door"]),
        ("lse", ["direct", "front door", "front door"]),
    ],
)
def test_what_is_not_aligned_takes_the_front_door(calls, name, expected):
    case = Case(1, 16)
    odd = {name: shifted(getattr(case, name))}
    assert odd[name].data_ptr() % 16
    case.run(**odd)
    case.run()
    calls.clear()
    for _ in range(2):
        case.run(**odd)
        assert [way for _, way in ways(calls)] == expected
    case.run()
    assert ways(calls) == on_the_way("direct", "swap")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ({"causal": False}, ["direct", "front door", "direct"]),
        ({"lse": None}, ["direct", "front door", "front door"]),
        (
            {"out": torch.zeros(2 * NUM_REQS, 16, 512)},
            ["direct", "front door", "front door"],
        ),
        (
            {"cache": torch.zeros(3, 64, 576, dtype=torch.bfloat16)},
            ["direct", "front door", "direct"],
        ),
        (
            {"cache": torch.zeros(3, 32, 576, dtype=torch.float16)},
            ["direct", "front door", "direct"],
        ),
        (
            {"q": torch.zeros(2 * NUM_REQS, 16, 576, dtype=torch.float16)},
            ["direct", "front door", "direct"],
        ),
    ],
    ids=["mask", "lse", "out", "page", "cache", "query"],
)
def test_what_the_compiler_knows_makes_a_variant(calls, words, expected):
    case = Case(2, 16)
    case.run()
    calls.clear()
    case.run(**words)
    assert [way for _, way in ways(calls)] == expected
    case.run(**words)
    assert ways(calls) == on_the_way("direct", "swap")


def test_a_kernel_that_triton_did_not_run_keeps_to_the_front_door():
    launched = []

    def run(*arguments, **words):
        launched.append((*arguments, words))

    variant = Variant(kernel={(1, 1, 1): run}, constants={"SIZE": 2}, options={})
    tensor = torch.zeros(4)
    for _ in range(2):
        variant.launch((1, 1, 1), (), (tensor,), (3,))
    assert launched == [(tensor, 3, {"SIZE": 2})] * 2


def test_no_tensor_is_kept(calls):
    case = Case(2, 3, fp8=True)
    tensors = [
        value for value in vars(case).values() if isinstance(value, torch.Tensor)
    ]
    before = [sys.getrefcount(tensor) for tensor in tensors]
    case.run()
    calls.clear()
    case.run()
    calls.clear()
    assert [sys.getrefcount(tensor) for tensor in tensors] == before


def driver_arguments(monkeypatch, *boxes):
    """What Triton's launcher makes of descriptors; the driver's call names its inputs."""
    import triton
    from triton.backends.nvidia import driver

    names = ("fill_tma_descriptor", "fill_tma_descriptor_tiled")
    fill = dict.fromkeys(names, lambda *values: ("filled", *map(_comparable, values)))
    active = SimpleNamespace(utils=SimpleNamespace(**fill))
    monkeypatch.setattr(triton.runtime.driver, "_active", active)
    forms = [(box.dtype, box.block_shape, box.layout) for box in boxes]
    names = {torch.bfloat16: "bf16", torch.float8_e4m3fn: "fp8e4nv"}
    types = {
        index: f"tensordesc<{names[dtype]}[{','.join(map(str, block))}],{layout!r}>"
        for index, (dtype, block, layout) in enumerate(forms)
    }
    metadata = [
        {
            "swizzle": 3,
            "elem_size": dtype.itemsize,
            "elem_type": 6,
            "block_size": block,
            "fp4_padded": False,
        }
        for dtype, block, _ in forms
    ]
    wrapped = driver.wrap_handle_tensordesc(lambda *given: given, types, metadata)
    leading = getattr(driver, "_BASE_ARGS_FORMAT_LEN", None)

    def pass_on(*descriptors):
        if leading is None:  # 3.9 passes a kernel's arguments as one
            return list(wrapped(descriptors)[-1])
        return list(wrapped(*[None] * leading, *descriptors)[leading:])

    return pass_on(*boxes), pass_on(*(box.described() for box in boxes))


def _comparable(value):
    return value if isinstance(value, int) else tuple(value)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_triton_reads_an_address_as_it_reads_its_own_descriptor(monkeypatch, dtype):
    q = torch.zeros(6, 5, 576, dtype=torch.bfloat16)
    cache = torch.zeros(4, 128, 640, dtype=dtype)[..., :576]
    boxes = (*box_queries(q, None, 3, 16), box_cache(cache))
    directly, by_front_door = driver_arguments(monkeypatch, *boxes)
    assert directly == by_front_door
    filled = [value for value in directly if isinstance(value, tuple)]
    assert [values[1] for values in filled] == [
        q.data_ptr(),
        q[..., 512:].data_ptr(),
        cache.data_ptr(),
    ]
    assert [values[-3:-1] for values in filled] == [
        ((2, 15, 512), (3 * 5 * 576, 576, 1)),
        ((2, 15, 64), (3 * 5 * 576, 576, 1)),
        ((4, 128, 576), (128 * 640, 640, 1)),
    ]
    assert [values[-4] for values in filled] == [(1, 16, 64), (1, 16, 64), (1, 64, 64)]


def test_a_query_in_two_tensors_is_read_where_each_lies():
    q = torch.zeros(4, 2, 576, dtype=torch.bfloat16)
    latent = torch.zeros(4, 2, 512, dtype=torch.bfloat16)
    rope = q[..., 512:]
    boxed = box_queries(latent, rope, 2, 16)
    assert [box.address for box in boxed] == [latent.data_ptr(), rope.data_ptr()]
    assert [tuple(box.strides) for box in boxed] == [(2048, 512, 1), (2304, 576, 1)]
    assert [tuple(box.shape) for box in boxed] == [(2, 4, 512), (2, 4, 64)]
