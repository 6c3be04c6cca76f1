"""The simulator against the library, call by call: schedules, values, LSE, rejections."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch
from cuda_flashmla_steps import SCALE, make_problem, make_step

from mla_decode import DeviceInfo
from mla_decode_cuda_flashmla import simulator
from mla_decode_cuda_flashmla.library import library_for
from mla_decode_cuda_flashmla.limits import FP8_LSE_ERROR

if TYPE_CHECKING:
    from cuda_flashmla_steps import Step

    from mla_decode_cuda_flashmla.inspection import Library


def simulated_library(installed: Library) -> Library:
    """The simulation of the installed library's form."""
    if installed.fp8 is not None:
        return simulator.library({"sgl-flash-mla": "1.0.0"})
    year = "2026.4" if installed.dense.form == "sched_meta" else "2025.4"
    return simulator.library({"flash-mla": year})


def run_differential(
    device: DeviceInfo, count: int, *, small: bool, seed: int
) -> dict[str, Any]:
    """Draw problems, make the same raw call of both, and compare.

    Every fifth problem reuses its schedule over longer lengths: both must be wrong in
    the same way.
    """
    installed = library_for(device)
    simulated = simulated_library(installed)
    generator = torch.Generator().manual_seed(seed)
    tally: dict[str, Any] = {
        "problems": 0,
        "schedules_equal": 0,
        "schedules_compared": 0,
        "worst_out": 0.0,
        "infinities_differ": 0,
        "stale_problems": 0,
        "stale_worst_out": 0.0,
        "stale_wrong": 0,
        "failures": [],
    }
    for number in range(count):
        drawn = _draw(generator, small=small, fp8=installed.fp8 is not None)
        step = _step(drawn, device)
        ours = _raw(simulated, step, drawn)
        theirs = _raw(installed, step, drawn)
        tally["problems"] += 1
        _compare_schedules(tally, drawn, ours[2], theirs[2])
        _compare(tally, drawn, ours[:2], theirs[:2], "worst_out")
        if number % 5 == 0 and drawn["dtype"] != "fp8":
            grown = step.with_lens([n + 200 if n else 0 for n in drawn["lens"]])
            stale = _raw(simulated, grown, drawn, ours[2])
            wrong = _raw(installed, grown, drawn, theirs[2])
            fresh = _raw(simulated, grown, drawn)
            tally["stale_problems"] += 1
            moved = (fresh[0].float() - stale[0].float()).abs().nan_to_num(1.0)
            tally["stale_wrong"] += bool((moved > 0.05).any())
            _compare(tally, drawn, stale[:2], wrong[:2], "stale_worst_out")
    return tally


def _draw(generator: torch.Generator, *, small: bool, fp8: bool) -> dict[str, Any]:
    def pick(*options: Any) -> Any:
        return options[int(torch.randint(len(options), (), generator=generator))]

    heads = pick(1, 3, 8, 16, 16, 20, 32, 48, 64, 96, 128)
    query_len = pick(1, 1, 1, 2, 3, 4, 5, 8)
    batch = pick(1, 2, 3, 5, 9) if small else pick(1, 2, 3, 5, 9, 17, 33)
    median = pick(30, 130, 600) if small else pick(30, 130, 600, 2500)
    spread = torch.randn(batch, generator=generator)
    lens = [
        min(max(int(median * math.exp(float(s))), query_len), 700 if small else 9000)
        for s in spread
    ]
    dtype = pick("bf16", "bf16", "bf16", "fp16", "fp8" if fp8 else "fp16")
    if dtype != "fp8":
        lens = [0 if pick(*range(8)) == 0 else n for n in lens]
    return {
        "H": heads,
        "Q": query_len,
        "lens": lens,
        "dtype": dtype,
        "causal": pick(True, True, False),
        "scale": pick(SCALE, SCALE, 0.02, 0.4),
    }


def _step(drawn: dict[str, Any], device: DeviceInfo) -> Step:
    problem = make_problem(
        num_q_heads=drawn["H"], q_dtype=drawn["dtype"], query_lens={drawn["Q"]}
    )
    capacity = max(drawn["lens"]) + 200
    step = make_step(problem, drawn["lens"], drawn["Q"], device, capacity=capacity)
    clean = step.q.float().nan_to_num(0.5).to(step.q.dtype)
    return step.__class__(**{**vars(step), "q": clean})


def _raw(
    library: Library, step: Step, drawn: dict[str, Any], schedule: Any = None
) -> tuple[Any, Any, Any]:
    kernel = library.decode_for(drawn["dtype"])
    if kernel is None:
        raise LookupError(f"{library.distribution} has no kernel for {drawn['dtype']}")
    batch, heads = len(drawn["lens"]), drawn["H"]
    if schedule is None:
        schedule = kernel.plan(step.common.seq_lens, drawn["Q"] * heads)
    bound = kernel.bind(
        step.common.block_table_tensor,
        step.common.seq_lens,
        schedule,
        drawn["causal"],
    )
    scales = {}
    if drawn["dtype"] == "fp8":
        scales = {
            "descale_q": step.scales["q_scale"],
            "descale_k": step.scales["kv_scale"],
        }
    out, lse = bound(
        q=step.q.view(batch, drawn["Q"], heads, 576),
        k_cache=step.kv.unsqueeze(2),
        softmax_scale=drawn["scale"],
        **scales,
    )
    return out, lse, schedule


def _compare_schedules(
    tally: dict[str, Any], drawn: dict[str, Any], ours: Any, theirs: Any
) -> None:
    pairs = [_schedule_tensors(ours), _schedule_tensors(theirs)]
    tally["schedules_compared"] += 1
    batch = len(drawn["lens"])
    columns = 5 if drawn["dtype"] == "fp8" else 7
    same = all(
        torch.equal(_used(a, batch, columns), _used(b, batch, columns))
        for a, b in zip(*pairs, strict=True)
    )
    tally["schedules_equal"] += same


