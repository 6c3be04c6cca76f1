"""Runs the source of the Gluon kernels on a CPU, partitions as threads.

Gluon has no interpreter, but the bodies of its kernels are Python functions. They are
executed here in a namespace where `gl` computes with torch, shared memory is bytes laid
out as the hardware's 128-byte swizzle groups them, barriers have phases and transaction
counts, and copies complete late and in any order.

What is checked while it runs: a copy poisons its destination until it lands; a matrix
product reads its operands when it is issued and again when it is waited for, and both
must agree; memory written by ordinary stores must be fenced before a matrix product
reads it; 32-bit scalars must stay in 32 bits; a barrier that nobody completes is a
deadlock. Registers, layouts and speed are not modelled.
"""

import builtins
import random
import sys
import threading
import time
import types

import torch

DEADLOCK_S = 20


class DeadlockError(RuntimeError):
    """A partition waited for a phase that never completed."""


class Scalar(int):
    """A device integer: 32 bits unless widened, and then infectious."""

    wide = False

    def __new__(cls, value, *, wide=False):
        self = super().__new__(cls, value)
        self.wide = wide
        if not wide and not -(2**31) <= int(self) < 2**31:
            raise OverflowError(f"a 32-bit scalar became {int(self)}")
        return self

    def to(self, dtype):
        return Scalar(int(self), wide=dtype == torch.int64)


def _binary(name):
    plain = getattr(int, name)

    def operate(self, other):
        if isinstance(other, torch.Tensor):
            other = other.long() if self.wide else other
            symbol = name.replace("__r", "__") if name.startswith("__r") else name
            if name.startswith("__r"):
                return getattr(other, symbol)(int(self))
            mirrored = {
                "__add__": lambda: other + int(self),
                "__mul__": lambda: other * int(self),
                "__sub__": lambda: int(self) - other,
            }
            return mirrored[name]()
        result = plain(self, other)
        if result is NotImplemented or isinstance(result, bool):
            return result
        wide = self.wide or getattr(other, "wide", False)
        return Scalar(result, wide=wide)

    return operate


for _name in ("add", "sub", "mul", "floordiv", "mod", "and", "rshift", "xor"):
    setattr(Scalar, f"__{_name}__", _binary(f"__{_name}__"))
    setattr(Scalar, f"__r{_name}__", _binary(f"__r{_name}__"))


class Pointer:
    """Elements of a flat tensor, and where this pointer (or block of them) points."""

    def __init__(self, tensor, offset=0):
        self.tensor = tensor
        self.offset = offset
        self.dtype = types.SimpleNamespace(element_ty=tensor.dtype)

    def __add__(self, other):
        if isinstance(other, torch.Tensor):
            other = other.long()
        offset = self.offset
        if isinstance(other, int) and isinstance(offset, int):
            return Pointer(self.tensor, int(offset) + int(other))
        return Pointer(self.tensor, offset + other)

    def load(self, mask, other):
        if not isinstance(self.offset, torch.Tensor):
            if mask is not None and not mask:
                return other
            self._check(torch.tensor(self.offset))
            value = self.tensor[self.offset].item()
            return value if isinstance(value, float) else Scalar(value)
        raise NotImplementedError("block loads are not used by these kernels")

    def store(self, value, mask):
        offset = torch.as_tensor(self.offset)
        value = torch.as_tensor(value, dtype=self.tensor.dtype)
        if mask is not None:
            mask = mask.expand(offset.shape)
            offset, value = offset[mask], value.expand(mask.shape)[mask]
        self._check(offset)
        self.tensor[offset] = value

    def _check(self, offset):
        if (
            offset.numel()
            and not 0 <= offset.min() <= offset.max() < self.tensor.numel()
        ):
            raise IndexError("access outside of a global tensor")


class ElementType:
    """The element type of a descriptor."""

    def __init__(self, dtype):
        self.torch = dtype
        self.primitive_bitwidth = dtype.itemsize * 8


class Descriptor:
    """A tensor as the copy engine sees it: boxes, zeros outside of it."""

    def __init__(self, tensor, block):
        self.tensor = tensor
        self.block = block
        self.dtype = ElementType(tensor.dtype)
        self.layout = "descriptor layout"

    def box(self, origin):
        result = torch.zeros(self.block, dtype=self.tensor.dtype)
        source, target = [], []
        for start, size, extent in zip(
            origin, self.block, self.tensor.shape, strict=True
        ):
            low, high = max(start, 0), min(start + size, extent)
            if low >= high:
                return result
            source.append(slice(low, high))
            target.append(slice(low - start, high - start))
        result[tuple(target)] = self.tensor[tuple(source)]
        return result


