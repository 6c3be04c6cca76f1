"""BACKEND and VERSION: the object behind the entry point."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from packaging.version import Version

from mla_decode.backend import Backend
from mla_decode.discovery import ENTRY_POINT_GROUP, discover
from mla_decode.errors import OutdatedLibraryError
from mla_decode.mask import Mask
from mla_decode.version import CONTRACT_VERSION, is_compatible
from mla_decode_contract.cases.common import CAUSAL, NON_CAUSAL, longer_block
from mla_decode_contract.mutants.mutant import derive
from mla_decode_contract.registry import implements
from mla_decode_contract.violations import ValueViolation, require

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from mla_decode.discovery import Candidate
    from mla_decode_contract.context import CaseContext

_HEAVY = ("aiter", "flash_mla", "triton", "vllm")
_PROBE = """
import json, os, sys
import torch
import mla_decode, mla_decode.backend, mla_decode.builder
before_modules, before_env = set(sys.modules), dict(os.environ)
{load}
heavy = sorted(
    name for name in set(sys.modules) - before_modules
    if name.partition(".")[0] in {heavy!r}
)
changed = sorted(
    key for key in {{*before_env, *os.environ}}
    if before_env.get(key) != os.environ.get(key)
)
gpu = torch.cuda.is_available() and torch.cuda.is_initialized()
print("PROBE" + json.dumps({{"heavy": heavy, "env": changed, "gpu": gpu}}))
"""
_LOAD_ENTRY = """
from importlib.metadata import entry_points
(point,) = entry_points(group={group!r}, name={name!r})
backend = point.load()
backend.capability, backend.name, backend.contract
"""
_LOAD_SPEC = """
from importlib import import_module
backend = getattr(import_module({module!r}), {attribute!r})
backend.capability, backend.name, backend.contract
"""
_PROBE_TIMEOUT_S = 150
"""Below `START_TIMEOUT_S`, so that the case itself can say what hung."""


@implements("backend.import_is_light")
def import_is_light(ctx: CaseContext) -> None:
    """In a fresh process: modules, environment and GPU before and after."""
    if ":" in ctx.backend_spec:
        module, _, attribute = ctx.backend_spec.partition(":")
        load = _LOAD_SPEC.format(module=module, attribute=attribute)
    else:
        load = _LOAD_ENTRY.format(group=ENTRY_POINT_GROUP, name=ctx.backend_spec)
    probe = _PROBE.format(load=load, heavy=_HEAVY)
    try:
        done = subprocess.run(  # noqa: S603 - this interpreter, a fixed script
            [sys.executable, "-c", probe],
            capture_output=True,
            text=True,
            timeout=_PROBE_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise ValueViolation(
            f"importing torch and the backend did not end in {_PROBE_TIMEOUT_S} s"
        ) from error
    found = [line for line in done.stdout.splitlines() if line.startswith("PROBE")]
    if done.returncode or not found:
        raise ValueViolation(f"importing the backend failed: {done.stderr[-2000:]}")
    seen = json.loads(found[-1].removeprefix("PROBE"))
    require(not seen["heavy"], f"importing it imports {', '.join(seen['heavy'][:5])}")
    require(not seen["env"], f"importing it changes {', '.join(seen['env'])}")
    require(not seen["gpu"], "importing it starts the GPU")


@implements("backend.has_the_protocol")
def has_the_protocol(ctx: CaseContext) -> None:
    """Members and name."""
    missing = [
        name
        for name in vars(Backend)
        if not name.startswith("_") and not hasattr(type(ctx.backend), name)
    ]
    require(not missing, f"the backend lacks {', '.join(missing)}")
    if ":" not in ctx.backend_spec:
        require(
            ctx.backend.name == ctx.backend_spec,
            f"found as {ctx.backend_spec!r}, but its name is {ctx.backend.name!r}",
        )
    require(bool(ctx.backend.evidence(ctx.device)), "evidence() says nothing")


@implements("backend.cost_is_counted")
def cost_is_counted(ctx: CaseContext) -> None:
    """Non-negative whole numbers, and at least one walk."""
    problem = ctx.problem()
    cost = ctx.backend.cost(problem, ctx.device)
    for name, least in (
        ("kv_walks", 1),
        ("rows", problem.num_q_heads),
        ("launches", 1),
        ("workspace_bytes", 0),
        ("index_entries", 0),
    ):
        value = getattr(cost, name)
        require(
            type(value) is int and value >= least,
            f"cost.{name} is {value!r}; at least {least} is due",
        )
    held = ctx.backend.workspace_bytes(problem, ctx.device)
    require(
        held == cost.workspace_bytes,
        f"workspace_bytes() says {held}, cost() says {cost.workspace_bytes}",
    )


@implements("backend.non_causal_claims_agree")
def non_causal_claims_agree(ctx: CaseContext) -> None:
    """Three places, one claim."""
    try:
        says = bool(ctx.backend.supports_non_causal(ctx.device))
    except OutdatedLibraryError:
        says = False
    row = ctx.row.query_lens.get(Mask.NON_CAUSAL, ())
    declares = any(length in row for length in range(2, 65))
    flag = ctx.backend.builder_cls.supports_non_causal_multi_token_decode
    require(
        says == declares,
        f"supports_non_causal says {says}, the row declares {declares}",
    )
    require(
        flag or not says,
        "supports_non_causal is True, but the builder's flag is False",
    )
    if says:
        length = longer_block(ctx, causal=False)
        ctx.problem(query_lens=(length,), masks=NON_CAUSAL)
    else:
        ctx.problem(query_lens=(1,), masks=CAUSAL)


@implements("version.skew_refused")
def version_skew_refused(ctx: CaseContext) -> None:
    """The same object, written to other contracts, behind an entry point."""
    ours = Version(CONTRACT_VERSION)
    newer = (f"{ours.major}.{ours.minor + 1}", f"{ours.major + 1}.0")
    for contract in (*newer, f"{ours.major - 1}.9", "the newest", ""):
        candidate = _found_as(ctx, contract)
        code = candidate.refusal.code.value if candidate.refusal else "none"
        require(
            candidate.backend is None and code == "version",
            f"written to contract {contract!r}, core having {CONTRACT_VERSION}, it was "
            f"{'admitted' if candidate.backend else f'refused with code {code}'}; "
            "code version is due",
        )
    own = _found_as(ctx, ctx.backend.contract)
    require(own.backend is not None, f"as it is, it is refused: {own.refusal}")


def _found_as(ctx: CaseContext, contract: str) -> Candidate:
    """What discovery makes of the backend, had it been written to a contract."""
    point = _Point(ctx.backend.name, derive(ctx.backend, contract=contract))
    return discover([cast("EntryPoint", point)])[ctx.backend.name]


@dataclass(frozen=True, slots=True)
class _Point:
    """As much of an entry point as discovery reads."""

    name: str
    backend: Backend
    value: str = "of:the_kit"

    def load(self) -> Backend:
        return self.backend


@implements("version.is_compatible")
def version_is_compatible(ctx: CaseContext) -> None:
    """Same major, equal or newer minor."""
    require(
        is_compatible(ctx.backend.contract),
        f"written to contract {ctx.backend.contract}, core has {CONTRACT_VERSION}",
    )
