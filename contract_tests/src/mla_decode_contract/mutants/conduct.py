"""Mutants that behave wrongly: refusals, inputs, global state, leaks, claims."""

from __future__ import annotations

import functools
import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from mla_decode.errors import ContractError
from mla_decode.refusal import RefusalCode
from mla_decode_contract.mutants.mutant import derive, derive_builder
from mla_decode_contract.mutants.outputs import after

if TYPE_CHECKING:
    from mla_decode.backend import Backend


def _with_builder_gate(backend: Backend, refuse: Any) -> Backend:
    """A backend whose builder answers a refused problem by ``refuse()``."""
    base: Any = backend.builder_cls

    def __init__(self: Any, problem: Any, device: Any = None, **kwargs: Any) -> None:  # noqa: N807 - becomes a class's
        from mla_decode.device import as_device_info  # noqa: PLC0415 - needs torch

        if backend.refusals(problem, as_device_info(device)):
            refuse()
        base.__init__(self, problem, device, **kwargs)

    builder = derive_builder(base, __init__=__init__)
    return derive(backend, builder_cls=property(lambda _: builder))


def abort_instead_of_refusal(backend: Backend) -> Backend:
    """A builder for a refused problem ends the process by a signal."""
    return _with_builder_gate(backend, os.abort)


def exit_instead_of_refusal(backend: Backend) -> Backend:
    """A builder for a refused problem ends the process with status 1."""
    return _with_builder_gate(backend, lambda: os._exit(1))


def assertion_instead_of_refusal(backend: Backend) -> Backend:
    """A builder for a refused problem raises a bare AssertionError."""

    def refuse() -> None:
        raise AssertionError

    return _with_builder_gate(backend, refuse)


def refuses_nothing(backend: Backend) -> Backend:
    """Every problem is accepted."""
    return derive(backend, refusals=lambda *_: [])


def first_refusal_only(backend: Backend) -> Backend:
    """Of several reasons only the first is given."""
    right = type(backend).refusals
    return derive(backend, refusals=lambda *args: list(right(*args))[:1])


def refuses_with_another_code(backend: Backend) -> Backend:
    """Every reason comes with the code of a failed import."""
    right = type(backend).refusals

    def refusals(*args: Any) -> list[Any]:
        return [replace(r, code=RefusalCode.IMPORT) for r in right(*args)]

    return derive(backend, refusals=refusals)


def refusals_without_a_fix(backend: Backend) -> Backend:
    """Reasons do not say what to do."""
    right = type(backend).refusals
    return derive(
        backend, refusals=lambda *args: [replace(r, fix="") for r in right(*args)]
    )


def query_scaled_in_place(backend: Backend) -> Backend:
    """The caller's query is multiplied by the scale and left so."""
    right = type(backend).forward

    @functools.wraps(right)
    def forward(self: Any, q: Any, *args: Any, **kwargs: Any) -> Any:
        result = right(self, q, *args, **kwargs)
        whole = q[0] if isinstance(q, tuple) else q
        whole.copy_((whole.float() * 0.5).to(whole.dtype))
        return result

    return derive(backend, forward=forward)


def table_tail_cleared(backend: Backend) -> Backend:
    """Unused slots of the caller's table are set to 0."""

    def spoil(result: Any, metadata: Any, _: Any) -> Any:
        metadata.block_table.clamp_(min=0)
        return result

    return after(backend, spoil)


def writes_before_checking(backend: Backend) -> Backend:
    """The caller's buffer is cleared before the arguments are checked."""
    right = type(backend).forward

    @functools.wraps(right)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("out") is not None:
            kwargs["out"].zero_()
        return right(self, *args, **kwargs)

    return derive(backend, forward=forward)


def untyped_errors(backend: Backend) -> Backend:
    """Every error of a call is a bare ValueError without its data."""
    right = type(backend).forward

    @functools.wraps(right)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return right(self, *args, **kwargs)
        except ContractError as error:
            raise ValueError(error.message) from error

    return derive(backend, forward=forward)


def scale_has_a_default(backend: Backend) -> Backend:
    """softmax_scale may be left out: 576**-0.5 is taken."""
    right = type(backend).forward

    def forward(
        self: Any,
        q: Any,
        kv_cache: Any,
        metadata: Any,
        *,
        softmax_scale: float = 576**-0.5,
        **kwargs: Any,
    ) -> Any:
        return right(self, q, kv_cache, metadata, softmax_scale=softmax_scale, **kwargs)

    return derive(backend, forward=forward)


def environment_written(backend: Backend) -> Backend:
    """Each call leaves a counter in the environment."""

    def spoil(result: Any, *_: Any) -> Any:
        name = "MLA_DECODE_MUTANT_CALLS"
        os.environ[name] = str(int(os.environ.get(name, "0")) + 1)
        return result

    return after(backend, spoil)


def environment_written_alike(backend: Backend) -> Backend:
    """Each call writes the same value to the environment."""

    def spoil(result: Any, *_: Any) -> Any:
        os.environ["MLA_DECODE_MUTANT"] = "1"
        return result

    return after(backend, spoil)


def random_state_consumed(backend: Backend) -> Backend:
    """Each call draws from torch's global generator."""

    def spoil(result: Any, *_: Any) -> Any:
        torch.rand(700)
        return result

    return after(backend, spoil)


def outputs_leaked(backend: Backend) -> Backend:
    """Every step leaves a tensor behind."""
    kept: list[Any] = []

    def spoil(result: Any, *_: Any) -> Any:
        kept.append(torch.zeros(4))
        return result

    return after(backend, spoil)


def workspace_grows(backend: Backend) -> Backend:
    """The builder keeps a workspace that grows with the lengths."""

    def spoil(result: Any, metadata: Any, _: Any) -> Any:
        longest = int(metadata.seq_lens.max()) if metadata.num_reqs else 0
        held = getattr(metadata.builder, "mutant_workspace", None)
        if held is None or held.shape[0] < longest:
            metadata.builder.mutant_workspace = torch.zeros(longest)
        return result

    return after(backend, spoil)


def workspace_undeclared(backend: Backend) -> Backend:
    """The builder holds a buffer that the cost leaves out."""
    base: Any = backend.builder_cls

    def __init__(self: Any, problem: Any, device: Any = None, **kwargs: Any) -> None:  # noqa: N807 - becomes a class's
        base.__init__(self, problem, device, **kwargs)
        declared = backend.cost(problem, self.device_info).workspace_bytes
        self.mutant_buffer = torch.zeros(
            declared + 1, dtype=torch.uint8, device=self.device
        )

    builder = derive_builder(base, __init__=__init__)
    return derive(backend, builder_cls=property(lambda _: builder))


def non_causal_overclaimed(backend: Backend) -> Backend:
    """supports_non_causal says the opposite of what the capability declares."""
    right = type(backend).supports_non_causal
    return derive(backend, supports_non_causal=lambda *args: not right(*args))


def cost_without_walks(backend: Backend) -> Backend:
    """The cost names no KV walk: the planner would take it for free."""
    right = type(backend).cost
    return derive(backend, cost=lambda *args: replace(right(*args), kv_walks=0))


def newer_contract(backend: Backend) -> Backend:
    """The adapter says that it was written to a later contract."""
    return derive(backend, contract="2.0")
