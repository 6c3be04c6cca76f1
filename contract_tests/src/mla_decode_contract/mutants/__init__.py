"""Deliberately wrong wrappers of a backend: what the kit must catch."""

from mla_decode_contract.mutants.catalogue import MUTANTS
from mla_decode_contract.mutants.mutant import Mutant

__all__ = ["MUTANTS", "Mutant"]
