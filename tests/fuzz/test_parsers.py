"""Foreign text is read or refused with a typed error, whatever it holds."""

import time

import pytest
from fuzz_parsers import PARSERS, TYPED
from hypothesis import HealthCheck, example, given, seed, settings
from hypothesis import strategies as st

from mla_decode import Refusal

TOKENS = (
    *(b"\0", b"\xff", b"\xef\xbb\xbf", b"\xed\xa0\x80", b"\r", b"\n\n", b'"', b"'"),
    *(b",", b",,", b"[", b"]", b"{", b"}", b"[[", b"=", b"\\", b"\\u0000", b"\\ud800"),
    *(b"-1", b"0", b"1e999", b"nan", b"inf", b"NaN", b"Infinity", b"-Infinity"),
    *(b"null", b"true", b"1.5", b"9" * 40, b"9" * 5000, b"x" * 200_000),
    *(b"[" * 3000, b'{"a":' * 3000, b"0000-00-00 00:00:00", b"9999-12-31 23:59:59"),
    *(b"1_0", b"\xd9\xa3", b" ", b"\t", b"#", b"+", b"."),
)
"""What text of any of these kinds stumbles over."""
edits = st.tuples(
    st.integers(0, 2**16), st.integers(0, 12), st.sampled_from([b"", *TOKENS])
)


def spoilt(text, changes):
    """A text with some places overwritten."""
    for place, length, token in changes:
        at = place % (len(text) + 1)
        text = text[:at] + token + text[at + length :]
    return text


def texts(parser):
    """Valid text with a few places spoilt, and bytes that nobody wrote."""
    mutated = st.builds(
        spoilt, st.sampled_from(parser.seeds), st.lists(edits, min_size=1, max_size=4)
    )
    return st.one_of(mutated, mutated, st.binary(max_size=200))


def outcome(parser, data):
    """Read; a typed error and a refusal are outcomes, everything else is a defect."""
    try:
        found = parser.read(data)
    except TYPED as error:
        return "refused" if str(error) else "refused without a word"
    return "refused" if isinstance(found, Refusal) else "read"


@pytest.mark.parametrize("name", PARSERS)
def test_valid_text_is_read(name):
    parser = PARSERS[name]
    assert {outcome(parser, text) for text in parser.seeds} == {"read"}


def fuzz(name, examples, chosen_seed):
    """Read so many spoilt texts."""
    parser = PARSERS[name]
    found = {"read": 0, "refused": 0}

    @settings(
        max_examples=examples,
        derandomize=chosen_seed is None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(texts(parser))
    @example(b"")
    @example(b"\xff\xfe")
    @example(b"[" * 100_000)
    def read(text):
        found[outcome(parser, text)] += 1

    (read if chosen_seed is None else seed(chosen_seed)(read))()
    return found


@pytest.fixture
def chosen_seed(request):
    """Of ``--hypothesis-seed``; without it every run is the same."""
    text = request.config.getoption("--hypothesis-seed", None)
    return None if text is None else int(text)


@pytest.mark.parametrize("name", PARSERS)
def test_spoilt_text_is_read_or_refused(name, chosen_seed):
    assert sum(fuzz(name, 80, chosen_seed).values()) >= 80


@pytest.mark.slow
@pytest.mark.parametrize("name", PARSERS)
def test_much_spoilt_text_is_read_or_refused(name, chosen_seed):
    assert sum(fuzz(name, 1500, chosen_seed).values()) >= 1500


def cpu_time(parser, count):
    """Seconds of this process for text of so many entries: the best of three."""
    text = parser.grown(count)
    best = float("inf")
    for _ in range(3):
        began = time.process_time()
        outcome(parser, text)
        best = min(best, time.process_time() - began)
    return best


MEASURABLE_S, MOST_BYTES = 0.02, 2_000_000


@pytest.mark.slow
@pytest.mark.parametrize("name", PARSERS)
def test_time_grows_with_the_text_and_not_with_its_square(name):
    parser, entries = PARSERS[name], 100
    while (small := cpu_time(parser, entries)) < MEASURABLE_S:
        if len(parser.grown(2 * entries)) > MOST_BYTES:
            break
        entries *= 2
    # Eight times the text: a linear reader takes 8 times as long, a quadratic one 64.
    assert cpu_time(parser, 8 * entries) < 24 * max(small, MEASURABLE_S)
