from __future__ import annotations

import itertools
import sys

import pytest

from mla_decode.demo import text

HELD_OUT = frozenset(
    {
        "attribute-access",
        "attribute-references",
        "bltin-null-object",
        "booleans",
        "comparisons",
        "exceptions",
        "function",
        "objects",
        "raise",
        "shifting",
        "subscriptions",
        "try",
        "typesmethods",
        "typesmodules",
        "with",
    }
)


def test_the_split_by_name_is_the_same_on_every_python():
    assert set(text.held_out_topics(text.read_topics())) == HELD_OUT


def test_every_topic_either_trains_or_judges():
    topics = text.read_topics()
    training, judging = text.training_topics(topics), text.held_out_topics(topics)
    assert training.keys().isdisjoint(judging)
    assert training.keys() | judging.keys() == topics.keys()


def test_no_training_paragraph_quotes_a_held_out_topic():
    topics = text.read_topics()
    judging = set().union(*map(text.word_runs, text.held_out_topics(topics).values()))
    for kept in text.training_topics(topics).values():
        for paragraph in kept.split("\n\n"):
            assert judging.isdisjoint(text.word_runs(paragraph))


def test_a_quoting_paragraph_is_dropped_and_its_neighbours_stay():
    quoted = "one two three four five six seven eight"
    kept = text.without_held_out(f"before\n\nit says {quoted} here\n\nafter", [quoted])
    assert kept == "before\n\nafter"


def test_prompts_are_equal_in_length_and_never_overlap():
    prompts = text.held_out_prompts(40, prompt_bytes=192, continuation_bytes=96)
    assert {len(p.text) for p in prompts} == {192}
    assert {len(p.continuation) for p in prompts} == {96}
    assert {p.topic for p in prompts} <= HELD_OUT
    topics = text.read_topics()
    for name in HELD_OUT:
        starts = sorted(
            topics[name].encode().index(p.text) for p in prompts if p.topic == name
        )
        assert all(b - a >= 192 for a, b in itertools.pairwise(starts))


def test_too_many_prompts_are_refused_with_what_there_is():
    with pytest.raises(text.TextError) as caught:
        text.held_out_prompts(10_000, prompt_bytes=192, continuation_bytes=96)
    held = int(caught.value.allowed.split()[0])
    assert (
        len(text.held_out_prompts(held, prompt_bytes=192, continuation_bytes=96))
        == held
    )


def test_a_python_without_its_topics_is_told_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(text.TextError, match="standard library"):
        text.read_topics()
