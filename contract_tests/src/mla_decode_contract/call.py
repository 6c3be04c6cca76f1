"""One decode call with poisoned, fenced outputs, and its comparison with the truth."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from mla_decode.dtypes import torch_dtype
from mla_decode.mask import Mask
from mla_decode.problem import LATENT_WIDTH
from mla_decode_contract.outcome import Measurement
from mla_decode_contract.reachable import poison_floats, storages
from mla_decode_contract.rounding import lse_units, out_units, rounded_decode
from mla_decode_contract.scene import poison
from mla_decode_contract.usual import usual_answer
from mla_decode_contract.violations import ValueViolation, require

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from mla_decode.builder import MLADecodeMetadataBuilder
    from mla_decode.metadata import DecodeMetadata
    from mla_decode_contract.scene import Scene

FENCE = 640
"""Canary elements on either side of an output buffer."""
CANARY = 0x5A
LARGEST_NUMBER = 1e30
"""Stands for infinity and NaN in measurements: JSON has neither."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Fenced:
    """A poisoned buffer between canaries."""

    tensor: Tensor
    storage: Tensor
    """uint8: the fence, the buffer, the fence."""
    fence_bytes: int

    def check(self, name: str) -> None:
        """Demand that nothing was written outside the buffer."""
        before = self.storage[: self.fence_bytes]
        after = self.storage[-self.fence_bytes :]
        require(
            bool((before == CANARY).all()) and bool((after == CANARY).all()),
            f"bytes around the caller's {name} buffer were overwritten",
        )