def _schedule_tensors(schedule: Any) -> list[Any]:
    if isinstance(schedule, dict):
        schedule = schedule["tile_scheduler_metadata"]
    if isinstance(schedule, tuple):
        return list(schedule)
    return [schedule.tile_scheduler_metadata, schedule.num_splits]


def _used(tensor: Any, batch: int, columns: int) -> Any:
    """Without the padding, and without lists that have no work: those hold leftovers."""
    if tensor.dim() == 1:
        return tensor
    return tensor[tensor[:, 0] < batch, :columns]


def _compare(
    tally: dict[str, Any], drawn: dict[str, Any], ours: Any, theirs: Any, key: str
) -> None:
    out, lse = (tensor.float() for tensor in ours)
    other, other_lse = (tensor.float() for tensor in theirs)
    known = ~out.isnan().any(dim=-1)  # rows that the schedule leaves unwritten
    finite = known.transpose(1, 2) & lse.isfinite()
    tally["infinities_differ"] += int(
        ((lse == math.inf) != (other_lse == math.inf))[known.transpose(1, 2)].sum()
    )
    gap = (out - other).norm(dim=-1)[known]
    size = out.norm(dim=-1)[known].clamp(min=1e-6)
    worst = float((gap / size).max()) if gap.numel() else 0.0
    lse_gap = (lse - other_lse).abs()[finite]
    worst_lse = float(lse_gap.max()) if lse_gap.numel() else 0.0
    limit, lse_limit = {"bf16": (8e-3, 1e-3), "fp16": (1e-3, 1e-3)}.get(
        drawn["dtype"], (0.06 + FP8_LSE_ERROR * drawn["scale"],) * 2
    )
    if not (worst <= limit and worst_lse <= lse_limit):
        tally["failures"].append({**drawn, key: worst, "lse": worst_lse})
    name = key + "_fp8" if drawn["dtype"] == "fp8" else key
    tally[name] = max(tally.get(name, 0.0), worst)
    key = key.removesuffix("out") + "lse"
    if drawn["dtype"] == "fp8":
        key += "_fp8"
        worst_lse /= drawn["scale"]
    tally[key] = max(tally.get(key, 0.0), worst_lse)


REJECTED = {
    "page of 32 tokens": {"page_size": 32},
    "query wider than the cache's dtype": {"q_dtype": "float16"},
    "float table": {"table_dtype": "float32"},
    "int64 lengths": {"lens_dtype": "int64"},
    "strided q": {"q_step": 2},
    "head width 512": {"width": 512},
    "11622 requests": {"batch": 11622},
    "11623 requests": {"batch": 11623},
    "page stride of 36873": {"page_stride": 36873},
    "cache at an odd address": {"offset": 1},
}
"""Raw calls that the library refuses in one way or another, and one that it serves."""


def run_rejections(*, on_card: bool) -> list[dict[str, Any]]:
    """Each call in a process of its own, by the library and by the simulator."""

    def outcome(name: str, which: str) -> str:
        child = subprocess.run(  # noqa: S603 - this file, in a process that may end
            [sys.executable, __file__, which, json.dumps(REJECTED[name])],
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        if child.returncode:
            return f"exit {child.returncode}"
        return child.stdout.strip().splitlines()[-1]

    sides = ("library", "simulator") if on_card else ("simulator",)
    jobs = [(name, which) for name in REJECTED for which in sides]
    with ThreadPoolExecutor(8 if on_card else 1) as pool:
        answers = list(pool.map(lambda job: outcome(*job), jobs))
    by_name: dict[str, dict[str, Any]] = {name: {"call": name} for name in REJECTED}
    for (name, which), answer in zip(jobs, answers, strict=True):
        by_name[name][which] = answer
    return list(by_name.values())


def make_rejected_call(
    which: str,
    *,
    page_size: int = 64,
    q_dtype: str = "bfloat16",
    table_dtype: str = "int32",
    lens_dtype: str = "int32",
    q_step: int = 1,
    width: int = 576,
    batch: int = 2,
    page_stride: int = 0,
    offset: int = 0,
) -> str:
    """Make one raw call and say how it ended; a child may not live to say so."""
    if which == "library":
        device = DeviceInfo(vendor="cuda", arch="sm_90")
        found, where = library_for(device), "cuda"
    else:
        found, where = simulator.library({"flash-mla": "2026.4"}), "cpu"
    stride = page_stride or page_size * width
    flat = torch.zeros(4 * stride + offset, dtype=torch.bfloat16, device=where)
    cache = flat[offset:].as_strided(
        (4, page_size, 1, width), (stride, width, width, 1), offset
    )
    q = torch.zeros(
        (batch, 1, 16, width * q_step), dtype=getattr(torch, q_dtype), device=where
    )[..., ::q_step]
    lens = torch.ones(batch, dtype=getattr(torch, lens_dtype), device=where)
    table = torch.zeros((batch, 1), dtype=getattr(torch, table_dtype), device=where)
    try:
        kernel = found.dense
        schedule = kernel.plan(lens, 16)
        kernel.bind(table, lens, schedule, True)(q=q, k_cache=cache, softmax_scale=0.1)
        if where == "cuda":
            torch.cuda.synchronize()
    except (RuntimeError, AssertionError) as error:
        return type(error).__name__
    return "served"


if __name__ == "__main__":
    print(make_rejected_call(sys.argv[1], **json.loads(sys.argv[2])))
