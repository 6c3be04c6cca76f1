"""Launches past Triton's front door, as far as they go without a GPU."""

import sys
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton.experimental.gluon", reason="needs Triton's Gluon")

from triton.compiler.compiler import LazyDict
from triton.knobs import HookChain

from mla_decode_triton.hopper import variants
from mla_decode_triton.hopper.boxes import (
    MOST_HELD,
    HeldBoxes,
    box_cache,
    box_queries,
)
from mla_decode_triton.hopper.compat import driver_run
from mla_decode_triton.hopper.direct import Variant
from mla_decode_triton.hopper.launch import HopperStep

KERNELS = ("plan", "swap", "swap_fp8", "asym", "asym_fp8", "merge", "merge_rows")
NUM_REQS = 3


class Door:
    """A kernel's two ways, which run nothing and say what each parameter would get."""

    def __init__(self, name, kernel, calls):
        self.name, self.calls = name, calls
        self.arg_names, self.params = kernel.arg_names, kernel.params

    def __getitem__(self, grid):
        def by_front_door(*arguments, num_warps, **constants):
            assert num_warps in {4, 8}
            for option in ("launch_pdl", "maxnreg"):
                constants.pop(option, None)
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
        door = Door(kernel, getattr(variants, name), made)
        monkeypatch.setattr(variants, name, door)
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

    def __init__(
        self, query_len, num_heads, *, fp8=False, with_lse=True, multiprocessors=5
    ):
        self.step = HopperStep.alone(
            max_num_reqs=8,
            query_len=query_len,
            num_heads=num_heads,
            device=torch.device("cpu"),
            multiprocessors=multiprocessors,
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


def on_the_way(way, kernel, merge="merge_rows"):
    return [("plan", way), (kernel, way), (merge, way)]


@pytest.mark.parametrize(
    ("kernel", "words"),
    [
        ("swap", {"query_len": 1, "num_heads": 16}),
        ("swap", {"query_len": 2, "num_heads": 16, "with_lse": False}),
        ("swap", {"query_len": 1, "num_heads": 16, "multiprocessors": 40}),
        ("swap_fp8", {"query_len": 2, "num_heads": 3, "fp8": True}),
        ("asym", {"query_len": 4, "num_heads": 16}),
        ("asym_fp8", {"query_len": 4, "num_heads": 16, "fp8": True}),
        ("asym", {"query_len": 1, "num_heads": 128, "with_lse": False}),
    ],
)
def test_every_parameter_gets_by_position_what_it_gets_by_name(calls, kernel, words):
    case = Case(**words)
    merge = "merge" if "multiprocessors" in words else "merge_rows"
    case.run()
    case.run()
    first, second = calls[:3], calls[3:]
    assert [call[:2] for call in first] == on_the_way("front door", kernel, merge)
    assert [call[:2] for call in second] == on_the_way("direct", kernel, merge)
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
    assert named["merge_rows"]["out"] == other.out.data_ptr()
    assert ways(calls) == on_the_way("direct", "swap")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("lens", ["direct", "direct", "direct"]),
        ("table", ["direct", "direct", "direct"]),
        ("out", ["direct", "front door", "front door"]),
        ("lse", ["direct", "direct", "direct"]),
    ],
)
def test_outputs_that_are_not_aligned_take_the_front_door(calls, name, expected):
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
        variant.launch((1, 1, 1), (), (tensor,), (tensor.data_ptr(),), (3,))
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


class Driver:
    """Triton's launcher of a kernel with descriptors; its driver names what it gets."""

    def __init__(
        self, monkeypatch, boxes, others=("*fp32", "fp32", "i32", "constexpr")
    ):
        import triton
        from triton.backends.nvidia import driver
        from triton.compiler.compiler import CompiledKernel

        self.nvidia, self.monkeypatch = driver, monkeypatch
        self.launched = []
        self.encoded = []
        self.hooks = triton.knobs.runtime
        fill = dict.fromkeys(("fill_tma_descriptor", "fill_tma_descriptor_tiled"))
        active = SimpleNamespace(
            utils=SimpleNamespace(**dict.fromkeys(fill, self.fill)),
            get_current_device=lambda: 1,
            get_current_stream=lambda device: 70 + device,
        )
        monkeypatch.setattr(triton.runtime.driver, "_active", active)
        names = {torch.bfloat16: "bf16", torch.float8_e4m3fn: "fp8e4nv"}
        types = {
            index: f"tensordesc<{names[box.dtype]}"
            f"[{','.join(map(str, box.block_shape))}],{box.layout!r}>"
            for index, box in enumerate(boxes)
        } | {len(boxes) + index: name for index, name in enumerate(others)}
        forms = [
            {
                "swizzle": 3,
                "elem_size": box.dtype.itemsize,
                "elem_type": 6,
                "block_size": box.block_shape,
                "fp4_padded": False,
            }
            for box in boxes
        ]
        launcher = object.__new__(driver.CudaLauncher)
        vars(launcher).update(
            launch=driver.wrap_handle_tensordesc(self.launch, types, forms),
            num_ctas=1,
            global_scratch_size=0,
            global_scratch_align=1,
            profile_scratch_size=0,
            profile_scratch_align=1,
            launch_cooperative_grid=False,
            launch_pdl=False,
            gsan_enabled=False,
            arg_annotations=(),
            kernel_signature=b"",
        )
        self.compiled = object.__new__(CompiledKernel)
        vars(self.compiled).update(
            metadata=SimpleNamespace(tensordesc_meta=forms),
            packed_metadata=(4, 1, 1000),
            src=None,
            name="kernel",
            module="loaded",
            _module_pid=None,
            function=1234,
            _run=launcher,
        )

    def patch(self, place, **values):
        for name, value in values.items():
            self.monkeypatch.setattr(place, name, value)

    def fill(self, *values):
        self.encoded.append(values)
        return ("filled", *map(_comparable, values))

    def launch(self, *given):
        if isinstance(given[-1], (list, tuple)):  # 3.9 passes a kernel's as one
            given = *given[:-1], *given[-1]
        self.launched.append(given)


