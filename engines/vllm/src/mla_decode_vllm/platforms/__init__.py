"""One backend class a platform: stock vLLM's prefill, the library's decode."""
