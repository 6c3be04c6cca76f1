"""Gluon's language and its Hopper operations, computed with torch."""

from __future__ import annotations

import builtins
import random
import re

import torch

from .assembly import run_packed
from .barriers import Barriers
from .memory import Shared
from .named import run_meeting
from .products import InFlight, Product
from .races import Agent, History, SimulationError, merge
from .scalars import Scalar
from .turns import Turns


class Language:
    """What `gl` is to a kernel: the part without shared memory."""

    int8, int16 = torch.int8, torch.int16
    int32, int64 = torch.int32, torch.int64
    float32, float8e4nv = torch.float32, torch.float8_e4m3fn
    bfloat16, float16 = torch.bfloat16, torch.float16
    static_range = staticmethod(builtins.range)
    constexpr = staticmethod(lambda value: value)
    NVMMADistributedLayout = NVMMASharedLayout = staticmethod(lambda *_: None)
    SwizzledSharedLayout = SliceLayout = BlockedLayout = NVMMADistributedLayout
    DotOperandLayout = DistributedLinearLayout = NVMMADistributedLayout
    MBarrierLayout = staticmethod(lambda: "barrier")
    exp2 = staticmethod(torch.exp2)
    log2 = staticmethod(torch.log2)

    @staticmethod
    def range(*bounds):
        return (Scalar(i) for i in builtins.range(*(int(b) for b in bounds)))

    @staticmethod
    def arange(start, stop, layout=None):  # noqa: ARG004 - layouts are not modelled
        return torch.arange(start, stop, dtype=torch.int32)

    @staticmethod
    def full(shape, value, dtype, layout=None):  # noqa: ARG004 - as above
        return torch.full(shape, value, dtype=dtype)

    @staticmethod
    def where(condition, yes, no):
        if not isinstance(condition, torch.Tensor):
            return Scalar(yes if condition else no)
        return torch.where(condition, yes, no)

    @staticmethod
    def _elect(pick, a, b):
        if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
            a = torch.as_tensor(a)
            return getattr(torch, f"{pick}imum")(a, torch.as_tensor(b, dtype=a.dtype))
        return Scalar(getattr(builtins, pick)(int(a), int(b)))

    def minimum(self, a, b):
        return self._elect("min", a, b)

    def maximum(self, a, b):
        return self._elect("max", a, b)

    @staticmethod
    def max(x, axis):
        return x.amax(axis)

    @staticmethod
    def min(x, axis):
        return x.amin(axis)

    @staticmethod
    def sum(x, axis):
        return x.sum(axis)

    @staticmethod
    def expand_dims(x, axis):
        return x.unsqueeze(axis)

    @staticmethod
    def permute(x, order):
        return x.permute(order)

    @staticmethod
    def convert_layout(x, _layout):
        return x

    @staticmethod
    def inline_asm_elementwise(asm, constraints, args, *, dtype, is_pure, pack):
        if "prefetch" in asm:
            return _judge_prefetch(asm, *args)
        if (constraints, is_pure, pack) not in (
            ("=r,=r,r", True, 4),
            ("=r,r", True, 2),
        ):
            raise NotImplementedError(constraints)
        if pack * args[0].itemsize != 4:
            raise ValueError(f"{pack} elements of {args[0].dtype} are no word")
        return run_packed(asm, *args, dtype)

    @staticmethod
    def cast(x, dtype, *, bitcast=False):
        return x.view(dtype) if bitcast else x.to(dtype)

    @staticmethod
    def pointer_type(dtype):
        return dtype

    @staticmethod
    def join(a, b):
        return torch.stack([a, b], -1)

    @staticmethod
    def reshape(x, shape):
        return x.reshape([int(size) for size in shape])

    @staticmethod
    def load(pointer, mask=None, other=None, cache_modifier=None):  # noqa: ARG004 - caches are not modelled
        return pointer.load(mask, other)

    @staticmethod
    def store(pointer, value, mask=None):
        pointer.store(value, mask)


def _judge_prefetch(asm, pointers, mask):
    """Raise where a prefetch would read what is not the tensor's."""
    size = re.search(r"prefetch\.L2\.global \[\$1\], (\d+);", asm).group(1)
    pointers.check_inside(mask != 0, int(size))


