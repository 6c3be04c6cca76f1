import copy
import pickle

import pytest

from mla_decode import (
    ArgumentError,
    BackendRefused,
    BatchError,
    ContractError,
    MaskError,
    OutdatedLibraryError,
    Refusal,
    RefusalCode,
    StaleMetadataError,
)
from mla_decode.version import is_compatible

REASON = Refusal(
    code=RefusalCode.MASK, message="No kernel", got="Q=2", allowed="Q=3", fix="pad it"
)
ERRORS = [
    *(
        kind("What happened.", got="1", allowed="2", fix="pass 2")
        for kind in (MaskError, BatchError, ArgumentError, StaleMetadataError)
    ),
    OutdatedLibraryError(
        "Too old.", library="amd-aiter", installed="0.1.13", first_supported="0.1.18"
    ),
    BackendRefused("Nobody.", {"a": [REASON], "b": [REASON, REASON]}),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_error_keeps_its_data_through_pickle_and_copy(error):
    for twin in (
        pickle.loads(pickle.dumps(error)),  # noqa: S301 - our own bytes
        copy.copy(error),
    ):
        assert type(twin) is type(error)
        assert twin.__dict__ == error.__dict__
        assert str(twin) == str(error)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_error_says_what_was_asked_what_is_allowed_and_what_to_do(error):
    assert isinstance(error, ContractError)
    assert error.got in str(error)
    assert error.allowed in str(error)
    assert error.fix.split(",", maxsplit=1)[0] in str(error)


def test_kinds_are_those_that_callers_catch():
    assert issubclass(BackendRefused, ValueError)
    assert issubclass(MaskError, ValueError)
    assert issubclass(BatchError, ValueError)
    assert issubclass(ArgumentError, ValueError)
    assert issubclass(StaleMetadataError, RuntimeError)
    assert issubclass(OutdatedLibraryError, RuntimeError)


def test_a_refusal_lists_every_reason_by_backend():
    error = ERRORS[-1]
    assert error.refusals == (REASON,) * 3
    assert error.codes == {"mask"}
    assert str(error).splitlines()[1].strip().startswith("a: [mask] No kernel (got Q=2")
    assert (error.got, error.allowed, error.fix) == ("Q=2", "Q=3", "pad it")
    assert BackendRefused("Nobody.", {}, got="this").got == "this"


def test_a_refusal_prints_as_plain_data():
    assert REASON.as_dict() == {
        "code": "mask",
        "message": "No kernel",
        "got": "Q=2",
        "allowed": "Q=3",
        "fix": "pad it",
    }


def test_an_outdated_library_names_the_ways_out():
    error = ERRORS[-2]
    assert error.got == "amd-aiter 0.1.13"
    for way in ("upgrade amd-aiter to 0.1.18", "name another", 'lowering="exact"'):
        assert way in error.fix


@pytest.mark.parametrize(
    ("written_to", "core", "expected"),
    [
        ("1.0", "1.0", True),
        ("1.0", "1.3", True),
        ("1.3", "1.0", False),
        ("2.0", "1.9", False),
        ("0.9", "1.0", False),
        ("1", "1.0", True),
        ("one", "1.0", False),
    ],
)
def test_an_adapter_works_with_a_core_of_its_major_and_no_older_minor(
    written_to, core, expected
):
    assert is_compatible(written_to, core) is expected