class Shared:
    """A view of shared memory; matrices are stored in groups of 64 columns."""

    def __init__(self, store, offset, shape, unfenced=None):
        self.store_ = store
        self.offset = offset
        self.shape = list(shape)
        self.dtype = store.dtype
        self.unfenced = unfenced if unfenced is not None else {}

    def index(self, index):
        size = torch.Size(self.shape[1:]).numel()
        if not 0 <= index < self.shape[0]:
            raise IndexError(f"index {index} of shared memory {self.shape}")
        offset = self.offset + int(index) * size
        return Shared(self.store_, offset, self.shape[1:], self.unfenced)

    def permute(self, order):
        return Transposed(self, order)

    def _span(self):
        return self.offset, self.offset + torch.Size(self.shape).numel()

    def _cells(self):
        start, stop = self._span()
        return self.store_[start:stop]

    def read(self):
        cells = self._cells().clone()
        if len(self.shape) == 1:
            return cells
        rows, columns = self.shape[-2:]
        width = min(columns, 64)
        return (
            cells.view(-1, columns // width, rows, width)
            .transpose(1, 2)
            .reshape(self.shape)
        )

    def write(self, value):
        if len(self.shape) > 1:
            rows, columns = self.shape[-2:]
            width = min(columns, 64)
            value = value.reshape(-1, rows, columns // width, width).transpose(1, 2)
        self._cells().copy_(value.reshape(-1))

    def load(self, _layout):
        return self.read()

    def store(self, value):
        if list(value.shape) != self.shape:
            raise ValueError(f"a store of {list(value.shape)} into {self.shape}")
        self.unfenced[self._span()] = threading.get_ident()
        self.write(value.to(self.dtype))

    def operand(self):
        start, stop = self._span()
        if any(a < stop and start < b for a, b in list(self.unfenced)):
            raise RuntimeError("a matrix product reads unfenced shared memory")
        return self.read()


class Transposed:
    """A transposed operand."""

    def __init__(self, memory, order):
        if tuple(order) != (1, 0):
            raise NotImplementedError(order)
        self.memory = memory

    def operand(self):
        return self.memory.operand().T


class Barrier:
    """A barrier in shared memory: arrivals, bytes, and the phase they complete."""

    def __init__(self):
        self.lock = threading.Condition()
        self.count = None
        self.phase = 0

    def init(self, count):
        self.count = self.pending = count
        self.bytes = 0

    def _settle(self):
        if self.pending == 0 and self.bytes == 0:
            self.phase += 1
            self.pending = self.count
            self.lock.notify_all()

    def arrive(self, count, num_bytes=0):
        with self.lock:
            self.pending -= count
            self.bytes += num_bytes
            if self.pending < 0:
                raise RuntimeError("more arrivals than a phase has")
            self._settle()

    def landed(self, num_bytes):
        with self.lock:
            self.bytes -= num_bytes
            self._settle()

    def wait(self, parity, world):
        world.shake()
        with self.lock:
            done = self.lock.wait_for(
                lambda: self.phase % 2 != parity or world.failed, DEADLOCK_S
            )
        if not done or world.failed:
            raise DeadlockError(f"phase {self.phase}, waiting for parity {parity}")


class Barriers:
    """Barriers that are indexed like shared memory."""

    def __init__(self, count):
        self.barriers = [Barrier() for _ in builtins.range(count)]

    def index(self, index):
        return self.barriers[index]


class Product:
    """A matrix product in flight."""

    def __init__(self, a, b, acc, *, use_acc):
        self.a, self.b, self.acc, self.use_acc = a, b, acc, use_acc
        self.issued = self._evaluate(acc.issued if isinstance(acc, Product) else acc)

    def _evaluate(self, acc):
        a = self.a if isinstance(self.a, torch.Tensor) else self.a.operand()
        product = a.float() @ self.b.operand().float()
        return acc + product if self.use_acc else product

    def result(self):
        value = self._evaluate(
            self.acc.result() if isinstance(self.acc, Product) else self.acc
        )
        if not torch.equal(value, self.issued):
            raise RuntimeError(
                "an operand changed while a matrix product was in flight"
            )
        return value


class World:
    """One program (CTA) of a kernel, with its partitions and its copy engine."""

    def __init__(self, program, seed):
        self.program = program
        self.random = random.Random(seed)  # noqa: S311 - not for secrets
        self.failed = []
        self.memories = []
        self.bound = {}
        self.local = threading.local()

    def shake(self):
        if self.random.random() < 0.3:
            time.sleep(self.random.random() * 2e-4)

    # The language.
    int32, int64, float32 = torch.int32, torch.int64, torch.float32
    static_range = staticmethod(builtins.range)
    constexpr = staticmethod(lambda value: value)
    NVMMADistributedLayout = NVMMASharedLayout = staticmethod(lambda *_: None)
    SwizzledSharedLayout = SliceLayout = BlockedLayout = NVMMADistributedLayout
    DotOperandLayout = NVMMADistributedLayout
    MBarrierLayout = staticmethod(lambda: "barrier")
    exp2 = staticmethod(torch.exp2)
    log2 = staticmethod(torch.log2)

    def program_id(self, axis):
        return Scalar(self.program[axis])

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
    def sum(x, axis):
        return x.sum(axis)

    @staticmethod
    def convert_layout(x, _layout):
        return x

    @staticmethod
    def load(pointer, mask=None, other=None):
        return pointer.load(mask, other)

    @staticmethod
    def store(pointer, value, mask=None):
        pointer.store(value, mask)

    def allocate_shared_memory(self, dtype, shape, layout):
        if layout == "barrier":
            return Barriers(shape[0])
        dtype = getattr(dtype, "torch", dtype)
        store = torch.full((torch.Size(shape).numel(),), float("nan"), dtype=dtype)
        memory = Shared(store, 0, shape)
        self.memories.append(memory)
        return memory

    @staticmethod
    def reinterpret(memory, _dtype, shape, _layout):
        if torch.Size(shape).numel() != torch.Size(memory.shape).numel():
            raise ValueError(f"{memory.shape} viewed as {shape}")
        return Shared(memory.store_, memory.offset, shape, memory.unfenced)

    # Hopper.
    @staticmethod
    def init(barrier, count):
        barrier.init(count)

    @staticmethod
    def expect(barrier, num_bytes):
        barrier.arrive(1, num_bytes)

    @staticmethod
    def arrive(barrier, count):
        barrier.arrive(count)

    def wait(self, barrier, parity):
        barrier.wait(int(parity), self)

    def barrier(self):
        self.shake()

    def fence_async_shared(self):
        me = threading.get_ident()
        for memory in self.memories:
            for span, writer in list(memory.unfenced.items()):
                if writer == me:
                    del memory.unfenced[span]

    def async_load(self, descriptor, origin, barrier, memory):
        if list(memory.shape) != list(descriptor.block):
            raise ValueError(f"a box of {descriptor.block} into {memory.shape}")
        memory.write(torch.full(memory.shape, float("nan"), dtype=memory.dtype))
        box = descriptor.box([int(i) for i in origin])

        def land():
            try:
                memory.write(box)
                barrier.landed(box.numel() * box.itemsize)
            except Exception as error:  # noqa: BLE001 - raised by run(), in the caller
                self.failed.append(error)

        threading.Timer(self.random.random() * 1e-3, land).start()

    def warpgroup_mma(self, a, b, acc, *, use_acc=True, is_async=False):
        if not is_async:
            raise NotImplementedError("synchronous products")
        product = Product(a, b, acc, use_acc=use_acc)
        self._in_flight().append(product)
        return product

    def _in_flight(self):
        if not hasattr(self.local, "products"):
            self.local.products = []
        return self.local.products

    def warpgroup_mma_wait(self, outstanding, deps):
        self.shake()
        in_flight = self._in_flight()
        still = in_flight[len(in_flight) - outstanding :] if outstanding else []
        if any(product in still for product in deps):
            raise RuntimeError("a product is used that was not waited for")
        in_flight[:] = still
        results = tuple(product.result() for product in deps)
        return results if len(results) > 1 else results[0]

    def warp_specialize(self, partitions, _warps, _registers):
        threads = [
            threading.Thread(target=self._run, args=partition)
            for partition in partitions
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _run(self, function, arguments):
        try:
            function(*arguments)
        except Exception as error:  # noqa: BLE001 - raised by run(), in the caller
            self.failed.append(error)

    def bind(self, module):
        """A Gluon module's names, its functions and those it imports bound to this."""
        if module.__name__ in self.bound:
            return self.bound[module.__name__]
        names = self.bound[module.__name__] = {"__builtins__": builtins}
        for name, value in vars(module).items():
            source = getattr(value, "fn", None)
            if isinstance(source, types.FunctionType):
                owner = source.__module__
                names[name] = (
                    types.FunctionType(source.__code__, names, name)
                    if owner == module.__name__
                    else self.bind(sys.modules[owner])[source.__name__]
                )
            elif type(value).__name__ == "constexpr":
                names[name] = value.value
            elif not name.startswith("__") and hasattr(type(self), name):
                names[name] = getattr(self, name)
        names.update(gl=self, mbarrier=self, range=self.range)
        return names


def run(module, kernel, grid, arguments, *, seed=0):
    """Execute a module's Gluon kernel over a grid, one program after the other."""
    for y in range(grid[1]):
        for x in range(grid[0]):
            world = World((x, y, 0), seed + 1000 * y + x)
            world.bind(module)[kernel](**arguments)
            if world.failed:
                first = [e for e in world.failed if not isinstance(e, DeadlockError)]
                raise (first or world.failed)[0]
