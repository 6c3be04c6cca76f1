"""AITER's Python surface on a CPU. It executes schedules; it never ran on AMD hardware.

What is dispatched follows the release's own host code, in which it agrees with every
recorded call. What a kernel computes is the definition of attention, with the faults
that AITER's source shows; kernels' own numerics were never measured.
"""

from __future__ import annotations

from mla_decode_rocm_aiter.simulation import VARIABLE, read_variable
from mla_decode_rocm_aiter.simulator.faults import (
    Faults,
    SimulatedAbort,
    SimulatedMemoryFault,
)
from mla_decode_rocm_aiter.simulator.machine import Launch, Machine
from mla_decode_rocm_aiter.simulator.modules import install, make_modules, simulated

__all__ = [
    "VARIABLE",
    "Faults",
    "Launch",
    "Machine",
    "SimulatedAbort",
    "SimulatedMemoryFault",
    "install",
    "make_modules",
    "read_variable",
    "simulated",
]
