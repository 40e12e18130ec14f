"""The operations of `python -m xfresearch.bench`: one file each, and those of one function of arrays in kernels.py.

The docstring of an operation is its help. `add_flags(parser)` declares its flags, `run(options)` measures and prints.
These files import JAX inside functions, so that `--help` and mistakes in flags answer at once.
"""
