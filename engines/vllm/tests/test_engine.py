"""vLLM itself, on a CPU, decodes through the library.

Greedy tokens are compared in float32, where the closest race between two tokens is
orders of magnitude wider than the noise between two kernels; `MARGIN` says so.
"""

import pytest

pytestmark = pytest.mark.timeout(1500)
MARGIN = 1e-3
PERIOD = [5, 17, 33, 2, 64, 9, 41]
OTHER_PERIOD = [50, 51, 52, 53, 54, 55, 56]
MTP = {"method": "mtp", "num_speculative_tokens": 3}
NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 4,
    "prompt_lookup_min": 1,
    "prompt_lookup_max": 2,
}
MUTANTS = (
    "verify_unmasked",
    "draft_masked_causally",
    "draft_without_siblings",
    "lengths_of_the_step_before",
    "last_key_dropped",
    "tables_swapped",
    "attention_zeroed",
    "scale_of_the_absorbed_width",
    "rope_dropped",
    "rows_shifted",
)


def require(outcome):
    assert outcome.returncode == 0, outcome.log[-4000:]
    return outcome.said


@pytest.fixture(scope="module")
def drafted(engines):
    """A drafter with MLA layers, six non-causal tokens."""
    speculative = engines.drafter("draft")
    return engines.run(target="random", speculative=speculative, records_drafts=True)


def test_stock_tokens_are_no_close_race_and_no_repetition(stock):
    said = require(stock)
    assert said["margin"] > MARGIN
    assert [len(set(tokens)) > 10 for tokens in said["tokens"]] == [True, True]
    assert stock.lines() == []


def test_plain_decode_equals_stock(engines, stock):
    outcome = engines.run(target="random")
    assert require(outcome)["tokens"] == require(stock)["tokens"]
    assert "reference decodes" in outcome.lines()[0]


def test_mtp_equals_no_speculation(engines, stock):
    outcome = engines.run(target="random", speculative=MTP)
    said = require(outcome)
    assert said["tokens"] == require(stock)["tokens"]
    assert said["draft_tokens"] > 0
    assert any("causal blocks of 1..4 tokens" in line for line in outcome.lines())


def test_ngram_equals_no_speculation(engines, stock):
    said = require(engines.run(target="random", speculative=NGRAM))
    assert said["tokens"] == require(stock)["tokens"]
    assert said["draft_tokens"] > 0


def test_stock_refuses_a_block_drafter_with_mla_layers(engines):
    outcome = engines.run(
        target="random",
        speculative=engines.drafter("draft"),
        env={"MLA_DECODE_VLLM": "off"},
    )
    assert outcome.returncode != 0
    assert "Non-causal multi-token MLA requires" in outcome.log


def test_block_drafter_equals_no_speculation(drafted, stock):
    said = require(drafted)
    assert said["tokens"] == require(stock)["tokens"]
    assert said["draft_tokens"] > 0
    lines = drafted.lines()
    assert any("H=4, causal blocks of 1..13" in line for line in lines), lines
    assert any("H=2, non_causal blocks of 7" in line for line in lines), lines


def test_block_drafter_sees_siblings(engines, drafted, stock):
    masked = engines.run(
        target="random",
        speculative=engines.drafter("causal_draft"),
        records_drafts=True,
    )
    said = require(masked)
    assert said["tokens"] == require(stock)["tokens"]
    assert said["drafts"][0] != require(drafted)["drafts"][0]


def test_drafts_of_the_targets_own_layer_are_accepted(engines):
    outcome = engines.run(
        target="echo",
        prompts=[2 * PERIOD + PERIOD[:1], 2 * OTHER_PERIOD + OTHER_PERIOD[:3]],
        speculative=engines.drafter("echo_draft"),
        records_drafts=True,
    )
    said = require(outcome)
    first = (PERIOD[1:] + PERIOD[:1]) * 4
    second = (OTHER_PERIOD[3:] + OTHER_PERIOD[:3]) * 4
    assert said["tokens"] == [first[:24], second[:24]]
    rate = said["accepted_tokens"] / said["draft_tokens"]
    drafted = f"{said['draft_tokens']:.0f} draft tokens"
    engines.notes.append(
        f"accepted {rate:.0%} of {drafted} from the target's own layer"
    )
    assert rate > 0.5


def test_engine_in_processes_of_its_own_finds_the_installed_plugin(engines, stock):
    outcome = engines.run(
        target="random",
        speculative=engines.drafter("draft"),
        env={"VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
    )
    assert require(outcome)["tokens"] == require(stock)["tokens"]
    assert outcome.lines()
    assert not [line for line in outcome.lines() if "MainProcess" in line]


@pytest.fixture(scope="module")
def mutated(engines):
    speculative = engines.drafter("draft")
    outcome = engines.run(
        target="random", speculative=speculative, records_drafts=True, mutants=True
    )
    return require(outcome)


@pytest.mark.slow
def test_without_a_mutant_an_engine_repeats_itself(mutated, drafted):
    plain = require(drafted)
    for said in (mutated, mutated["again"], mutated["afterwards"]):
        assert said["tokens"] == plain["tokens"]
        assert said["drafts"] == plain["drafts"]
    assert sorted(mutated["mutants"]) == sorted(MUTANTS)


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_caught(engines, mutated, name):
    said = mutated["mutants"][name]
    words = [word for word in ("tokens", "drafts") if said[word] != mutated[word]]
    engines.notes.append(f"mutant {name} changed {' and '.join(words) or 'nothing'}")
    assert words
