"""Trains a small ConvNet on scikit-learn's handwritten digits with 1, 2 and 4 replicas.

    python examples/digits.py                          # what `unisono demo` does
    python examples/digits.py --replicas 4 --epochs 4
    python examples/digits.py --all-devices            # all GPUs, or one replica per core

The program is `src/unisono_tools/demo.py`: it belongs to the package, so that everybody has it.
"""

import sys

from unisono_tools.cli import main

if __name__ == "__main__":
    main(["demo", *sys.argv[1:]], prog_name="unisono")
