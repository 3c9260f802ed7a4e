"""Tools around Unisono: the command line and what its commands do.

They import `unisono`, which never needs them to train. Importing this package loads nothing.
"""
