"""What stands where FlashMLA should: absent, shadowed, doubled, or without Hopper."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

from mla_decode.diagnosis import Finding, Level
from mla_decode.diagnosis.places import standing_findings
from mla_decode.diagnosis.torch_build import wrong_torch
from mla_decode.refusal import Refusal, RefusalCode
from mla_decode_cuda_flashmla.library import look_up
from mla_decode_cuda_flashmla.limits import ARCH

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mla_decode.device import DeviceInfo

_MODULE = "flash_mla"


def diagnose(device: DeviceInfo) -> Iterator[Finding]:
    """Say what is found, the answer that imports the library last."""
    served = device.arch == ARCH
    wrong = Level.ERROR if served else Level.WARN
    yield Finding(
        level=Level.OK,
        what="note: upstream FlashMLA left Hopper with its release of 2026-09-30; dense "
        "decode lives on in tokenspeed-flashmla, sgl-flash-mla and vLLM's copies",
    )
    spec = importlib.util.find_spec(_MODULE)
    if spec is not None and spec.origin is None:
        where = ", ".join(spec.submodule_search_locations or ())
        yield Finding(
            level=Level.ERROR,
            what=f"a folder named {_MODULE} without __init__.py is taken for FlashMLA",
            got=where,
            fix=f"rename {where} or run from another folder",
        )
        return
    yield from standing_findings(_MODULE, wrong)
    if spec is not None:
        torch = wrong_torch("FlashMLA", "cuda", wrong)
        if torch is not None:
            yield torch
    found = look_up()
    if isinstance(found, Refusal):
        absent = found.code is RefusalCode.DEPENDENCY
        if absent and not served:
            what = f"{found.message}; this device does not need it"
            yield Finding(level=Level.OK, what=what)
        else:
            level = Level.WARN if absent else wrong
            yield Finding(level=level, what=found.message, got=found.got, fix=found.fix)
    else:
        yield Finding(
            level=Level.OK,
            what=f"FlashMLA {found.version} ({found.distribution})",
            got=found.module,
        )
