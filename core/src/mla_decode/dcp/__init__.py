"""Decode context parallel: a request's KV dealt over ranks, merged exactly."""

from mla_decode.dcp.group import DcpMerger
from mla_decode.dcp.lengths import local_seq_lens, owned_tokens
from mla_decode.dcp.merge import merge_partials

__all__ = ["DcpMerger", "local_seq_lens", "merge_partials", "owned_tokens"]
