"""Faults of schedules that outlive their step, and of graphs that read old ones."""

import gc

import pytest
import torch
from fault_steps import (
    CPU,
    SCALE,
    SERVERS,
    Recorded,
    Step,
    codes,
    decoder_of,
    problem_of,
    serve,
)

from mla_decode import BatchError, StaleMetadataError

GRAPHS = [name for name in SERVERS if name != "reference"]
JUNK = 0x7FFFFFFF


def graph_problem(q=1, **words):
    return problem_of(2, q, graphs=True, **{"max_model_len": 128} | words)


def addresses(plan):
    """Where each tensor of a plan lies, by its field."""
    names = {n for cls in type(plan).__mro__ for n in getattr(cls, "__slots__", ())}
    fields = {name: getattr(plan, name) for name in names if name != "bound"}
    return {
        name: value.data_ptr()
        for name, value in fields.items()
        if isinstance(value, torch.Tensor)
    }


@pytest.mark.fault("META-03")
@pytest.mark.parametrize("name", GRAPHS)
def test_sixty_growing_replays_follow_their_plans(name):
    decoder = decoder_of(graph_problem(), SERVERS[name])
    step = Step(decoder.problem, decoder.device, [128, 128])
    recorded = Recorded(decoder, step.with_lens([64, 3]))
    before = addresses(recorded.plan)
    assert before
    # an interpreted replay takes a second; what moves is seen in fewer
    for grown in range(1, 61, 12 if name == "interpreted Triton" else 1):
        recorded.replay(step.with_lens([64 + grown, 3 + grown]))
        assert addresses(recorded.newest) == before


@pytest.mark.fault("META-04")
@pytest.mark.parametrize("name", GRAPHS)
def test_the_builder_keeps_what_graphs_of_every_shape_read(name):
    decoder = decoder_of(graph_problem(), SERVERS[name])
    recorded, places = {}, {}
    counts = (1, 3, 4) if name == "interpreted Triton" else range(1, 9)
    for count in counts:
        step = Step(decoder.problem, decoder.device, [70] * count)
        recorded[count] = Recorded(decoder, step)
        places[count] = addresses(recorded[count].plan)
        if count % 3:
            del recorded[count]  # the graph's addresses are all that is left
    gc.collect()
    noise = [torch.full((size,), JUNK, dtype=torch.int32) for size in range(1, 400)]
    for count, found in recorded.items():
        found.replay(found.step.with_lens([9] * count))
    for count in counts:
        step = Step(decoder.problem, decoder.device, [70] * count)
        assert addresses(decoder.plan(step.common)) == places[count]
    assert all((one == JUNK).all() for one in noise)


@pytest.mark.fault("META-05")
@pytest.mark.parametrize("name", SERVERS)
def test_a_plan_ends_with_the_next_one_and_serves_all_layers_till_then(name):
    decoder = decoder_of(problem_of(2, max_model_len=256), SERVERS[name])
    step = Step(decoder.problem, decoder.device, [64, 64])
    plan = decoder.plan(step.common)
    for _ in range(5):
        step.check(step.run(decoder, plan))
    assert decoder.calls == {"causal": 5}
    if name == "simulated AITER":
        assert decoder.builder.library.machine.schedules == 1
    later = Step(decoder.problem, decoder.device, [160, 10])
    newest = decoder.plan(later.common)
    with pytest.raises(StaleMetadataError, match="not its builder's newest") as caught:
        later.run(decoder, plan)
    assert "call build for this step" in caught.value.fix
    later.check(later.run(decoder, newest))
    assert decoder.calls == {"causal": 6}


KINDS = {
    "one token": (1, True, "refuse"),
    "causal block": (4, True, "refuse"),
    "draft block": (4, False, "exact"),
}


@pytest.mark.fault("META-06")
@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_replay_of_every_kind_of_block_follows_the_lengths(name, kind):
    q, causal, lowering = KINDS[kind]
    problem = graph_problem(q, causal=causal)
    decoder = decoder_of(problem, SERVERS[name], lowering)
    step = Step(problem, decoder.device, [100, 100], causal=causal)
    recorded = Recorded(decoder, step)
    for lens in ([5, 90], [100, 64], [65, 4]):
        recorded.replay(step.with_lens(lens))


