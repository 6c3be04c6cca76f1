"""A worker process: prepares the backend, then runs one case a message.

Started by `pool` as ``python -m mla_decode_contract.worker FD``; it talks JSON over the
inherited socket, so that whatever a library prints cannot be taken for a result.
"""

from __future__ import annotations

import faulthandler
import json
import resource
import sys
import traceback
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from mla_decode_contract.target import Target, load_backend, prepare

if TYPE_CHECKING:
    from mla_decode.backend import Backend


def main(fd: int) -> None:
    """Serve the host until it hangs up."""
    faulthandler.enable()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    channel: Connection[Any, Any] = Connection(fd)
    first = _receive(channel)
    sys.path.extend(path for path in first["path"] if path not in sys.path)
    target = Target.from_dict(first["target"])
    try:
        backend, evidence = _prepare(target)
    except Exception as error:  # noqa: BLE001 - the host reports it as the run's failure
        what = f"{type(error).__name__}: {error}"
        _send(channel, {"error": what, "detail": traceback.format_exc()})
        return
    from mla_decode_contract.declaration import (  # noqa: PLC0415 - needs torch
        declaration,
    )
    from mla_decode_contract.identity import machine  # noqa: PLC0415 - needs torch
    from mla_decode_contract.runner import run_case  # noqa: PLC0415 - needs torch

    described = {
        **machine(backend, target.device),
        "declared": declaration(backend, target.device),
    }
    _send(channel, {"evidence": evidence, "machine": described})
    while True:
        try:
            message = _receive(channel)
        except EOFError:
            return
        asked, wrapped = target, backend
        if message["mutant"] is not None:
            asked = replace(target, mutant=message["mutant"])
            wrapped = _mutated(backend, message["mutant"])
        if message["seed"] is not None:
            asked = replace(asked, seed=message["seed"])
        result = run_case(
            message["case"], wrapped, asked, budget_units=message["budget_units"]
        )
        _send(channel, result.as_dict())


def _prepare(target: Target) -> tuple[Backend, str]:
    backend = load_backend(target.backend)
    evidence = prepare(backend, target.device)
    if target.mutant is not None:
        backend = _mutated(backend, target.mutant)
    import torch  # noqa: PLC0415 - after the backend was prepared

    torch.set_num_threads(1)
    return backend, evidence


def _mutated(backend: Backend, name: str) -> Backend:
    from mla_decode_contract.mutants import MUTANTS  # noqa: PLC0415 - needs torch

    return MUTANTS[name].apply(backend)


def _receive(channel: Connection[Any, Any]) -> dict[str, Any]:
    plain: dict[str, Any] = json.loads(channel.recv_bytes())
    return plain


def _send(channel: Connection[Any, Any], message: dict[str, Any]) -> None:
    channel.send_bytes(json.dumps(message).encode())


if __name__ == "__main__":
    main(int(sys.argv[1]))
