"""Runs the source of the Gluon kernels on a CPU, and judges every access it makes.

Gluon has no interpreter, but the bodies of its kernels are Python functions. They are
executed here in a namespace where `gl` computes with torch, shared memory is elements
laid out as the hardware's 128-byte swizzle groups them, barriers have phases and
transaction counts, and copies land late and in any order.

What is checked: every access of shared memory is ordered after those that it conflicts
with (`races`), stores are fenced before an engine reads them, barriers count what they
should (`barriers`), a phase that nobody completes is a deadlock, 32-bit scalars stay in
32 bits, and no address is outside of its tensor. Registers, layouts and speed are not
modelled.
"""

from .binding import Binder, run, source_tree
from .language import World
from .races import DeadlockError, RaceError, SimulationError
from .tensors import Descriptor, Pointer, flat

__all__ = [
    "Binder",
    "DeadlockError",
    "Descriptor",
    "Pointer",
    "RaceError",
    "SimulationError",
    "World",
    "flat",
    "run",
    "source_tree",
]
