"""The decoders of one attention group, one a mask, chosen when the engine starts."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from mla_decode import Mask, MLADecoder, select
from mla_decode.device import as_device_info
from mla_decode_vllm.settings import read_settings

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from mla_decode import DecodeProblem, Selection
    from mla_decode_vllm.problem import Group

logger = logging.getLogger("vllm.mla_decode")


class Decoders:
    """Selects a backend for each mask of a group, and makes each decoder once.

    Every selection is made here, so that every refusal ends the engine's start and
    none its serving. A group of drafts alone gets its causal decoder only when a causal
    step comes: vLLM's second runner never sends one, and a decoder has buffers.

    Args:
        group: The attention group.
        device: Where its tensors live.
        layer_names: For the log.

    Raises:
        BackendRefused: Nobody serves the group; every reason is in it.
        OutdatedLibraryError: See `mla_decode.select`.
    """

    def __init__(
        self, group: Group, device: torch.device, layer_names: Sequence[str]
    ) -> None:
        self._device = device
        self._settings = read_settings()
        self._problems = group.problems()
        self._made: dict[Mask, MLADecoder] = {}
        info = as_device_info(device)
        for mask, problem in self._problems.items():
            if mask is Mask.CAUSAL and group.is_draft_only:
                chosen = select(
                    problem, info, self._settings.backend, self._settings.lowering
                )
            else:
                chosen = self.of(mask).selection
            _log(chosen, problem, layer_names)

    def of(self, mask: Mask) -> MLADecoder:
        """The decoder of a mask.

        Raises:
            KeyError: A non-causal step in a group without drafts; vLLM refuses it first.
        """
        decoder = self._made.get(mask)
        if decoder is None:
            decoder = MLADecoder(
                self._problems[mask],
                self._settings.backend or "auto",
                self._settings.lowering,
                device=self._device,
            )
            self._made[mask] = decoder
        return decoder


def _log(chosen: Selection, problem: DecodeProblem, layer_names: Sequence[str]) -> None:
    refused = {
        name: [f"{reason.code}: {reason.message}" for reason in reasons]
        for name, reasons in chosen.refused.items()
    }
    logger.info(
        "mla-decode: %s decodes %s (%d in its group), H=%d, %s blocks of %s tokens "
        "(lowering: %s); refused: %s",
        chosen.backend.name,
        layer_names[0],
        len(layer_names),
        problem.num_q_heads,
        "/".join(sorted(str(mask) for mask in problem.masks)),
        _ranges(sorted(problem.query_lens)),
        chosen.plan.kind,
        refused or "none",
    )


def _ranges(lens: Sequence[int]) -> str:
    """``1..4`` for a run of lengths, else each of them."""
    if len(lens) > 2 and lens[-1] - lens[0] == len(lens) - 1:
        return f"{lens[0]}..{lens[-1]}"
    return ", ".join(map(str, lens))
