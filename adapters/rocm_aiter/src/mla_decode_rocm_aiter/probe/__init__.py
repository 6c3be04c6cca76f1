"""Try AITER's calls where a death costs nothing, and remember what they did."""

from __future__ import annotations

from mla_decode_rocm_aiter.probe.command import probe
from mla_decode_rocm_aiter.probe.record import (
    ProbeResult,
    driver_version,
    read_record,
    record_path,
    write_record,
)
from mla_decode_rocm_aiter.probe.run import Drift, find_drift, probe_shapes
from mla_decode_rocm_aiter.probe.shapes import ProbeShape, all_shapes

__all__ = [
    "Drift",
    "ProbeResult",
    "ProbeShape",
    "all_shapes",
    "driver_version",
    "find_drift",
    "probe",
    "probe_shapes",
    "read_record",
    "record_path",
    "write_record",
]
