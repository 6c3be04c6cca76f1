"""The contract's dtype words in torch's terms."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from mla_decode.device import DeviceInfo

_TORCH = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

FP8_DTYPES = frozenset({torch.float8_e4m3fn, torch.float8_e4m3fnuz})
"""The two encodings of fp8 e4m3; which one a device uses depends on its arch."""


_FNUZ_ARCHS = frozenset({"gfx940", "gfx941", "gfx942"})


def fp8_dtype(device: DeviceInfo) -> torch.dtype:
    """The fp8 e4m3 encoding of the device: fnuz on gfx942 and its kin, fn elsewhere.

    By the whole name: gfx950 has the other encoding, and prefixes have misled before.
    """
    if device.arch in _FNUZ_ARCHS:
        return torch.float8_e4m3fnuz
    return torch.float8_e4m3fn


def torch_dtype(name: str, device: DeviceInfo) -> torch.dtype:
    """The torch dtype of ``bf16 fp16 fp32 fp8`` on this device."""
    return fp8_dtype(device) if name == "fp8" else _TORCH[name]
