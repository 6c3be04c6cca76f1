"""`mla-decode bench`: the installed backends side by side, on this machine."""

from mla_decode.cli.bench.command import bench

__all__ = ["bench"]
