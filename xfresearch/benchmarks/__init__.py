"""The operations of `python -m xfresearch.bench`, one file each.

The docstring of an operation's file is its help. `add_flags(parser)` declares its flags, `run(options)` measures and prints.
These files import JAX inside functions, so that `--help` and mistakes in flags answer at once.
"""