class World(Language):
    """One program (CTA) of a kernel: its memory, partitions and engines."""

    def __init__(self, program, grid, seed):
        self.program = program
        self.grid = grid
        self.main = Agent("main", num_warps=4)
        self.turns = Turns(self.main, random.Random(seed))  # noqa: S311 - no secrets
        self.barriers = []
        self.meetings = {}
        self.votes = None
        """The register of votes by partition, once it is declared."""
        self.in_flight = {}
        self.landings = []
        """The moments that copies are over."""
        self.num_allocations = 0
        self.has_waited = False
        """Whether the kernel before is known to be over."""

    @property
    def me(self):
        return self.turns.running

    def num_warps(self):
        return self.me.num_warps

    def program_id(self, axis):
        return Scalar(self.program[axis])

    def num_programs(self, axis):
        return Scalar(self.grid[axis])

    def allocate_shared_memory(self, dtype, shape, layout):
        self.num_allocations += 1
        name = f"#{self.num_allocations}"
        if layout == "barrier":
            barriers = Barriers(shape[0], f"barrier {name}")
            self.barriers += barriers.barriers
            return barriers
        dtype = getattr(dtype, "torch", dtype)
        elements = torch.full((torch.Size(shape).numel(),), float("nan"), dtype=dtype)
        return Shared(self, elements, History(f"memory {name}"), 0, shape, 64)

    @staticmethod
    def reinterpret(memory, dtype, shape, _layout):
        return memory.reinterpret(dtype, shape)

    def init(self, barrier, count):
        barrier.init(count, self.me)

    def expect(self, barrier, num_bytes):
        barrier.arrive(self.me, 1, num_bytes)

    def arrive(self, barrier, count):
        barrier.arrive(self.me, count)

    def wait(self, barrier, parity):
        me = self.me
        needed = barrier.needs(me, int(parity))
        self.turns.wait(lambda: barrier.completed >= needed)
        barrier.acquire(me, needed)

    def barrier(self):
        self.me.gather()

    def gdc_wait(self):
        self.has_waited = True

    def load(self, pointer, mask=None, other=None, cache_modifier=None):
        self._judge_order(pointer)
        return super().load(pointer, mask, other, cache_modifier)

    def store(self, pointer, value, mask=None):
        self._judge_order(pointer)
        super().store(pointer, value, mask)

    def _judge_order(self, pointer):
        if pointer.is_late and not self.has_waited:
            raise SimulationError("an access before the kernel before is over")

    def inline_asm_elementwise(self, asm, constraints, args, *, dtype, is_pure, pack):
        if asm.startswith("bar."):
            return run_meeting(self, asm, *(int(arg) for arg in args))
        if "mla_vote" in asm:
            return self._run_vote(asm, args)
        return super().inline_asm_elementwise(
            asm, constraints, args, dtype=dtype, is_pure=is_pure, pack=pack
        )

    def _run_vote(self, asm, args):
        """Declare, fill or read the register of votes, each partition its own.

        All warps of a partition branch as one here; on a device each does by itself.
        """
        if asm.startswith(".reg"):
            if self.votes is not None:
                raise SimulationError("the register of votes is declared twice")
            self.votes = {}
            return None
        if self.votes is None:
            raise SimulationError("the register of votes is not declared")
        if "vote.sync.any" in asm:
            self.votes[self.me] = bool((args[0] > 0).any())
            return args[0]
        return Scalar(int(self.votes.pop(self.me)))

    def fence_async_shared(self):
        self.me.fence()

    def async_load(self, descriptor, origin, barrier, memory):
        if list(memory.shape) != list(descriptor.block):
            raise ValueError(f"a box of {descriptor.block} into {memory.shape}")
        if not barrier.is_fenced:
            raise SimulationError(f"{barrier.name} is used by a copy but not fenced")
        access = memory.access("copy", is_plain=False)
        memory.history.write(access)
        over = barrier.landing(self.me)
        self.landings.append(over)
        memory.put(torch.full(memory.shape, float("nan"), dtype=memory.dtype))
        box = descriptor.box([int(i) for i in origin])

        def land():
            memory.put(box)
            barrier.landed(box.numel() * box.itemsize, over)
            access.over = over

        self.turns.copies.append(land)

    def warpgroup_mma(self, a, b, acc, *, use_acc=True, is_async=False):
        if not is_async:
            raise NotImplementedError("synchronous products")
        product = Product(a, b, acc, use_acc=use_acc)
        return self._my_products().issue(product)

    def warpgroup_mma_wait(self, outstanding, deps):
        return self._my_products().wait(self.me, outstanding, deps)

    def _my_products(self):
        return self.in_flight.setdefault(self.me, InFlight())

    def warp_specialize(self, partitions, num_warps, _registers):
        self.main.gather()
        bodies = {}
        for (function, arguments), warps in zip(
            partitions, (self.main.num_warps, *num_warps), strict=True
        ):
            agent = Agent(function.__name__, num_warps=warps)
            merge(agent.clock, self.main.published())
            bodies[agent] = lambda f=function, a=arguments: f(*a)
        self.turns.run(bodies)
        if self.turns.failures:
            raise self.turns.failures[0]
        for agent in bodies:
            merge(self.main.clock, {**agent.clock, agent: agent.now})
        self._check_end()

    def _check_end(self):
        for barrier in (*self.barriers, *self.meetings.values()):
            barrier.check_end()
        if not all(self.main.knows(moment) for moment in self.landings):
            raise SimulationError("the program ends with a copy that nobody awaits")
        if any(flight.products for flight in self.in_flight.values()):
            raise SimulationError("a partition ends with a product in flight")
