"""All-reduce between processes: `unisono bench all-reduce`, from a checkout.

    python benchmarks/all_reduce.py --help

What is measured, and how, stands in `src/unisono_tools/benchmarks/all_reduce.py`.
"""

import sys

from unisono_tools.cli import main

if __name__ == "__main__":
    main(["bench", "all-reduce", *sys.argv[1:]], prog_name="unisono")
