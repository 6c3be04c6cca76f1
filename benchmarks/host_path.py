"""Python's share of `build` and `forward`, on a CPU, with kernels that do nothing.

Counts torch's operators (views too: each is a call into torch) and microseconds of one
build and one forward over tiny tensors. The kernel libraries are replaced by functions
that return at once, so that what is left is the host's way to them. A GPU's driver, its
launches and its allocator are not in these figures.

    python benchmarks/host_path.py [--repeats 2000] [--json]
"""

from __future__ import annotations

import gc
import json
import statistics
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer
from torch.utils._python_dispatch import TorchDispatchMode

from mla_decode import (
    CommonAttentionMetadata,
    DecodeProblem,
    DeviceInfo,
    Mask,
    discover,
)
from mla_decode_triton import chosen_backend

if TYPE_CHECKING:
    from collections.abc import Callable

NUM_REQS, QUERY_LEN, HEADS, PAGE_SIZE, MODEL_LEN = 4, 4, 16, 64, 512
SCALE = 192**-0.5


@dataclass(frozen=True, kw_only=True)
class Case:
    """A backend, and what is asked of a call."""

    backend: str
    arch: str
    graphs: bool = False
    needs_lse: bool = False
    passes_out: bool = False

    @property
    def label(self) -> str:
        """One line's beginning."""
        flags = ("graphs", "needs_lse", "passes_out")
        asked = " ".join(name for name in flags if getattr(self, name))
        return f"{self.backend:13} {asked or 'plain':26}"


CASES = tuple(
    Case(backend=name, arch=arch, **words)
    for name, arch in (
        ("triton_mla", "sm_90"),
        ("hopper", "sm_90"),
        ("cuda_flashmla", "sm_90"),
        ("rocm_aiter", "gfx950"),
    )
    for words in (
        {},
        {"graphs": True},
        {"graphs": True, "needs_lse": True},
        {"graphs": True, "needs_lse": True, "passes_out": True},
    )
)


def main(
    *,
    repeats: Annotated[int, typer.Option(help="Calls timed.")] = 2000,
    as_json: Annotated[bool, typer.Option("--json", help="One object.")] = False,
) -> None:
    """Print operators and microseconds of a build and of a forward, case by case."""
    torch.set_num_threads(1)
    found = [{**vars(case), **measure(case, repeats)} for case in CASES]
    if as_json:
        print(json.dumps(found))
        return
    for case, item in zip(CASES, found, strict=True):
        print(
            case.label,
            f"build {item['build_ops']:2} operators {item['build_us']:5.1f} us   "
            f"forward {item['forward_ops']:2} operators {item['forward_us']:5.1f} us",
        )


def measure(case: Case, repeats: int) -> dict[str, float]:
    """Operators and microseconds of one build and of a step's later layers."""
    device = DeviceInfo.assume(case.arch)
    backend: Any = _backend(case.backend)
    problem = DecodeProblem(
        num_q_heads=HEADS,
        page_size=PAGE_SIZE,
        query_lens={QUERY_LEN},
        masks={Mask.CAUSAL},
        graphs=case.graphs,
        needs_lse=case.needs_lse,
        max_num_reqs=2 * NUM_REQS,
        max_model_len=MODEL_LEN,
    )
    with torch.inference_mode():
        builder = backend.builder_cls(problem, device)
        STILL[case.backend](builder)
        common = batch()
        metadata = builder.build(common)
        rows = NUM_REQS * QUERY_LEN
        q = torch.zeros(rows, HEADS, 576, dtype=torch.bfloat16)
        cache = torch.zeros(8, PAGE_SIZE, 576, dtype=torch.bfloat16)
        outputs: dict[str, torch.Tensor] = {}
        if case.passes_out:
            outputs = {
                "out": torch.zeros(rows, HEADS, 512, dtype=torch.bfloat16),
                "lse": torch.zeros(rows, HEADS),
            }

        def build() -> object:
            return builder.build(common)

        def forward() -> object:
            return backend.forward(q, cache, metadata, softmax_scale=SCALE, **outputs)

        built, build_us = count(build), timed(build, repeats)
        metadata = builder.build(common)
        forward()  # the first layer is checked in full
        return {
            "build_ops": built,
            "build_us": build_us,
            "forward_ops": count(forward),
            "forward_us": timed(forward, repeats),
        }


def _backend(name: str) -> Any:
    """A backend; ``triton_mla`` is its portable kernel, ``hopper`` its other one."""
    kernels = {"triton_mla": "portable", "hopper": "hopper"}
    if name in kernels:
        return chosen_backend(kernels[name])
    return discover()[name].backend


