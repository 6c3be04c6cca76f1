"""The `mla-decode` command line."""

from mla_decode.cli.entry import main

__all__ = ["main"]
