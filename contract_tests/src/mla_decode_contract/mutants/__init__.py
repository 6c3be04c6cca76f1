"""To come."""

MUTANTS = {}
