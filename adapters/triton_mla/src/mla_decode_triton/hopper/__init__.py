"""The Hopper (sm_90) kernel in Gluon, which serves wherever it can (`auto`).

Importing this package imports nothing of Triton; the modules of its kernels do.
`docs/hopper.md` says how the kernel works, and what of it has been measured.
"""
