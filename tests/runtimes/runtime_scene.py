"""What the children of these tests do: ``python FLAGS runtime_scene.py WHAT``.

Each prints one line, which must be the same under every flag.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import pkgutil
import sys
import warnings
from contextlib import suppress
from dataclasses import replace
from importlib.metadata import entry_points
from importlib.util import find_spec

from mla_decode import (
    ArgumentError,
    BackendRefused,
    DecodeProblem,
    DeviceInfo,
    Mask,
)

DEVICES = {
    "reference": DeviceInfo.assume("cpu"),
    "rocm_aiter": DeviceInfo.assume("gfx950"),
    "cuda_flashmla": DeviceInfo.assume("sm_90"),
}
"""Reference, and two simulated libraries."""
ARCHS = ("gfx942", "gfx950", "sm_90", "cpu")
SCALE = 192**-0.5


def backends():
    """The backend of each installed adapter, by name."""
    return {point.name: point.load() for point in _points()}


def _points():
    return sorted(entry_points(group="mla_decode.backends"), key=str)


def _refuse():
    raise BackendRefused("nobody", {"x": []})


def import_light():
    """What names a problem, without torch; refusals stay typed without assertions."""
    found = []
    for error, call in (
        (ArgumentError, lambda: DecodeProblem(num_q_heads=0)),
        (ArgumentError, lambda: DecodeProblem(num_q_heads=1, query_lens=3)),
        (ArgumentError, lambda: DeviceInfo.assume("sm90")),
        (BackendRefused, _refuse),
    ):
        with suppress(error):
            call()
            raise SystemExit(f"{error.__name__} was not raised")
        found.append(error.__name__)
    if "torch" in sys.modules:
        raise SystemExit("torch was imported")
    return found


def import_all():
    """Every module of every package of the project that is installed.

    The engine's side is left out: its modules import the engine.
    """
    names = ["mla_decode", "mla_decode_contract"]
    names += [point.value.partition(":")[0] for point in _points()]
    found = []
    for name in dict.fromkeys(part.partition(".")[0] for part in names):
        if find_spec(name) is None:
            continue
        root = importlib.import_module(name)
        for module in pkgutil.walk_packages(root.__path__, f"{name}."):
            if not module.name.endswith("__main__"):
                importlib.import_module(module.name)
                found.append(module.name)
    return found


def problems():
    """Verify and draft groups, sets in them, some of which only a rewrite serves."""
    both = set(Mask)
    for heads in (16, 20):
        for dtype in ("bf16", "fp8"):
            for lens in ({1, 2, 4}, {8, 3}):
                yield DecodeProblem(
                    num_q_heads=heads,
                    q_dtype=dtype,
                    kv_dtype=dtype,
                    query_lens=lens,
                    masks=both,
                    max_num_reqs=16,
                    max_model_len=4096,
                )


def plans():
    """Who is asked, what they answer and how they would serve, in order."""
    from mla_decode import survey

    said = []
    for arch in ARCHS:
        device = DeviceInfo.assume(arch)
        for problem in problems():
            for lowering in ("refuse", "exact"):
                found = survey(problem, device, None, lowering)
                chosen = found.selection
                outdated = found.outdated and str(found.outdated)
                refused = [
                    (name, [str(reason) for reason in reasons])
                    for name, reasons in found.refused.items()
                ]
                plan = chosen and (chosen.backend.name, chosen.plan.as_dict())
                said.append((arch, problem.as_dict(), plan, refused, outdated))
    return said


def make_batch(problem, lens, query_len, *, causal, seed):
    """Queries, cache and batch of one ubatch."""
    import torch

    from mla_decode import PagedLatentCache

    generator = torch.Generator().manual_seed(seed)
    cache = PagedLatentCache(64, problem.page_size, dtype=torch.bfloat16)
    cache.layers[0].fill_(torch.nan)
    for request, seq_len in enumerate(lens):
        cache.allocate(request)
        slots = cache.extend(request, seq_len)
        rows = torch.randn(seq_len, 576, generator=generator).bfloat16()
        cache.write(0, slots, rows)
    common = cache.batch(range(len(lens)), [query_len] * len(lens), causal=causal)
    shape = (len(lens) * query_len, problem.num_q_heads, 576)
    return torch.randn(shape, generator=generator).bfloat16(), cache.layers[0], common


def scene_problem(**fields):
    """A verify group of 16 heads."""
    options = {"num_q_heads": 16, "query_lens": {1, 2}, "needs_lse": True}
    options |= {"max_num_reqs": 4, "max_model_len": 512}
    return DecodeProblem(**{**options, **fields})


def decode():
    """A digest of every backend's outputs, in this process and in a forked one."""
    import torch

    import_all()
    torch.set_num_threads(1)
    digest = _decode_all()
    read, write = os.pipe()
    with warnings.catch_warnings():  # from 3.12 on, of any native thread of torch's
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        os.write(write, _decode_all().encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        forked = pipe.read()
    _, status = os.waitpid(child, 0)
    if status or forked != digest:
        raise SystemExit(f"the forked process: status {status}, {forked} != {digest}")
    return digest


def _decode_all():
    import torch

    from mla_decode import MaskError, MLADecoder

    digest = hashlib.sha256()
    for name, device in DEVICES.items():
        if name not in backends():
            continue
        problem = scene_problem()
        decoder = MLADecoder(problem, name, device=device)
        for query_len in (1, 2):
            q, kv, common = make_batch(
                problem, (70, 9), query_len, causal=True, seed=query_len
            )
            found = decoder.run(q, kv, decoder.plan(common), softmax_scale=SCALE)
            for tensor in found:
                digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
        with suppress(MaskError):
            decoder.plan(replace(common, causal="no"))
            raise SystemExit("a mask of no mask was planned")
    return digest.hexdigest()


if __name__ == "__main__":
    what = {f.__name__: f for f in (import_light, import_all, plans, decode)}
    sys.stdout.write(json.dumps(what[sys.argv[1]](), sort_keys=True))
