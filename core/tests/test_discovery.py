"""Backends behind synthetic entry points: each failure is a refusal of its own."""

import sys
from importlib.metadata import EntryPoint
from types import ModuleType, SimpleNamespace

import pytest

from mla_decode import CONTRACT_VERSION, Backend, discover
from mla_decode.discovery import ENTRY_POINT_GROUP, KNOWN_DISTRIBUTIONS


@pytest.fixture
def entry(monkeypatch):
    """A function that puts an object behind an entry point of its own."""

    def entry(name, target, *, module="synthetic_adapter"):
        holder = ModuleType(module)
        holder.backend = target
        monkeypatch.setitem(sys.modules, module, holder)
        return EntryPoint(name, f"{module}:backend", ENTRY_POINT_GROUP)

    return entry


def only(point):
    return discover([point])[point.name]


def test_a_backend_behind_an_entry_point_is_a_candidate(entry, plain_backend):
    candidate = only(entry("plain", plain_backend))
    assert candidate.backend is plain_backend
    assert candidate.refusal is None


def test_the_reference_is_installed_with_core():
    assert discover()["reference"].backend.name == "reference"


def test_known_adapters_are_candidates_even_when_absent():
    candidates = discover([])
    assert set(candidates) == set(KNOWN_DISTRIBUTIONS)
    for name, distribution in KNOWN_DISTRIBUTIONS.items():
        refusal = candidates[name].refusal
        assert refusal.code.value == "dependency"
        assert refusal.fix == f"pip install {distribution}"


@pytest.mark.parametrize("error", [ImportError, OSError, SystemExit, KeyError])
def test_an_adapter_that_raises_on_import_refuses_and_hides_no_other(
    tmp_path, monkeypatch, entry, plain_backend, error
):
    name = f"broken_{error.__name__.lower()}"
    (tmp_path / f"{name}.py").write_text(f"raise {error.__name__}('libfoo.so')")
    monkeypatch.syspath_prepend(tmp_path)
    broken = EntryPoint("broken", f"{name}:backend", ENTRY_POINT_GROUP)
    candidates = discover([broken, entry("plain", plain_backend)])
    refusal = candidates["broken"].refusal
    assert refusal.code.value == "import"
    assert refusal.got.startswith(error.__name__)
    assert "libfoo.so" in refusal.got
    assert candidates["plain"].backend is plain_backend


def test_an_adapter_without_the_named_object_refuses(entry, plain_backend):
    entry("plain", plain_backend)
    point = EntryPoint("plain", "synthetic_adapter:missing", ENTRY_POINT_GROUP)
    assert only(point).refusal.got.startswith("AttributeError")


def test_an_object_that_is_no_backend_says_what_it_lacks(entry):
    thing = SimpleNamespace(name="thing", contract="1.0")
    refusal = only(entry("thing", thing)).refusal
    assert refusal.code.value == "import"
    assert "forward" in refusal.got
    assert "contract" not in refusal.got


def test_a_class_is_no_instance(entry, plain_backend_cls):
    refusal = only(entry("plain", plain_backend_cls)).refusal
    assert refusal.got == "PlainBackend: a class, no instance"


def test_a_backend_may_carry_its_members_on_the_instance(entry, plain_backend):
    names = sorted(name for name in vars(Backend) if not name.startswith("_"))
    thing = SimpleNamespace(**{name: getattr(plain_backend, name) for name in names})
    assert only(entry("plain", thing)).backend is thing


def test_a_backend_has_the_name_of_its_entry_point(entry, plain_backend):
    refusal = only(entry("other", plain_backend)).refusal
    assert refusal.code.value == "import"
    assert refusal.got == "'plain' behind 'other'"


@pytest.mark.parametrize("contract", ["1.1", "2.0", "0.9", "unknown"])
def test_a_backend_of_another_contract_refuses(entry, plain_backend, contract):
    plain_backend.contract = contract
    refusal = only(entry("plain", plain_backend)).refusal
    assert refusal.code.value == "version"
    assert refusal.got == f"contract {contract}"
    assert CONTRACT_VERSION in refusal.allowed


def test_a_contract_that_is_no_string_refuses(entry, plain_backend):
    plain_backend.contract = 1.0
    refusal = only(entry("plain", plain_backend)).refusal
    assert refusal.code.value in {"import", "version"}  # as packaging words it


def test_reading_an_entry_point_reads_no_builder(entry, plain_backend_cls):
    class Lazy(plain_backend_cls):
        @property
        def builder_cls(self):
            raise AssertionError("reading it imports kernels")

    lazy = Lazy()
    assert only(entry("plain", lazy)).backend is lazy


def test_two_distributions_with_one_name_refuse_both(entry, plain_backend):
    points = [
        entry("plain", plain_backend, module=module) for module in ("one_a", "one_b")
    ]
    refusal = discover(points)["plain"].refusal
    assert refusal.code.value == "import"
    assert refusal.got == "one_a:backend, one_b:backend"
    twice = discover([points[0], points[0]])["plain"]
    assert twice.backend is plain_backend
