"""`mla-decode probe rocm_aiter`: try shapes on the GPU, record them, report drift."""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING, Any

from mla_decode import DeviceInfo, Refusal, detect_device
from mla_decode_rocm_aiter.facts import as_simulated, assumed_release, find_facts
from mla_decode_rocm_aiter.probe.record import (
    ProbeResult,
    driver_version,
    record_path,
    write_record,
)
from mla_decode_rocm_aiter.probe.run import TIMEOUT_S, find_drift, probe_shapes
from mla_decode_rocm_aiter.probe.shapes import all_shapes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from mla_decode_rocm_aiter.facts import Facts
    from mla_decode_rocm_aiter.probe.shapes import ProbeShape


def probe(
    device: DeviceInfo | None = None,
    *,
    as_json: bool = False,
    shapes: Iterable[ProbeShape] | None = None,
    timeout_s: float = TIMEOUT_S,
    say: Callable[[str], None] = print,
) -> int:
    """Try shapes one child process at a time, and compare with what is known.

    Args:
        device: The GPU; an assumed device is simulated, its aborts real.
        as_json: Print one JSON object rather than lines.
        shapes: What to try; by default the shapes that serving meets most.
        timeout_s: Time of one shape.
        say: Where lines go.

    Returns:
        0; 1 where a call that is accepted dies or answers wrongly, or where there is
        no AITER to probe.
    """
    device = as_simulated(detect_device() if device is None else device)
    facts = find_facts(device)
    if isinstance(facts, Refusal):
        say(json.dumps({"refused": facts.as_dict()}) if as_json else str(facts))
        return 1
    simulated = None
    if device.assumed:
        simulated = {"arch": device.arch, "release": assumed_release(device)}
    results = []
    for result in probe_shapes(
        all_shapes() if shapes is None else shapes,
        simulated=simulated,
        timeout_s=timeout_s,
    ):
        results.append(result)
        if not as_json:
            say(f"{result.outcome:7} {result.shape} {result.detail}".rstrip())
    driver = "simulated" if device.assumed else driver_version()
    path = record_path(facts.release, facts.arch, driver)
    write_record(path, results)
    return _report(facts, results, str(path), as_json=as_json, say=say)


def _report(
    facts: Facts,
    results: list[ProbeResult],
    path: str,
    *,
    as_json: bool,
    say: Callable[[str], None],
) -> int:
    defects: tuple[ProbeResult, ...] = ()
    stale: tuple[ProbeResult, ...] = ()
    if facts.profile is not None:
        drift = find_drift(facts, results)
        defects, stale = drift.defects, drift.stale
    counts = dict(Counter(result.outcome for result in results))
    if as_json:
        report: dict[str, Any] = {
            "release": facts.release,
            "arch": facts.arch,
            "known": facts.profile is not None,
            "counts": counts,
            "defects": [result.as_dict() for result in defects],
            "stale": [result.as_dict() for result in stale],
            "record": path,
        }
        say(json.dumps(report, indent=2))
    else:
        say(f"AITER {facts.release} on {facts.arch}: {counts}; recorded in {path}")
        for result in defects:
            say(f"defect: accepted, but {result.outcome}: {result.shape}")
        for result in stale:
            say(f"stale profile: refused, but works: {result.shape}")
    return 1 if defects else 0
