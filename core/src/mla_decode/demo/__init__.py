"""The demo: a small MLA language model that decodes through the contract.

`run_demo` generates from held-out prompts with and without speculation and returns a
`DemoReport`. Importing this package imports torch; `mla_decode.demo.command` does not.
"""