def _comparable(value):
    return value if isinstance(value, int) else tuple(value)


def boxes_of(dtype=torch.bfloat16):
    q = torch.zeros(6, 5, 576, dtype=torch.bfloat16)
    cache = torch.zeros(4, 128, 640, dtype=dtype)[..., :576]
    return q, cache, (*box_queries(q, None, 3, 16), box_cache(cache))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_triton_reads_an_address_as_it_reads_its_own_descriptor(monkeypatch, dtype):
    q, cache, boxes = boxes_of(dtype)
    driver = Driver(monkeypatch, boxes, others=())
    driver.compiled[3, 2, 1](*boxes)
    driver.compiled[3, 2, 1](*(box.described() for box in boxes))
    directly, by_front_door = driver.launched
    filled = [value for value in directly if isinstance(value, tuple)][-3:]
    assert filled == [value for value in by_front_door if isinstance(value, tuple)][-3:]
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


def variant_of(compiled):
    """A variant whose first launch has Triton's front door return this kernel."""
    grids = dict.fromkeys([(3, 2, 1)], lambda *_, **__: compiled)
    kernel = type("Kernel", (dict,), {"arg_names": ["SIZE"]})(grids)
    return Variant(kernel=kernel, constants={"SIZE": 2}, options={})


def launch_variant(variant, boxes, tensor):
    addresses = (tensor.data_ptr(),)
    variant.launch((3, 2, 1), boxes, (tensor,), addresses, (0.5, 7))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_the_driver_gets_what_triton_gives_it_without_encoding_anew(monkeypatch, dtype):
    _, _, boxes = boxes_of(dtype)
    tensor = torch.zeros(4)
    driver = Driver(monkeypatch, boxes)
    variant = variant_of(driver.compiled)
    launch_variant(variant, boxes, tensor)
    driver.compiled[3, 2, 1](*boxes, tensor.data_ptr(), 0.5, 7, 2)
    for _ in range(3):
        launch_variant(variant, boxes, tensor)
    tritons, *ours = driver.launched
    assert len(driver.encoded) == 6
    assert len(ours) == 3
    # Triton also makes metadata for hooks, of which there are none.
    assert [_without_hooks(given) for given in ours] == [_without_hooks(tritons)] * 3


def test_a_kernel_without_boxes_is_launched_alike(monkeypatch):
    tensor = torch.zeros(4)
    driver = Driver(monkeypatch, ())
    variant = variant_of(driver.compiled)
    launch_variant(variant, (), tensor)
    driver.compiled[3, 2, 1](tensor.data_ptr(), 0.5, 7, 2)
    launch_variant(variant, (), tensor)
    tritons, ours = driver.launched
    assert _without_hooks(ours) == _without_hooks(tritons)


def _without_hooks(given):
    hooks = LazyDict, HookChain, type(None)
    return [value for value in given if not isinstance(value, hooks)]


def test_a_profiler_hears_of_a_launch(monkeypatch):
    _, _, boxes = boxes_of()
    driver = Driver(monkeypatch, boxes)
    variant = variant_of(driver.compiled)
    launch_variant(variant, boxes, torch.zeros(4))
    hook = driver.hooks.launch_enter_hook
    monkeypatch.setattr(hook, "calls", [print])
    launch_variant(variant, boxes, torch.zeros(4))
    (given,) = driver.launched
    assert hook in given
    monkeypatch.setattr(hook, "calls", [])
    launch_variant(variant, boxes, torch.zeros(4))
    assert hook not in driver.launched[1]


def other_launcher(driver):
    driver.compiled._run = launch = Launched()
    return launch


def other_call(driver):
    launch = Launched()
    call = {"__call__": lambda _, *given: launch(*given)}
    driver.patch(driver.nvidia.CudaLauncher, **call)
    return launch


