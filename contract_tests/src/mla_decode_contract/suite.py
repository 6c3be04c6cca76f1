"""The contract as a pytest target: ``--pyargs mla_decode_contract.suite``.

The plugin collects one item a case from this file, whatever names and patterns the
project's own configuration asks of test functions.
"""
