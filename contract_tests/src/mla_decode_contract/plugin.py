"""The pytest plugin; it does nothing in a project that does not ask for it."""
