"""Values, graphs and synchronisations of the FlashMLA adapter against the oracle."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from cuda_flashmla_steps import (
    SCALE,
    TOLERANCE,
    Step,
    make_problem,
    make_step,
    outputs_for,
    worst_error,
)

from mla_decode_cuda_flashmla import backend

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from mla_decode import DecodeMetadata, DecodeOutput, DeviceInfo

CASES: list[dict[str, Any]] = [
    {"H": heads, "Q": query_len, "lens": lens}
    for heads, query_len, lens in (
        (16, 1, [1, 63, 64, 65, 4097, 0]),
        (16, 4, [4, 64, 67, 1000, 0, 0]),
        (128, 1, [5000, 3, 0, 777]),
        (128, 2, [3, 500, 9000]),
        (128, 8, [8, 700, 64, 0]),
        (1, 1, [300, 0, 2]),
        (1, 70, [70, 3000, 129]),
        (3, 5, [130, 127, 9]),
        (96, 3, [64, 65, 66, 2000]),
        (112, 7, [800, 7]),
        (16, 32, [4096, 32]),
        (128, 66, [66, 4000]),
        (8448, 1, [100, 2000]),
        (16, 1, [0, 0, 0]),
        (64, 1, [0, 5, 0, 9, 0]),
        (16, 1, [20 * i for i in range(1, 200)]),
        (16, 2, [65536, 2, 40000]),
    )
]
EXTRA: list[dict[str, Any]] = [
    {"H": 16, "Q": 2, "lens": [900, 64], "kv_page_stride": 64 * 576 + 8},
    {"H": 16, "Q": 2, "lens": [900, 64], "kv_page_stride": 2 * 64 * 576},
    {"H": 16, "Q": 2, "lens": [577], "scale": 1e-5},
    {"H": 1, "Q": 2, "lens": [577, 65], "scale": 3e-4},
    {"H": 16, "Q": 1, "lens": [3000, 64], "num_pages": 130_000},
]


def run_values(device: DeviceInfo, dtypes: tuple[str, ...], *, small: bool) -> Any:
    """Every case in every dtype; each call twice, bit-equal."""
    rows = []
    for dtype in dtypes:
        for case in [*CASES, *EXTRA]:
            if (small and sum(case["lens"]) > 6000) or ("num_pages" in case and small):
                continue
            row = _run_case(device, dtype, case)
            if row is not None:
                rows.append(row)
    failed = [row for row in rows if not row["ok"]]
    worst = {
        dtype: max(row["out"] for row in rows if row["dtype"] == dtype)
        for dtype in dtypes
    }
    return {"cases": len(rows), "failed": failed, "worst_out": worst}


def _run_case(
    device: DeviceInfo, dtype: str, case: dict[str, Any]
) -> dict[str, Any] | None:
    problem = make_problem(
        num_q_heads=case["H"],
        q_dtype=dtype,
        query_lens={case["Q"]},
        needs_lse=True,
        max_model_len=max(*case["lens"], case["Q"], 64),
        kv_page_stride=case.get("kv_page_stride"),
    )
    if backend.refusals(problem, device):
        return None
    scale = case.get("scale", SCALE)
    step = make_step(
        problem, case["lens"], case["Q"], device, num_pages=case.get("num_pages", 0)
    )
    builder = backend.builder_cls(problem, device)
    metadata = builder.build(step.common)
    first = _forward(step, metadata, scale, outputs_for(step))
    again = _forward(step, metadata, scale)
    errors = worst_error(first.out, first.lse, step, scale)
    same = torch.equal(first.out, again.out)
    if first.lse is not None and again.lse is not None:
        same = same and torch.equal(first.lse, again.lse)
    ok = errors["out"] <= TOLERANCE[dtype] and errors["lse"] <= 5e-4
    label = {key: case[key] for key in case if key != "lens"}
    label |= {"B": len(case["lens"]), "longest": max(case["lens"])}
    return {
        "dtype": dtype,
        **label,
        **errors,
        "bit_equal": same,
        "ok": ok and same and not errors["empty"],
    }


def _forward(
    step: Step,
    metadata: DecodeMetadata,
    scale: float,
    outputs: dict[str, Tensor] | None = None,
) -> DecodeOutput:
    return backend.forward(
        step.q, step.kv, metadata, softmax_scale=scale, **step.scales, **(outputs or {})
    )


def run_graphs(device: DeviceInfo, dtype: str, *, replays: int = 60) -> Any:
    """Capture three layers after an eager warm-up, then grow and replay.

    Builds in between fill the buffers that the graph reads. A second graph is captured
    from the same metadata and replayed alone at the end.
    """
    results = []
    for heads, query_len, batch in ((16, 1, 16), (16, 4, 8), (128, 2, 4)):
        problem = make_problem(
            num_q_heads=heads,
            q_dtype=dtype,
            query_lens={query_len},
            needs_lse=True,
            graphs=True,
            max_num_reqs=batch,
            max_model_len=4096,
        )
        start = [query_len + 13 * i for i in range(batch - 1)] + [0]
        step = make_step(problem, start, query_len, device, capacity=2600)
        builder = backend.builder_cls(problem, device)
        with no_synchronisation(device):
            metadata = builder.build_for_capture(step.common)
            outputs = [outputs_for(step) for _ in range(3)]
            for target in outputs:
                _forward(step, metadata, SCALE, target)
        graphs = [_capture(device, step, metadata, outputs) for _ in range(2)]
        worst = {"out": 0.0, "lse": 0.0, "empty": 0.0}
        for replay in range(replays + 1):
            lens = [n + 31 * replay if n else 0 for n in start]
            lens[replay % (batch - 1)] = query_len if replay % 5 else 0
            grown = step.with_lens(lens)
            with no_synchronisation(device):
                builder.build(grown.common)
                for target in outputs:
                    for tensor in target.values():
                        tensor.fill_(torch.nan)
                graphs[replay == replays].replay()
            check = (0, 2) if replay % 6 == 0 or replay == replays else (2,)
            for index in check:
                target = outputs[index]
                errors = worst_error(target["out"], target.get("lse"), grown)
                worst = {name: max(worst[name], errors[name]) for name in worst}
        ok = worst["out"] <= TOLERANCE[dtype] and worst["lse"] <= 5e-4
        results.append(
            {
                "H": heads,
                "Q": query_len,
                "B": batch,
                "replays": replays + 1,
                **worst,
                "ok": ok and not worst["empty"],
            }
        )
    return results


def _capture(
    device: DeviceInfo, step: Step, metadata: DecodeMetadata, outputs: list[Any]
) -> Any:
    if device.assumed:
        from mla_decode_cuda_flashmla.simulator import (  # noqa: PLC0415 - dry runs only
            SimulatedGraph,
        )

        graph = SimulatedGraph()
        with graph.capture():
            for target in outputs:
                _forward(step, metadata, SCALE, target)
        return graph
    torch.cuda.synchronize()
    recorded = torch.cuda.CUDAGraph()
    with torch.cuda.graph(recorded):
        for target in outputs:
            _forward(step, metadata, SCALE, target)
    return recorded


@contextmanager
def no_synchronisation(device: DeviceInfo) -> Iterator[None]:
    """Make torch raise on any host-device synchronisation within the block."""
    if device.assumed:
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