def batch() -> CommonAttentionMetadata:
    """A full uniform batch; an engine's table is wider than the step needs."""
    starts = torch.arange(NUM_REQS + 1, dtype=torch.int32) * QUERY_LEN
    return CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=torch.full((NUM_REQS,), 300, dtype=torch.int32),
        num_reqs=NUM_REQS,
        num_actual_tokens=NUM_REQS * QUERY_LEN,
        max_query_len=QUERY_LEN,
        max_seq_len=300,
        block_table_tensor=torch.zeros(NUM_REQS, 8, dtype=torch.int32),
        causal=True,
    )


class Counter(TorchDispatchMode):
    """Counts the operators that reach the dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Note the operator and run it."""
        del types
        self.ops.append(str(func))
        return func(*args, **(kwargs or {}))


def count(call: Callable[[], object]) -> int:
    """Operators of one call."""
    with Counter() as counter:
        call()
    return len(counter.ops)


def timed(call: Callable[[], object], repeats: int) -> float:
    """Median microseconds of a call, the collector off."""
    took = []
    gc.disable()
    for _ in range(repeats):
        begin = time.perf_counter()
        call()
        took.append(1e6 * (time.perf_counter() - begin))
    gc.enable()
    return statistics.median(took)


# --- kernels that return at once ------------------------------------------------------


def _do_nothing(*_: object, **__: object) -> None:
    return None


def _still_triton(builder: Any) -> None:
    """Every launch takes the way of aligned tensors, as on an NVIDIA GPU."""
    bind = builder.launcher.bind

    def bound(*args: Any, **words: Any) -> Any:
        step = bind(*args, **words)
        still = {"decode": replace(step.decode, directly=_do_nothing)}
        if step.merge is not None:
            still["merge"] = replace(step.merge, directly=_do_nothing)
        return replace(step, **still)

    builder.launcher.bind = bound


def _still_hopper(builder: Any) -> None:
    """Every launch goes straight to a driver that does nothing, as on the card."""
    from mla_decode_triton.hopper import direct, variants  # noqa: PLC0415 - loads Triton
    from mla_decode_triton.hopper.compat import DriverRun  # noqa: PLC0415 - as above

    def encode(_index: int, box: Any) -> tuple[Any, ...]:
        return object(), *box.shape, *box.strides

    def driver_run(_compiled: object, _num_boxes: int) -> DriverRun:
        return DriverRun(_do_nothing, encode)

    vars(direct)["driver_run"] = driver_run
    for name in ("plan", "swap", "asym", "merge", "merge_rows"):
        kernel = getattr(variants, f"{name}_kernel")
        if not isinstance(kernel, _StillKernel):
            setattr(variants, f"{name}_kernel", _StillKernel(kernel))
    builder.has_only_gpu = True


class _StillKernel:
    """A kernel of Triton's whose front door gives something compiled and runs nothing."""

    def __init__(self, kernel: Any) -> None:
        self.arg_names, self.params = kernel.arg_names, kernel.params

    def __getitem__(self, _grid: object) -> Callable[..., object]:
        return lambda *_, **__: self


class _StillDecode:
    """FlashMLA's 2026 form, whose kernel returns the same two tensors every time."""

    form, serves_empty_rows, max_num_reqs, min_scale = "still", True, 4096, 2.0**-10

    def __init__(self) -> None:
        shape = (NUM_REQS, QUERY_LEN, HEADS, 512)
        self._out = torch.zeros(shape, dtype=torch.bfloat16)
        self._lse = torch.zeros(NUM_REQS, QUERY_LEN, HEADS).transpose(1, 2)

    def plan(self, seq_lens: object, num_rows: int) -> None:
        """Nothing to plan."""

    def bind(self, *_: object) -> Callable[..., object]:
        """The call."""
        return lambda **_words: (self._out, self._lse)


def _still_flashmla(builder: Any) -> None:
    builder.kernel = _StillDecode()


def _still_aiter(builder: Any) -> None:
    lse = torch.zeros(NUM_REQS * QUERY_LEN, HEADS)
    builder.library = replace(
        builder.library,
        decode=lambda **_words: (None, lse),
        build_metadata=_do_nothing,
    )


STILL: dict[str, Callable[[Any], None]] = {
    "triton_mla": _still_triton,
    "hopper": _still_hopper,
    "cuda_flashmla": _still_flashmla,
    "rocm_aiter": _still_aiter,
}


if __name__ == "__main__":
    typer.run(main)
