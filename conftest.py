"""Settings of every test in the repository."""

from hypothesis import settings

settings.register_profile("mla-decode", deadline=None)
"""Examples share two cores with the rest of the suite: no deadline a run."""
settings.load_profile("mla-decode")
