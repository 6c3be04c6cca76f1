"""What stands in a machine's way, found without importing a kernel library here."""

from mla_decode.diagnosis.finding import Diagnoses, Finding, Level, Section

__all__ = ["Diagnoses", "Finding", "Level", "Section"]
