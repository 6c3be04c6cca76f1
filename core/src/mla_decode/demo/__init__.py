"""The demo: a small MLA language model that decodes through the contract.

`mla_decode.demo.run.run_demo` generates from held-out prompts with and without
speculation and returns a `DemoReport`; `mla_decode.demo.command` is `mla-decode demo`.
Nothing is imported here, so that the command line starts without torch.
"""
