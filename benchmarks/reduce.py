"""Reductions of R replicas on one host: `unisono bench reduce`, from a checkout.

    python benchmarks/reduce.py --help

What is measured, and how, stands in `src/unisono_tools/benchmarks/reduce.py`.
"""

import sys

from unisono_tools.cli import main

if __name__ == "__main__":
    main(["bench", "reduce", *sys.argv[1:]], prog_name="unisono")
