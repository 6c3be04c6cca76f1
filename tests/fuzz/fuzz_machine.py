"""The state machine: an engine that decodes, changes its mind, and makes mistakes."""

from __future__ import annotations

import contextlib
import functools
import pickle
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from fuzz_engine import Draw, Engine, Sequence
from fuzz_faults import (
    CUTS,
    DECODER_FAULTS,
    FIELDS,
    PROBLEM_FAULTS,
    alien_batch,
    alien_call,
    aliens,
    batch_faults,
    call_faults,
    page_past_cache,
    spoilt_problem,
    table_faults,
)
from fuzz_targets import MAX_REQS, PLAIN, Shape, Target
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
)

from mla_decode import (
    ContractError,
    MLADecoder,
    QueryLenSupport,
    StaleMetadataError,
    split_ubatches,
)
from mla_decode.discovery import Candidate
from mla_decode_contract.call import fenced

small = st.integers(0, 3)
many = st.integers(0, 63)
shapes = st.integers(0, Shape.COUNT - 1).map(Shape.of)
draws = st.integers(0, Draw.COUNT - 1).map(Draw.of)


class AcceptedError(AssertionError):
    """Something that the contract refuses was taken without a word."""


@dataclass(kw_only=True)
class Tally:
    """What a run of the machine did."""

    rules: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    """Refusals by the error's class."""
    forwards: int = 0
    """Accepted calls whose values were compared with float64."""
    forward_steps: int = 0
    """Steps with at least one of them."""

    @property
    def steps(self):
        """Rules that ran."""
        return self.rules.total()

    @property
    def fraction(self):
        """Of the steps, those with an accepted forward."""
        return self.forward_steps / max(self.steps, 1)

    def __str__(self):
        """A histogram."""
        compared = f"one of {self.forwards} forwards compared with float64"
        lines = [f"{self.steps} steps, {self.fraction:.1%} with {compared}"]
        for counter in (self.rules, self.errors):
            lines += [f"  {n:6d} {name}" for name, n in counter.most_common()]
        return "\n".join(lines)


def counted(function):
    """Count a rule's runs, and whether a forward was accepted in it."""

    @functools.wraps(function)
    def run(self, *args, **kwargs):
        before = self.tally.forwards
        function(self, *args, **kwargs)
        self.tally.rules[function.__name__] += 1
        self.tally.forward_steps += self.tally.forwards > before

    return run


def _has_step(machine):
    return machine.current is not None


def _has_stale(machine):
    return bool(machine.stale)


def _looks_at_device(machine):
    return machine.decoder.builder.validate == "device"


def nth(table, number):
    """One entry of a table by any number."""
    names = sorted(table)
    name = names[number % len(names)]
    return name, table[name]