@pytest.mark.fault("META-07")
@pytest.mark.parametrize("name", SERVERS)
def test_a_table_of_another_layout_is_refused_by_its_form(name):
    decoder = decoder_of(problem_of(2), SERVERS[name])
    step = Step(decoder.problem, decoder.device, [64, 65])
    table = step.common.block_table_tensor
    for wrong in (
        torch.arange(129, dtype=torch.int32),  # AITER's flat indices
        table.flatten(),
        table.long(),
        table[:, None],
        table.float(),
        table.tolist(),
    ):
        with pytest.raises(BatchError, match="block_table_tensor") as caught:
            decoder.plan(step.changed(block_table_tensor=wrong).common)
        assert "int32 [>= 2, >= 2]" in caught.value.allowed
    other = decoder_of(
        problem_of(2), SERVERS["reference" if name != "reference" else GRAPHS[0]]
    )
    foreign = other.plan(step.common)
    with pytest.raises(StaleMetadataError, match="another backend's builder"):
        step.run(decoder, foreign)


def fill_with_junk(decoder):
    """Every buffer that a plan writes, as a larger step or nobody left it."""
    builder = decoder.builder
    stable = builder._stable
    buffers = [stable._table, stable._lens, stable._totals, stable._starts]
    if decoder.backend.name == "rocm_aiter":
        buffers += [*builder._buffers.values(), builder._kv_indices]
    for tensor in buffers:
        tensor.view(torch.int32).fill_(JUNK)


@pytest.mark.fault("META-08")
@pytest.mark.parametrize("name", GRAPHS)
def test_junk_behind_a_small_step_is_never_read(name):
    decoder = decoder_of(graph_problem(max_num_reqs=64), SERVERS[name])
    step = Step(decoder.problem, decoder.device, [70, 9, 64])
    fill_with_junk(decoder)
    step.check(step.run(decoder))
    recorded = Recorded(decoder, step)
    fill_with_junk(decoder)
    recorded.replay(step.with_lens([3, 0, 64]))


MODES = (
    {},
    {"deterministic": True},
    {"max_splits": 1},
    {"batch_invariant": True},
)


@pytest.mark.fault("META-09")
@pytest.mark.parametrize("name", SERVERS)
def test_settings_belong_to_the_problem_and_do_not_meet_in_a_plan(name):
    served = []
    for mode in MODES:
        problem = problem_of(2, max_model_len=128, **mode)
        backend = decoder_of(problem_of(2), SERVERS[name]).backend
        if backend.refusals(problem, SERVERS[name][1]):
            found = codes(problem, SERVERS[name])
            assert found == {
                "feature" if "max_splits" in mode else "determinism",
            }
            continue
        served.append(decoder_of(problem, SERVERS[name]))
    assert len(served) >= 2
    steps = [Step(d.problem, d.device, [100, 9]) for d in served]
    plans = [d.plan(s.common) for d, s in zip(served, steps, strict=True)]
    found = []
    for _ in range(2):
        for decoder, step, plan in zip(served, steps, plans, strict=True):
            output = step.run(decoder, plan)
            step.check(output)
            found.append(output.out.clone())
    for first, second in zip(found[: len(served)], found[len(served) :], strict=True):
        assert torch.equal(first, second)


@pytest.mark.fault("META-10")
@pytest.mark.parametrize("name", SERVERS)
@pytest.mark.parametrize("field", ["seq_lens", "block_table", "query_start_loc"])
def test_a_plan_whose_tensor_was_exchanged_is_stale(name, field):
    decoder, step, _ = serve(problem_of(2), SERVERS[name], [64, 9])
    plan = decoder.plan(step.common)
    setattr(plan, field, getattr(plan, field).clone())
    out = step.outputs()["out"]
    with pytest.raises(StaleMetadataError, match="was exchanged") as caught:
        decoder.run(step.q, step.kv_cache, plan, softmax_scale=SCALE, out=out)
    assert "refreshes what graphs read" in caught.value.fix
    assert out.isnan().all()
    step.check(step.run(decoder))


@pytest.mark.fault("META-10")
@pytest.mark.parametrize("name", GRAPHS)
def test_a_replay_follows_plan_and_not_what_was_put_on_the_object(name):
    decoder = decoder_of(graph_problem(), SERVERS[name])
    step = Step(decoder.problem, decoder.device, [100, 100])
    recorded = Recorded(decoder, step)
    kept = recorded.plan.seq_lens
    recorded.plan.seq_lens = torch.full((2,), JUNK, dtype=torch.int32)
    if recorded.graph is None:
        with pytest.raises(StaleMetadataError):
            recorded.replay(step.with_lens([64, 9]))
        recorded.plan.seq_lens = kept
    recorded.replay(step.with_lens([64, 9]))
    assert decoder.device != CPU