def fenced(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Fenced:
    """A NaN-filled contiguous buffer with canaries before and after it."""
    itemsize = torch.empty((), dtype=dtype).element_size()
    count = 1
    for size in shape:
        count *= size
    fence = FENCE * itemsize
    storage = torch.full(
        (2 * fence + count * itemsize,), CANARY, dtype=torch.uint8, device=device
    )
    tensor = storage[fence : fence + count * itemsize].view(dtype).view(shape)
    return Fenced(tensor=poison(tensor), storage=storage, fence_bytes=fence)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Result:
    """What a call returned."""

    out: Tensor
    lse: Tensor | None


def output_buffers(scene: Scene) -> tuple[Fenced, Fenced | None]:
    """Fenced, poisoned out and (where the problem needs it) lse for a scene."""
    problem, device = scene.problem, scene.ctx.torch_device
    shape = (scene.num_rows, problem.num_q_heads)
    dtype = torch_dtype(problem.out_dtype, scene.ctx.device)
    out = fenced((*shape, LATENT_WIDTH), dtype, device)
    lse = fenced(shape, torch.float32, device) if problem.needs_lse else None
    return out, lse


def forward(scene: Scene, metadata: DecodeMetadata, **changes: Any) -> Result:
    """Call the backend on a scene with its own arguments, some replaced.

    Args:
        scene: The batch and its tensors.
        metadata: What a builder made for it.
        changes: Arguments of `Backend.forward` to replace or add.
    """
    arguments: dict[str, Any] = {
        "q": scene.q,
        "kv_cache": scene.kv_cache,
        "metadata": metadata,
        "softmax_scale": scene.softmax_scale,
        "q_scale": scene.q_scale,
        "kv_scale": scene.kv_scale,
        **changes,
    }
    output = scene.ctx.backend.forward(**arguments)
    return Result(out=output.out, lse=output.lse)


def decode(
    scene: Scene,
    builder: MLADecodeMetadataBuilder | None = None,
    metadata: DecodeMetadata | None = None,
    **changes: Any,
) -> Result:
    """Build (unless metadata is given) and call into fenced, poisoned buffers.

    What the builder's workspace holds before a build is poisoned, too.
    """
    if metadata is None:
        if builder is None:
            builder = scene.ctx.builder(scene.problem)
        given = (scene.q, scene.kv_cache, *changes.values())
        scene.ctx.inputs |= storages(given).keys()
        poison_floats(builder, spared=scene.ctx.inputs)
        metadata = builder.build(scene.common)
    out, lse = output_buffers(scene)
    buffers: dict[str, Any] = {"out": out.tensor}
    if lse is not None:
        buffers["lse"] = lse.tensor
    result = forward(scene, metadata, **{**buffers, **changes})
    out.check("out")
    if lse is not None:
        lse.check("lse")
    return result


def check(
    scene: Scene,
    result: Result,
    truth: tuple[Tensor, Tensor] | None = None,
    label: str = "",
) -> None:
    """Demand that a result is the truth within the budget, row by row.

    Args:
        scene: What was asked.
        result: What came.
        truth: out and lse in float64; by default the oracle's for the scene.
        label: Put before the quantity's name in messages and measurements.

    Raises:
        ValueViolation: A row is outside the budget, or an empty row is not (0, -inf).
    """
    out64, lse64 = scene.truth() if truth is None else truth
    out_ref, lse_ref = rounded_decode(scene)
    if truth is not None:
        # The unit belongs to these data, whatever the truth that a case compares with.
        own_out, own_lse = scene.truth()
        out_ref, lse_ref = out64 + (out_ref - own_out), lse64 + (lse_ref - own_lse)
    dtype = torch_dtype(scene.problem.out_dtype, scene.ctx.device)
    expected = (scene.num_rows, scene.problem.num_q_heads, LATENT_WIDTH)
    require(
        tuple(result.out.shape) == expected and result.out.dtype == dtype,
        f"{label}out is {result.out.dtype} {list(result.out.shape)}; "
        f"the contract says {dtype} {list(expected)}",
    )
    empty = lse64 == -torch.inf
    check_empty(result, empty, label)
    found = result.out.cpu().double()
    unit = out_units(out_ref, out64, torch.finfo(dtype).eps)[~empty]
    _measure(
        scene,
        f"{label}out",
        (found - out64).abs().amax(-1)[~empty],
        unit,
        empty,
        hint=partial(usual_answer, scene, found, unit, empty) if truth is None else str,
    )
    if scene.problem.needs_lse:
        if result.lse is None:
            raise ValueViolation(f"{label}lse is None, but the problem needs it")
        require(
            result.lse.dtype == torch.float32
            and tuple(result.lse.shape) == expected[:2],
            f"{label}lse is {result.lse.dtype} {list(result.lse.shape)}; "
            f"the contract says float32 {list(expected[:2])}",
        )
        lse_error = (result.lse.cpu().double() - lse64).abs()[~empty]
        _measure(
            scene,
            f"{label}lse",
            lse_error,
            lse_units(lse_ref, lse64)[~empty],
            empty,
            hint=partial(other_base, result.lse.cpu().double()[~empty], lse64[~empty]),
        )


def lost_requests(scene: Scene, is_wrong: Tensor, empty: Tensor) -> str:
    """What to say where a batch is right up to a request and wrong from it on.

    Args:
        scene: What was asked.
        is_wrong: bool of each row with keys.
        empty: bool [T, H]: rows without a key.
    """
    rows = torch.zeros_like(empty)
    rows[~empty] = is_wrong
    with_keys = [n for n, seq_len in enumerate(scene.seq_lens) if seq_len]
    spans = [slice(scene.starts[n], scene.starts[n + 1]) for n in with_keys]
    right = [not bool(rows[span].any()) for span in spans]
    first = right.index(False) if False in right else 0
    rest = spans[first:]
    if first < 2 or len(rest) < 2 or not all(bool(rows[span].all()) for span in rest):
        return ""
    return (
        f"; every one from request {with_keys[first]} of {len(scene.seq_lens)} on is "
        "wrong, and none before: a loop or a grid that ends too early"
    )


def other_base(found: Tensor, right: Tensor) -> str:
    """What to say of an lse that is the logarithm to base 2; else nothing.

    Args:
        found: What came, of rows with keys.
        right: The natural logarithm of the same rows.
    """
    if found.numel() and torch.allclose(found * math.log(2.0), right, atol=1e-2):
        return "; it is the base-2 logarithm: log2 returned, times ln 2 is right"
    return ""


def check_empty(result: Result, empty: Tensor, label: str = "") -> None:
    """Demand (0, -inf) of rows without a key.

    Args:
        result: What came.
        empty: bool [T, H] on the CPU.
        label: Put before the quantity's name.
    """
    if not bool(empty.any()):
        return
    rows = result.out.cpu()[empty].float()
    require(
        bool((rows == 0).all()),
        f"{label}out of {int(empty.sum())} rows without a key is not 0: "
        f"{_sample(rows[rows != 0])}"
        + (", as of rows that nobody wrote, or 0 / 0" if rows.isnan().any() else ""),
    )
    if result.lse is not None:
        values = result.lse.cpu()[empty]
        require(
            bool((values == -torch.inf).all()),
            f"{label}lse of rows without a key is not -inf: "
            f"{_sample(values[values != -torch.inf])}",
        )


def units_apart(scene: Scene, left: Tensor, right: Tensor) -> float:
    """How far two outs are apart, in units of the scene: the largest over the rows."""
    out64, _ = scene.truth()
    out_ref, _ = rounded_decode(scene)
    dtype = torch_dtype(scene.problem.out_dtype, scene.ctx.device)
    unit = out_units(out_ref, out64, torch.finfo(dtype).eps)
    apart = (left.cpu().double() - right.cpu().double()).abs().amax(-1)
    return float((apart / unit.clamp(min=1e-30)).max())


def _measure(
    scene: Scene,
    quantity: str,
    error: Tensor,
    unit: Tensor,
    empty: Tensor,
    *,
    hint: Callable[[], str],
) -> None:
    """Record the worst row; where one is outside the budget, ask for a hint."""
    if error.numel() == 0:
        return
    ctx = scene.ctx
    blocks = {length for length in scene.block_lens if length}
    query_len = blocks.pop() if len(blocks) == 1 else None
    is_causal = scene.causal or query_len == 1
    finite = torch.where(error.isnan(), torch.inf, error)
    ratio = (finite / unit).flatten()
    worst = int(ratio.argmax())
    measurement = Measurement(
        quantity=quantity,
        units=min(float(ratio[worst]), LARGEST_NUMBER),
        budget=ctx.budget_units,
        error=min(float(finite.flatten()[worst]), LARGEST_NUMBER),
        unit=float(unit.flatten()[worst]),
        num_q_heads=scene.problem.num_q_heads,
        query_len=query_len,
        mask=(Mask.CAUSAL if is_causal else Mask.NON_CAUSAL).value,
    )
    ctx.measurements.append(measurement)
    if not measurement.is_within:
        wrong = int((ratio > ctx.budget_units).sum())
        nans = int(error.isnan().sum())
        if nans:
            how = (
                f"{nans} of them hold NaN, which comes of what must not be read, of a "
                "row that nobody wrote, or of an overflow"
            )
        else:
            how = (
                f"the worst by {measurement.error:.3g}, {measurement.units:.3g} units "
                f"of the dtype's own rounding (budget {measurement.budget:g}){hint()}"
            )
        how += lost_requests(scene, ratio > ctx.budget_units, empty)
        raise ValueViolation(
            f"{quantity}: {wrong} of {ratio.numel()} rows are wrong; {how}"
        )


def _sample(values: Tensor) -> str:
    return ", ".join(f"{value:.3g}" for value in values.flatten()[:4].tolist())
