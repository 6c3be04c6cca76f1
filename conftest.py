"""Settings and fixtures of every test in the repository."""

import pytest
from hypothesis import settings

settings.register_profile("mla-decode", deadline=None)
"""Examples share two cores with the rest of the suite: no deadline a run."""
settings.load_profile("mla-decode")


@pytest.fixture
def operators():
    """A function that makes a call and names the operators that reached torch."""
    # Here, for many tests need no torch.
    from torch.utils._python_dispatch import TorchDispatchMode

    class Operators(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.names = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            del types
            self.names.append(str(func.overloadpacket).rpartition(".")[2])
            return func(*args, **(kwargs or {}))

    def names_of(call):
        with Operators() as seen:
            call()
        return seen.names

    return names_of
