"""One contract for multi-head latent attention (MLA) decode.

Names that need no tensor import without torch; the others are loaded on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from mla_decode.capability import (
    Capability,
    CapabilityRow,
    Feature,
    IntSet,
    Source,
    Support,
)
from mla_decode.device import DeviceInfo, detect_device
from mla_decode.errors import (
    ArgumentError,
    BackendRefused,
    BatchError,
    ContractError,
    MaskError,
    OutdatedLibraryError,
    StaleMetadataError,
)
from mla_decode.mask import Mask, normalise_causal
from mla_decode.metadata import CommonAttentionMetadata, DecodeMetadata, StepFacts
from mla_decode.problem import (
    LATENT_WIDTH,
    ROPE_WIDTH,
    ROW_WIDTH,
    Dcp,
    DecodeProblem,
)
from mla_decode.refusal import Refusal, RefusalCode
from mla_decode.slicing import UbatchBuilders, split_decodes, split_ubatches
from mla_decode.version import CONTRACT_VERSION

if TYPE_CHECKING:
    from mla_decode.backend import Backend, BackendBase, CliOption, Cost, DecodeOutput
    from mla_decode.batch import QueryLenSupport
    from mla_decode.builder import GraphSupport, MLADecodeMetadataBuilder
    from mla_decode.decoder import MLADecoder
    from mla_decode.discovery import Candidate, discover
    from mla_decode.forward_check import CheckedCall
    from mla_decode.lowering import Plan
    from mla_decode.paging import PagedLatentCache
    from mla_decode.selection import Selection, Survey, select, survey
    from mla_decode.step_report import Downgrade, StepReport
    from mla_decode.workspace import Workspace

_LAZY = {
    "Backend": "backend",
    "BackendBase": "backend",
    "Candidate": "discovery",
    "CheckedCall": "forward_check",
    "CliOption": "backend",
    "Cost": "backend",
    "DecodeOutput": "backend",
    "Downgrade": "step_report",
    "GraphSupport": "builder",
    "MLADecodeMetadataBuilder": "builder",
    "MLADecoder": "decoder",
    "PagedLatentCache": "paging",
    "Plan": "lowering",
    "QueryLenSupport": "batch",
    "Selection": "selection",
    "StepReport": "step_report",
    "Survey": "selection",
    "Workspace": "workspace",
    "discover": "discovery",
    "select": "selection",
    "survey": "selection",
}

__all__ = [
    "CONTRACT_VERSION",
    "LATENT_WIDTH",
    "ROPE_WIDTH",
    "ROW_WIDTH",
    "ArgumentError",
    "Backend",
    "BackendBase",
    "BackendRefused",
    "BatchError",
    "Candidate",
    "Capability",
    "CapabilityRow",
    "CheckedCall",
    "CliOption",
    "CommonAttentionMetadata",
    "ContractError",
    "Cost",
    "Dcp",
    "DecodeMetadata",
    "DecodeOutput",
    "DecodeProblem",
    "DeviceInfo",
    "Downgrade",
    "Feature",
    "GraphSupport",
    "IntSet",
    "MLADecodeMetadataBuilder",
    "MLADecoder",
    "Mask",
    "MaskError",
    "OutdatedLibraryError",
    "PagedLatentCache",
    "Plan",
    "QueryLenSupport",
    "Refusal",
    "RefusalCode",
    "Selection",
    "Source",
    "StaleMetadataError",
    "StepFacts",
    "StepReport",
    "Support",
    "Survey",
    "UbatchBuilders",
    "Workspace",
    "detect_device",
    "discover",
    "normalise_causal",
    "select",
    "split_decodes",
    "split_ubatches",
    "survey",
]


def __getattr__(name: str) -> Any:
    """Load a name that needs torch on its first use."""
    module = _LAZY.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{module}"), name)
