"""The Hopper (sm_90) kernel in Gluon. Not chosen by the backend yet.

Importing this package imports nothing of Triton; its modules do. `docs/hopper.md` says
how the kernel works, and what of it has been measured.
"""