def other_wrapper(driver):
    driver.compiled._run.launch = launch = Launched()
    return launch


def other_closure(driver):
    launch = Launched()
    driver.compiled._run.launch = lambda *given: launch(*given, "more")
    return launch


def other_encoder(driver):
    def encode(*given):
        return make(*given)

    make = driver.nvidia.make_tensordesc_arg
    driver.patch(driver.nvidia, make_tensordesc_arg=encode)
    return driver.launched


def other_forms(driver):
    driver.compiled.metadata.tensordesc_meta = [None]
    return driver.launched


def test_a_launcher_that_looks_at_the_stream_is_unknown(monkeypatch):
    def __call__(self, gridX, gridY, gridZ, stream, function, *args):  # noqa: N807, N803 - theirs
        self.launch(gridX, gridY, gridZ, int(stream), function, *args)

    _, _, boxes = boxes_of()
    driver = Driver(monkeypatch, boxes)
    driver.patch(driver.nvidia.CudaLauncher, __call__=__call__)
    assert driver_run(driver.compiled, len(boxes)) is None


@pytest.mark.parametrize(
    "make_other",
    [
        *(other_launcher, other_call, other_wrapper),
        *(other_closure, other_encoder, other_forms),
    ],
)
def test_an_unknown_launcher_is_left_to_triton(monkeypatch, make_other):
    _, _, boxes = boxes_of()
    driver = Driver(monkeypatch, boxes)
    launched = make_other(driver)
    assert driver_run(driver.compiled, len(boxes)) is None
    variant = variant_of(driver.compiled)
    for _ in range(2):
        launch_variant(variant, boxes, torch.zeros(4))
    assert len(launched) == 1


@pytest.mark.parametrize(
    "work", ["global_scratch_size", "profile_scratch_size", "gsan_enabled"]
)
def test_a_launcher_with_more_to_do_is_left_to_triton(monkeypatch, work):
    driver = Driver(monkeypatch, ())
    assert driver_run(driver.compiled, 0) is not None
    setattr(driver.compiled._run, work, 1)
    assert driver_run(driver.compiled, 0) is None


def test_a_launcher_that_passes_arguments_otherwise_is_left_to_triton(monkeypatch):
    def turned(self, gridX, gridY, gridZ, stream, function, *args):  # noqa: N803 - theirs
        self.launch(*args, stream, function, gridX, gridY, gridZ)

    driver = Driver(monkeypatch, ())
    driver.patch(driver.nvidia.CudaLauncher, __call__=turned)
    assert driver_run(driver.compiled, 0) is None


class Launched(list):
    """A launch of another kind: keeps what it was called with."""

    def __call__(self, *given):
        self.append(given)


def test_boxes_are_held_by_address_and_geometry():
    held = HeldBoxes(2, 16)
    q = torch.zeros(4, 3, 576, dtype=torch.bfloat16)
    found = held.queries(q, None)
    assert held.queries(q, None) is found
    assert held.queries(q[:2], None)[0].shape[0] == 1
    assert held.queries(q[..., :512], q[..., 512:])[1].address == found[1].address
    moved = q[..., :512], torch.zeros(4, 3, 64, dtype=torch.bfloat16)
    assert held.queries(*moved)[1].address == moved[1].data_ptr()
    assert held.queries(q.view(torch.float16), None)[0].dtype == torch.float16
    assert held.queries(q.transpose(0, 1), None) is None
    cache = torch.zeros(4, 64, 576, dtype=torch.bfloat16)
    assert held.cache(cache) is held.cache(cache.view(4, 64, 576))
    assert held.cache(cache[:2]).shape[0] == 2
    assert held.cache(cache[::2]).strides[0] == 2 * 64 * 576
    assert held.cache(cache.view(torch.float16)).dtype == torch.float16


def test_so_many_boxes_are_held_and_no_more():
    held = HeldBoxes(1, 16)
    cache = torch.zeros(MOST_HELD + 1, 16, 576, dtype=torch.bfloat16)
    first = held.cache(cache[:1])
    for at in range(1, MOST_HELD):
        held.cache(cache[at : at + 1])
    assert held.cache(cache[:1]) is first
    held.cache(cache[-1:])
    assert held.cache(cache[:1]) is not first


def test_a_query_in_two_tensors_is_read_where_each_lies():
    q = torch.zeros(4, 2, 576, dtype=torch.bfloat16)
    latent = torch.zeros(4, 2, 512, dtype=torch.bfloat16)
    rope = q[..., 512:]
    boxed = box_queries(latent, rope, 2, 16)
    assert [box.address for box in boxed] == [latent.data_ptr(), rope.data_ptr()]
    assert [tuple(box.strides) for box in boxed] == [(2048, 512, 1), (2304, 576, 1)]
    assert [tuple(box.shape) for box in boxed] == [(2, 4, 512), (2, 4, 64)]
