"""The parent: asks for one child process a shape, and compares with the profile."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mla_decode_rocm_aiter.probe.record import ProbeResult

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from mla_decode_rocm_aiter.facts import Facts
    from mla_decode_rocm_aiter.probe.shapes import ProbeShape

TIMEOUT_S = 300.0
"""A shape's time: AITER may compile on first use."""


def probe_shapes(
    shapes: Iterable[ProbeShape],
    *,
    simulated: dict[str, Any] | None = None,
    timeout_s: float = TIMEOUT_S,
) -> Iterator[ProbeResult]:
    """Try each shape in a process of its own.

    Args:
        shapes: What to try.
        simulated: `arch` and `release` of a simulated AITER whose aborts are real;
            None uses the GPU.
        timeout_s: After which a child counts as hanging and is killed.
    """
    command = [sys.executable, "-m", "mla_decode_rocm_aiter.probe.zygote"]
    with subprocess.Popen(  # noqa: S603 - our own module, no arguments
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as zygote:
        if zygote.stdin is None or zygote.stdout is None:
            raise RuntimeError("the probe's first process has no pipes")
        for shape in shapes:
            asked = {
                "shape": shape.as_dict(),
                "simulated": simulated,
                "timeout_s": timeout_s,
            }
            zygote.stdin.write(json.dumps(asked) + "\n")
            zygote.stdin.flush()
            answer = zygote.stdout.readline()
            if not answer:
                raise RuntimeError("the probe's first process died; see its messages")
            said = json.loads(answer)
            yield ProbeResult(
                shape=shape, outcome=said["outcome"], detail=said["detail"]
            )
        zygote.stdin.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """Where a known release is not what its profile says."""

    defects: tuple[ProbeResult, ...]
    """Dispatched by the profile, and it dies or answers wrongly."""
    stale: tuple[ProbeResult, ...]
    """Refused by the profile, and it works."""


def find_drift(facts: Facts, results: Iterable[ProbeResult]) -> Drift:
    """Compare a probe with the profile of the probed release."""
    from mla_decode import Mask, Refusal  # noqa: PLC0415 - beside the adapter's own
    from mla_decode_rocm_aiter.limits import (  # noqa: PLC0415 - as above
        LeavingVariables,
        kernel_limits,
    )

    variables = LeavingVariables.read()
    defects: list[ProbeResult] = []
    stale: list[ProbeResult] = []
    for result in results:
        shape = result.shape
        dtypes = (shape.q_dtype, shape.kv_dtype)
        found = facts.resolve(
            shape.heads,
            shape.q,
            dtypes,
            persistent=True,
            causal=shape.causal,
            lse=shape.lse,
        )
        works = result.outcome == "works"
        if isinstance(found, Refusal):
            if works:
                stale.append(result)
            continue
        mask = Mask.CAUSAL if shape.causal else Mask.NON_CAUSAL
        limits = kernel_limits(
            facts, found, dtypes, mask, persistent=True, variables=variables
        )
        if not works and not limits:
            defects.append(result)
    return Drift(defects=tuple(defects), stale=tuple(stale))
