"""The `mla-decode` command line."""

from mla_decode.cli.app import main

__all__ = ["main"]
