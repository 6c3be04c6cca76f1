"""Kernels of two kinds in one process: each is what was asked for, whoever came first."""

import subprocess
import sys
import textwrap

import pytest

pytest.importorskip("triton", reason="needs Triton")


def run(source):
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(source)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_kernels_that_were_imported_interpreted_are_compiled_for_a_card():
    run(
        """
        import os
        os.environ["TRITON_INTERPRET"] = "1"
        import mla_decode_triton.kernels.decode as early
        del os.environ["TRITON_INTERPRET"]
        from triton.runtime.jit import JITFunction
        from mla_decode_triton.loading import load_kernels
        assert not isinstance(early.decode_kernel, JITFunction)
        kernels = load_kernels(interpreted=False)
        assert isinstance(kernels.decode, JITFunction)
        assert isinstance(kernels.merge, JITFunction)
        assert isinstance(kernels.decode.fn.__globals__["multiply"], JITFunction)
        assert load_kernels(interpreted=False) is kernels
        """
    )


def test_threads_that_load_both_kinds_get_their_own():
    run(
        """
        from concurrent.futures import ThreadPoolExecutor
        import triton
        from triton.runtime.jit import JITFunction
        from mla_decode_triton.loading import load_kernels
        kinds = [False, True] * 4
        with ThreadPoolExecutor(8) as pool:
            loaded = list(pool.map(lambda kind: load_kernels(interpreted=kind), kinds))
        for kind, kernels in zip(kinds, loaded, strict=True):
            assert kernels.interpreted is kind
            called = kernels.decode.fn.__globals__["multiply"]
            for function in (kernels.decode, kernels.merge, called):
                assert isinstance(function, JITFunction) is not kind
        assert triton.knobs.runtime.interpret is False
        """
    )
