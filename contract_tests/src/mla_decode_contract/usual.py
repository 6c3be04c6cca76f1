"""Usual wrong answers: what outputs are where they are not the right ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from mla_decode.dtypes import torch_dtype
from mla_decode.mask import Mask
from mla_decode.problem import LATENT_WIDTH, ROW_WIDTH

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from mla_decode_contract.scene import Scene


def usual_answer(scene: Scene, found: Tensor, unit: Tensor, empty: Tensor) -> str:
    """What to say of outputs that are a usual wrong answer; else nothing.

    Args:
        scene: What was asked.
        found: What came, float64 [T, H, 512] on the CPU.
        unit: Of each row with keys.
        empty: bool [T, H]: rows without a key.
    """
    most = unit * scene.ctx.budget_units
    eps = torch.finfo(torch_dtype(scene.problem.out_dtype, scene.ctx.device)).eps
    for words, compute in _answers(scene):
        answer = compute()
        error = (found - answer).abs().amax(-1)[~empty]
        # A wrong answer may be larger than the right one, and so its last place.
        rounding = answer.abs().amax(-1)[~empty] * eps
        if bool((error <= torch.maximum(most, rounding)).all()):
            return f"; it is {words}"
    return ""


def _answers(scene: Scene) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """Wrong answers in words, and how each is computed; called for a failure alone."""
    blocks = zip(scene.block_lens, scene.seq_lens, strict=False)
    # Under the causal mask a request that is shorter than its block is no request.
    if not any(0 < seq_len < block for block, seq_len in blocks):
        mask = Mask.NON_CAUSAL if scene.causal else Mask.CAUSAL
        yield (
            f"the {mask.value} mask's answer",
            lambda: scene.truth(causal=not scene.causal)[0],
        )
    if scene.kv_scale_value != 1.0:
        yield (
            "the answer without kv_scale",
            lambda: scene.truth(kv_scale=1.0)[0],
        )
    if scene.q_scale_value != 1.0:
        yield "the answer without q_scale", lambda: scene.truth(q_scale=1.0)[0]
        yield (
            "the answer without q_scale and kv_scale",
            lambda: scene.truth(q_scale=1.0, kv_scale=1.0)[0],
        )
    yield (
        "the answer of one key too few: each row misses the last one that it should see",
        lambda: _seeing(scene, lambda n: scene.visible(n) - 1),
    )
    yield (
        "the answer of one key too few: the request's last key is never read",
        lambda: _seeing(
            scene, lambda n: scene.visible(n).clamp(max=scene.seq_lens[n] - 1)
        ),
    )
    yield (
        "the answer of one key too many: each row sees its next sibling",
        lambda: _seeing(
            scene, lambda n: (scene.visible(n) + 1).clamp(max=scene.seq_lens[n])
        ),
    )
    yield (
        "the answer of one key too many: each row reads one past its last",
        lambda: _seeing(scene, lambda n: scene.visible(n) + 1),
    )
    yield (
        "the answer of a mask aligned to the head: row t sees t + 1 keys",
        lambda: _seeing(scene, lambda n: _from_the_head(scene, n)),
    )


def _from_the_head(scene: Scene, request: int) -> Tensor:
    seen = 1 + torch.arange(scene.block_lens[request])
    return seen.clamp(max=scene.seq_lens[request])


def _seeing(scene: Scene, visible: Callable[[int], Tensor]) -> Tensor:
    """Compute out [T, H, 512] in float64 where each row sees its own number of keys.

    Args:
        scene: What was asked.
        visible: Keys that each token of a request sees, int64 [Q]; past the request's
            length they are those that follow in its last page.
    """
    shape = (*scene.q.shape[:2], LATENT_WIDTH)
    out = torch.zeros(shape, dtype=torch.float64)
    size = scene.problem.page_size
    for request, seq_len in enumerate(scene.seq_lens):
        first, last = scene.starts[request], scene.starts[request + 1]
        if seq_len == 0 or first == last:
            continue
        used = scene.common.block_table_tensor[request, : -(-seq_len // size)]
        pages = scene.kv_cache.index_select(0, used.long())
        seen = visible(request)[:, None, None]
        keys = pages.cpu().double().reshape(-1, ROW_WIDTH)[: max(int(seen.max()), 0)]
        keys = keys * scene.kv_scale_value
        query = scene.q[first:last].cpu().double() * scene.q_scale_value
        scores = torch.einsum("qhd,kd->qhk", query, keys) * scene.softmax_scale
        hidden = torch.arange(len(keys)) >= seen
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1).nan_to_num()
        values = keys[:, :LATENT_WIDTH]
        out[first:last] = torch.einsum("qhk,kd->qhd", weights, values)
    return out
