"""Training steps on CPU replicas: `unisono bench step`, from a checkout.

    python benchmarks/training_step.py --help

What is measured, and how, stands in `src/unisono_tools/benchmarks/training_step.py`.
"""

import sys

from unisono_tools.cli import main

if __name__ == "__main__":
    main(["bench", "step", *sys.argv[1:]], prog_name="unisono")
