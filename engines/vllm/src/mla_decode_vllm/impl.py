"""The layer's side of the bridge: vLLM's `forward_mqa` through the library."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


class BridgedDecode:
    """Replaces the decode of a stock vLLM MLA implementation, and nothing else.

    Prefill, cache writes and the layer's scales stay the stock class's.
    """

    can_return_lse_for_decode: bool = True
    supports_dcp: bool = True
    scale: float

    def forward_mqa(
        self,
        q: Tensor | tuple[Tensor, Tensor],
        kv_c_and_k_pe_cache: Tensor,
        attn_metadata: Any,
        layer: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend the step's decode rows of one layer.

        Args:
            q: [tokens, H, 576], or the pair (nope [tokens, H, 512], rope).
            kv_c_and_k_pe_cache: [pages, page_size, 576].
            attn_metadata: vLLM's, with the library's plan in ``decode``.
            layer: Carries the fp8 scales, 0-d tensors.

        Returns:
            out [tokens, H, 512] and lse float32 [tokens, H] where the group needs it.
        """
        decode = attn_metadata.decode
        problem = decode.decoder.problem
        return tuple(
            decode.decoder.run(
                q,
                kv_c_and_k_pe_cache,
                decode.plan,
                softmax_scale=self.scale,
                q_scale=layer._q_scale.view(1) if problem.q_dtype == "fp8" else None,  # noqa: SLF001 - vLLM's name for it
                kv_scale=layer._k_scale.view(1) if problem.kv_dtype == "fp8" else None,  # noqa: SLF001 - as above
            )
        )
