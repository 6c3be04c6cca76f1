"""Weights on disk: int8 with one scale a row, in one `.npz` that ships with the package.

A row is the last axis of a tensor. Vectors (the gains of norms) stay float32: they are
few, and each multiplies a whole channel.
"""

from __future__ import annotations

import json
from importlib import resources
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from mla_decode.demo.drafter import BlockDrafter
from mla_decode.demo.model import TargetModel
from mla_decode.demo.shape import ModelShape
from mla_decode.errors import ContractError

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor, nn

WEIGHTS_FILE = "weights.npz"
MAX_WEIGHTS_BYTES = 4_000_000

_ABOUT = "about"
_SCALE = ".scale"


class WeightsError(ContractError, RuntimeError):
    """The weight file is missing, or is not one of this model's."""


def quantise(tensor: Tensor) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Round each row to int8: returns codes in [-127, 127] and float32 scales (..., 1)."""
    values = tensor.detach().to("cpu", torch.float32).numpy()
    largest = np.abs(values).max(axis=-1, keepdims=True)
    scales = np.where(largest > 0, largest / 127, 1).astype(np.float32)
    return np.rint(values / scales).astype(np.int8), scales


def round_to_int8(module: nn.Module) -> None:
    """Replace each matrix of a module, in place, by what its int8 form stands for."""
    with torch.no_grad():
        for tensor in module.state_dict().values():
            if tensor.ndim > 1:
                codes, scales = quantise(tensor)
                tensor.copy_(torch.from_numpy(codes * scales))


def save_weights(
    path: Path, target: TargetModel, drafter: BlockDrafter, about: dict[str, Any]
) -> None:
    """Write both models to one file, with a record of how they came to be.

    Args:
        path: The `.npz` to write.
        target: The target model.
        drafter: The drafter that was trained on this target.
        about: What a reader should know: seed, steps, text, scores. JSON-ready.
    """
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    for prefix, module in (("target", target), ("drafter", drafter)):
        for name, tensor in module.state_dict().items():
            key = f"{prefix}.{name}"
            if tensor.ndim > 1:
                arrays[key], arrays[key + _SCALE] = quantise(tensor)
            else:
                arrays[key] = tensor.detach().to("cpu", torch.float32).numpy()
    arrays[_ABOUT] = np.frombuffer(json.dumps(about).encode(), dtype=np.uint8)
    np.savez_compressed(path, allow_pickle=False, **arrays)


def load_weights(
    path: Path | None = None,
) -> tuple[TargetModel, BlockDrafter, dict[str, Any]]:
    """Read both models in float32, and the record of how they came to be.

    Args:
        path: A weight file; the one that ships with the package when None.

    Raises:
        WeightsError: There is no such file, or its tensors are not this model's.
    """
    shipped = resources.files("mla_decode.demo") / WEIGHTS_FILE
    source = shipped if path is None else path
    try:
        with source.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
    except FileNotFoundError as error:
        raise WeightsError(
            "There is no weight file.",
            got=str(source),
            allowed=f"the {WEIGHTS_FILE} that ships with mla-decode, or one of its form",
            fix="reinstall mla-decode, or train with benchmarks/train_demo.py",
        ) from error
    about: dict[str, Any] = json.loads(arrays.pop(_ABOUT).tobytes())
    shape = ModelShape(**about["shape"])
    target, drafter = TargetModel(shape), BlockDrafter(shape)
    for prefix, module in (("target", target), ("drafter", drafter)):
        _fill(module, prefix, arrays, str(source))
        module.requires_grad_(requires_grad=False)
        module.eval()
    return target, drafter, about


def _fill(
    module: nn.Module,
    prefix: str,
    arrays: dict[str, np.ndarray[Any, Any]],
    source: str,
) -> None:
    """Copy a module's tensors out of the archive, widening int8 rows by their scale."""
    state = module.state_dict()
    for name, tensor in state.items():
        key = f"{prefix}.{name}"
        array = arrays.get(key)
        if array is not None and key + _SCALE in arrays:
            array = array * arrays[key + _SCALE]
        if array is None or array.shape != tuple(tensor.shape):
            raise WeightsError(
                f"{source} is not this model's file.",
                got=f"{key}: {'absent' if array is None else array.shape}",
                allowed=f"{key}: {tuple(tensor.shape)}",
                fix="use the weights that ship with this version, or train anew",
            )
        state[name] = torch.from_numpy(array.astype(np.float32))
    module.load_state_dict(state)