class DecodeMachine(RuleBasedStateMachine):
    """One layer group of an engine at a time, over one backend."""

    target: ClassVar[Target]
    tally: ClassVar[Tally]

    def __init__(self):
        super().__init__()
        self.stack = contextlib.ExitStack()
        self.stack.enter_context(self.target.prepared())

    def teardown(self):
        """Leave the process as it was."""
        self.stack.close()

    @initialize(shape=shapes, seed=st.integers(0, 2**16))
    def open(self, shape, seed):
        """The first layer group; what a backend refuses falls back to what it takes."""
        self.decoder = self.open_decoder(shape)
        self.engine = Engine(self.decoder.problem, self.target.device, seed)
        self.varlen = self.decoder.builder.query_len_support is QueryLenSupport.VARLEN
        self.current = None
        self.stale = []

    def open_decoder(self, shape):
        """A decoder of this shape, or of the nearest one that is served."""
        fallbacks = (
            shape,
            replace(shape, is_strict=0),
            replace(shape, is_strict=0, graphs=0, needs_lse=0),
            PLAIN,
        )
        for asked in fallbacks:
            problem = self.target.problem(asked)
            backend = self.target.candidates[self.target.backend].backend
            reasons = backend.refusals(problem, self.target.device)
            try:
                decoder = self.decoder_of(problem, asked.lowering, asked.validate)
            except ContractError as error:
                if not reasons:
                    raise AssertionError(f"{problem}: no reason") from error
                self.check_error(error)
                continue
            is_native = decoder.selection.plan.kind == "native"
            assert is_native or asked.lowering == "exact", "lowered without consent"
            assert not (is_native and reasons), f"served in spite of {reasons}"
            return decoder
        raise AssertionError("the plain problem is refused")

    def decoder_of(self, problem, lowering="exact", validate="device", **changes):
        """A decoder of the target."""
        arguments = {
            "backend": self.target.backend,
            "lowering": lowering,
            "device": self.target.device,
            "validate": validate,
            "candidates": self.target.candidates,
            **changes,
        }
        return MLADecoder(problem, **arguments)

    # --- steps that decode ------------------------------------------------------------

    @rule(draw=draws)
    @counted
    def decode(self, draw):
        """A step: new tokens, a build, a forward."""
        self.step(self.drawn_batch(draw), draw)

    @rule(draw=draws)
    @precondition(_has_step)
    @counted
    def decode_another_layer(self, draw):
        """Metadata is shared by the layers of a step, whatever was refused meanwhile."""
        self.forward(*self.current, draw)

    @rule(draw=draws, which=small, tokens=many)
    @counted
    def regrow(self, draw, which, tokens):
        """A request becomes longer by more than a block."""
        request = self.engine.requests[which % len(self.engine.requests)]
        room = self.engine.problem.max_model_len - request.length
        self.engine.grow(request, tokens % (room + 1))
        self.step(self.drawn_batch(draw), draw)

    @rule(draw=draws, which=small, kept=many)
    @counted
    def reject(self, draw, which, kept):
        """Drafts are rejected: a request becomes shorter."""
        request = self.engine.requests[which % len(self.engine.requests)]
        self.engine.cut(request, min(kept, request.length))
        self.step(self.drawn_batch(draw), draw)

    @rule(draw=draws)
    @counted
    def reorder(self, draw):
        """The same requests in another order."""
        requests = self.engine.requests
        order = self.engine.shuffled(len(requests))
        self.engine.requests = [requests[index] for index in order]
        self.step(self.drawn_batch(draw), draw)

    @rule(draw=draws, tokens=many)
    @counted
    def admit(self, draw, tokens):
        """A request comes, with a prompt; if there is no room another one leaves."""
        engine = self.engine
        if len(engine.requests) == MAX_REQS:
            engine.cut(engine.requests.pop(0), 0)
        request = Sequence()
        engine.grow(request, min(tokens, engine.problem.max_model_len // 2))
        engine.requests.append(request)
        self.step(self.drawn_batch(draw), draw)

    @rule(draw=draws, count=st.integers(1, MAX_REQS))
    @counted
    def decode_pads(self, draw, count):
        """A batch of nothing but pads is legal: every row is empty."""
        draw = self.allowed(draw)
        self.step(self.engine.all_pads(draw, count), draw)

    @rule(draw=draws, order=st.booleans())
    @counted
    def interleave_ubatches(self, draw, order):
        """Two builders interleaved give what each gives alone."""
        batch = self.drawn_batch(replace(draw, ragged=0))
        count = batch.common.num_reqs
        cut = count // 2
        if cut == 0:
            self.step(batch, draw)
            return
        halves = split_ubatches(batch.common, 2)
        parts = [
            batch.part(halves[0], 0, cut),
            batch.part(halves[1], cut, count),
        ]
        problem, device = self.decoder.problem, self.target.device
        cls = self.decoder.backend.builder_cls
        builders = [self.decoder.builder, cls(problem, device)]
        ways = [0, 1] if order else [1, 0]
        built = {}
        for index in ways:
            built[index] = builders[index].build(parts[index].common)
        for index in reversed(ways):
            self.forward(parts[index], built[index], draw)
        self.forget(None)
        self.current = parts[0], built[0]

    @rule(draw=draws)
    @counted
    def replay_graph(self, draw):
        """What a graph reads keeps its address; without graphs there is none to make."""
        batch = self.drawn_batch(replace(draw, ragged=0))
        if not self.decoder.problem.graphs:
            with self.refused("a capture that the problem does not name"):
                self.decoder.plan_for_capture(batch.common)
            self.current = None  # its pages may be another's by now
            return
        captured = self.decoder.plan_for_capture(batch.common)
        self.forward(batch, captured, draw)
        self.current = batch, captured
        later = self.drawn_batch(replace(draw, ragged=0))
        replayed = self.decoder.plan(later.common)
        for name in ("block_table", "seq_lens", "query_start_loc"):
            old, new = getattr(captured, name), getattr(replayed, name)
            assert old.data_ptr() == new.data_ptr(), f"{name} has moved"
        self.forget(self.current)
        self.current = later, replayed
        self.forward(later, replayed, draw)

    @rule(draw=draws, shape=shapes, seed=st.integers(0, 2**16))
    @counted
    def reopen(self, draw, shape, seed):
        """Another layer group of the same backend."""
        self.open(shape, seed)
        self.step(self.drawn_batch(draw), draw)

    # --- mistakes ---------------------------------------------------------------------

    @rule(which=small, draw=draws)
    @precondition(_has_stale)
    @counted
    def use_stale_metadata(self, which, draw):
        """Metadata of an earlier step."""
        batch, metadata = self.stale[which % len(self.stale)]
        q = self.engine.query(batch)
        arguments = self.engine.arguments(q, draw.form, draw.layer)
        with self.refused("stale metadata", StaleMetadataError):
            self.decoder.run(**arguments, plan=metadata)

    @rule(draw=draws, fault=many, field_=st.sampled_from(FIELDS), alien=many)
    @counted
    def build_malformed(self, draw, fault, field_, alien):
        """A batch that the host can see to be wrong harms none that is not."""
        batch = self.drawn_batch(draw)
        problem = self.decoder.problem
        faults = batch_faults(batch, problem, varlen=self.varlen)
        name, common = nth(faults, fault)
        with self.refused(f"a batch with {name}"):
            self.decoder.plan(common)
        name, _ = nth(aliens(), alien)
        common = alien_batch(batch, field_, name)
        if common is not None:
            with self.refused(f"a batch whose {field_} is {name}"):
                self.decoder.plan(common)
        self.step(batch, draw)

    @rule(draw=draws, fault=many)
    @precondition(_looks_at_device)
    @counted
    def build_malformed_on_device(self, draw, fault):
        """Lengths and tables that only a look at the device's values can refuse."""
        batch = self.drawn_batch(draw)
        faults = table_faults(batch, self.decoder.problem)
        name, common = nth(faults, fault)
        with self.refused(f"a batch with {name}"):
            self.decoder.plan(common)
        pages = self.engine.layers[0].shape[0]
        past = page_past_cache(batch, self.decoder.problem, pages)
        if past is not None:
            arguments = self.engine.arguments(self.engine.query(batch), draw.form)
            metadata = self.decoder.plan(past)
            with self.refused("a page past the cache"):
                self.decoder.run(**arguments, plan=metadata)
        self.step(batch, draw)

    @rule(draw=draws, fault=many, alien=many, name=st.integers(0, 7))
    @precondition(_has_step)
    @counted
    def call_malformed(self, draw, fault, alien, name):
        """A call that is wrong; no buffer is touched before it is refused."""
        batch, metadata = self.current
        problem = self.decoder.problem
        shape = (batch.rows, problem.num_q_heads)
        arguments = self.engine.arguments(self.engine.query(batch), 0, draw.layer)
        out = fenced((*shape, 512), self.out_dtype, torch.device("cpu"))
        before = out.storage.clone()
        arguments = {**arguments, "out": out.tensor, "plan": metadata}
        what, wrong = nth(call_faults(arguments, problem, batch.rows), fault)
        with self.refused(f"a call with {what}"):
            self.decoder.run(**wrong)
        field_ = sorted({*arguments, "lse"})[name]
        word, _ = nth(aliens(), alien)
        strange = alien_call(arguments, field_, word)
        if strange is not None:
            with self.refused(f"a call whose {field_} is {word}"):
                self.decoder.run(**strange)
        assert torch.equal(before, out.storage), f"{what}: out was touched"

    @rule(field_=st.sampled_from(sorted(PROBLEM_FAULTS)), choice=many, fault=many)
    @counted
    def ask_nonsense(self, field_, choice, fault):
        """Problems that cannot be, arguments that name nothing."""
        problem = self.decoder.problem
        with self.refused(f"a problem with a wrong {field_}"):
            replace(problem, **{field_: spoilt_problem(field_, choice)})
        changes = DECODER_FAULTS[fault % len(DECODER_FAULTS)]
        with self.refused(f"a decoder with {changes}"):
            self.decoder_of(problem, **changes)

    @rule(draw=draws, cut=many)
    @counted
    def split_badly(self, draw, cut):
        """Cuts that no batch has."""
        batch = self.drawn_batch(draw)
        cuts = CUTS[cut % len(CUTS)]
        with self.refused(f"ubatches cut at {cuts!r}"):
            split_ubatches(batch.common, cuts)
        self.current = None  # its pages may be another's by now

    # --- what the rules are made of ---------------------------------------------------

    @property
    def out_dtype(self):
        """The torch dtype of outputs."""
        words = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
        return words[self.decoder.problem.out_dtype]

    def allowed(self, draw):
        """The drawn step under a mask that the problem names."""
        causal = {mask.value == "causal" for mask in self.decoder.problem.masks}
        if (not draw.is_non_causal) in causal:
            return draw
        return replace(draw, is_non_causal=1 - draw.is_non_causal)

    def drawn_batch(self, draw):
        """The engine's next batch."""
        return self.engine.batch(self.allowed(draw), varlen=self.varlen)

    def step(self, batch, draw):
        """Build a batch's metadata and decode one layer with it."""
        metadata = self.decoder.plan(batch.common)
        self.forget(self.current)
        self.current = batch, metadata
        self.forward(batch, metadata, draw)

    def forget(self, step):
        """What was current is stale from now on."""
        if step is not None:
            self.stale = [*self.stale[-2:], step]
        self.current = None

    def forward(self, batch, metadata, draw):
        """Decode one layer and hold the answer to the truth."""
        q = self.engine.query(batch)
        arguments = self.engine.arguments(q, draw.form, draw.layer)
        buffers = {}
        if draw.form == 3:
            shape = (batch.rows, self.decoder.problem.num_q_heads)
            device = torch.device("cpu")
            buffers["out"] = fenced((*shape, 512), self.out_dtype, device)
            if self.decoder.problem.needs_lse:
                buffers["lse"] = fenced(shape, torch.float32, device)
        tensors = {name: buffer.tensor for name, buffer in buffers.items()}
        output = self.decoder.run(**arguments, **tensors, plan=metadata)
        for name, buffer in buffers.items():
            assert getattr(output, name) is buffer.tensor, f"{name} is another's"
            buffer.check(name)
        self.engine.check(batch, q, output, draw.layer)
        self.tally.forwards += 1

    @contextlib.contextmanager
    def refused(self, what, kind=ContractError):
        """Demand a typed error, with its data and its fix."""
        try:
            yield
        except kind as error:
            self.check_error(error)
        else:
            raise AcceptedError(f"{what} was accepted")

    def check_error(self, error):
        """An error says what was asked, what is allowed and what to do, and travels."""
        self.tally.errors[type(error).__name__] += 1
        for name in ("got", "allowed", "fix"):
            text = getattr(error, name)
            assert isinstance(text, str), f"{type(error).__name__}.{name}: {text!r}"
            assert len(text) < 20_000, f"{type(error).__name__}.{name} has no end"
        copied = pickle.loads(pickle.dumps(error))  # noqa: S301 - our own bytes
        assert str(copied) == str(error), "an error changed on its way"


def machine_of(target):
    """The machine's class for a target, with a tally of its own."""
    members = {"target": target, "tally": Tally()}
    return type("DecodeMachine", (DecodeMachine,), members)


def with_backend(target, backend):
    """The target with another object in its backend's place."""
    return replace(target, candidate=Candidate(name=target.backend, backend=backend))
