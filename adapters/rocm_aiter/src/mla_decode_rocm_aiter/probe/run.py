"""The parent: a child process a shape, its death an entry in the record."""

from __future__ import annotations

import json
import signal
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
    for shape in shapes:
        yield probe_one(shape, simulated=simulated, timeout_s=timeout_s)


def probe_one(
    shape: ProbeShape, *, simulated: dict[str, Any] | None, timeout_s: float
) -> ProbeResult:
    """Try one shape."""
    command = [sys.executable, "-m", "mla_decode_rocm_aiter.probe.child"]
    command.append(json.dumps(shape.as_dict()))
    if simulated is not None:
        command.append(json.dumps(simulated))
    try:
        done = subprocess.run(  # noqa: S603 - our own module, our own arguments
            command, capture_output=True, text=True, check=False, timeout=timeout_s
        )
    except subprocess.TimeoutExpired:
        detail = f"no answer after {timeout_s:g} s"
        return ProbeResult(shape=shape, outcome="hangs", detail=detail)
    lines = done.stdout.strip().splitlines()
    if done.returncode == 0 and lines:
        said = json.loads(lines[-1])
        return ProbeResult(shape=shape, outcome=said["outcome"], detail=said["detail"])
    last = (done.stderr.strip().splitlines() or [""])[-1]
    return ProbeResult(
        shape=shape, outcome="dies", detail=f"{_ending(done.returncode)}: {last}"
    )


def _ending(code: int) -> str:
    if code >= 0:
        return f"exit {code}"
    return f"signal {signal.Signals(-code).name}"


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
    from mla_decode_rocm_aiter.limits import kernel_limits  # noqa: PLC0415 - as above

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
        is_limited = bool(kernel_limits(facts, found, dtypes, mask, persistent=True))
        if not works and not is_limited:
            defects.append(result)
    return Drift(defects=tuple(defects), stale=tuple(stale))
