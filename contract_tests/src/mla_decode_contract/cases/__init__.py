"""The cases, one module a clause or two; `registry` imports them."""
