"""Two ubatches in two threads: one library, a builder each, and nobody's bits move."""

import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from runtime_scene import DEVICES, SCALE, backends, make_batch, scene_problem

from mla_decode import DeviceInfo, MLADecoder
from mla_decode.lowering import plan_exact
from mla_decode.lowering.backend import apply_plan
from mla_decode.mask import Mask

STEPS = 6
PATIENCE_S = 280
"""Until a thread whose partner died gives up: less than a test may take."""


@pytest.fixture(autouse=True)
def _one_torch_thread_and_quick_switches():
    threads, interval = torch.get_num_threads(), sys.getswitchinterval()
    torch.set_num_threads(1)
    sys.setswitchinterval(1e-5)
    yield
    torch.set_num_threads(threads)
    sys.setswitchinterval(interval)


def ubatches(problem, query_len, *, causal=True):
    """Steps of two ubatches: other lengths, tables, queries and caches."""
    lens = ((70, 9), (130, 33, 5))
    return [
        [
            make_batch(problem, lens[side], query_len, causal=causal, seed=2 * n + side)
            for n in range(2)
        ]
        for side in range(2)
    ]


def run_steps(backend, builder, batches, meet=None):
    """Decode the batches in turn; every layer of a step with one plan."""
    if meet is not None:
        meet.wait(timeout=PATIENCE_S)
    found = []
    for number in range(STEPS):
        q, kv, common = batches[number % len(batches)]
        metadata = builder.build(common)
        for _ in range(2):
            output = backend.forward(q, kv, metadata, softmax_scale=SCALE)
            found.append(output)
    return found


def together_and_apart(backend, problem, device, query_len, *, causal=True):
    """What two threads decode at the same time, and what each decodes alone."""
    batches = ubatches(problem, query_len, causal=causal)
    builders = [backend.builder_cls(problem, device) for _ in batches]
    alone = [
        run_steps(backend, builder, steps)
        for builder, steps in zip(builders, batches, strict=True)
    ]
    meet = threading.Barrier(2)
    with ThreadPoolExecutor(2) as pool:
        jobs = [
            pool.submit(run_steps, backend, builder, steps, meet)
            for builder, steps in zip(builders, batches, strict=True)
        ]
        return [job.result() for job in jobs], alone


def same(found, expected):
    for one, other in zip(found, expected, strict=True):
        for got, wanted in zip(one, other, strict=True):
            assert torch.equal(got.out, wanted.out)
            assert torch.equal(got.lse, wanted.lse)


@pytest.mark.parametrize("name", DEVICES)
def test_two_threads_over_one_library_get_what_each_gets_alone(name):
    problem = scene_problem(query_lens={2})
    backend = backends()[name]
    same(*together_and_apart(backend, problem, DEVICES[name], 2))


def test_two_threads_over_one_lowering_get_what_each_gets_alone():
    device, backend = DEVICES["cuda_flashmla"], backends()["cuda_flashmla"]
    problem = scene_problem(query_lens={2}, masks={Mask.NON_CAUSAL})
    lowered = apply_plan(backend, plan_exact(problem, backend, device))
    same(*together_and_apart(lowered, problem, device, 2, causal=False))


@pytest.mark.parametrize("name", DEVICES)
def test_decoders_made_in_two_threads_at_once_serve_as_one_made_alone(name):
    """Construction plans, imports and asks the library: all of it shared."""
    problem, device = scene_problem(query_lens={2}), DEVICES[name]
    (q, kv, common), _ = ubatches(problem, 2)[0]
    meet = threading.Barrier(2)

    def serve():
        meet.wait(timeout=PATIENCE_S)
        decoder = MLADecoder(problem, name, device=device)
        return decoder.run(q, kv, decoder.plan(common), softmax_scale=SCALE)

    with ThreadPoolExecutor(2) as pool:
        first, second = (pool.submit(serve) for _ in range(2))
        assert torch.equal(first.result().out, second.result().out)
        assert torch.equal(first.result().lse, second.result().lse)


@pytest.mark.cuda
def test_two_threads_on_two_streams_get_what_each_gets_alone():
    device = DeviceInfo(vendor="cuda", arch="sm_90")
    problem = scene_problem(query_lens={2}, deterministic=True)
    backend = backends()["triton_mla"]
    batches = [
        [tuple(on_gpu(part) for part in batch) for batch in side]
        for side in ubatches(problem, 2)
    ]
    builders = [backend.builder_cls(problem, device) for _ in batches]
    alone = [
        run_steps(backend, builder, steps)
        for builder, steps in zip(builders, batches, strict=True)
    ]
    torch.cuda.synchronize()
    meet = threading.Barrier(2)

    def on_stream(builder, steps):
        with torch.cuda.stream(torch.cuda.Stream()):
            return run_steps(backend, builder, steps, meet)

    with ThreadPoolExecutor(2) as pool:
        jobs = [
            pool.submit(on_stream, builder, steps)
            for builder, steps in zip(builders, batches, strict=True)
        ]
        found = [job.result() for job in jobs]
    torch.cuda.synchronize()
    same(found, alone)


def on_gpu(part):
    """A tensor, or the tensors of a batch, on the GPU; host copies stay."""
    if isinstance(part, torch.Tensor):
        return part.cuda()
    from dataclasses import fields, replace

    moved = {
        field.name: getattr(part, field.name).cuda()
        for field in fields(part)
        if field.name != "query_start_loc_cpu"
        and isinstance(getattr(part, field.name), torch.Tensor)
    }
    return replace(part, **moved)
