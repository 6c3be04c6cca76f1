"""A graph on a CPU: operators recorded once, replayed over the same tensors."""

from __future__ import annotations

from contextlib import contextmanager
from itertools import count
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mla_decode_cuda_flashmla.capture import SIMULATED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_CAPTURES = count(1)


class SimulatedGraph:
    """Records what runs in a ``with`` block; `replay` runs it again in place.

    Like a graph on the card it keeps addresses and not values: an operator's inputs are
    read at the replay, its outputs are written where the recording put them, and what
    Python decided while recording stays decided.
    """

    def __init__(self) -> None:
        self._recorder = _Recorder()

    @contextmanager
    def capture(self) -> Iterator[None]:
        """Record what runs in the block, as one capture of its own."""
        token = SIMULATED.set(next(_CAPTURES))
        try:
            with self._recorder:
                yield
        finally:
            SIMULATED.reset(token)

    def replay(self) -> None:
        """Run every recorded operator again."""
        for launch in self._recorder.launches:
            launch()


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves the base class unannotated
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # as above
        self.launches: list[Callable[[], None]] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        del types
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        returns = func._schema.returns  # noqa: SLF001 - the only record of what aliases
        is_written = any(r.alias_info and r.alias_info.is_write for r in returns)
        is_view = any(r.alias_info and not r.alias_info.is_write for r in returns)
        if is_written:
            self.launches.append(lambda: func(*args, **kwargs))
        elif not is_view and not func.name().startswith("aten::empty"):
            outputs = [leaf for leaf in tree_leaves(result) if _is_tensor(leaf)]
            self.launches.append(lambda: _run_into(outputs, func, args, kwargs))
        return result


def _run_into(
    outputs: list[torch.Tensor], func: Any, args: Any, kwargs: dict[str, Any]
) -> None:
    fresh = [leaf for leaf in tree_leaves(func(*args, **kwargs)) if _is_tensor(leaf)]
    for old, new in zip(outputs, fresh, strict=True):
        old.copy_(new)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)
