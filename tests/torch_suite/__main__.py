"""Runs torch's own distributed tests over Gloo and over Unisono, and counts."""

from __future__ import annotations

import sys

from torch_suite.catalog import by_suite
from torch_suite.differences import DIFFERENCES
from torch_suite.ranks import Outcome, run


def main() -> None:
    """Prints what became of each test and the counts; ends with 1 if something else differs."""
    unexpected = []
    for suite, names in by_suite(sys.argv[1:]).items():
        over_gloo = [_told(suite, "gloo", one) for one in run(suite, names, "gloo")]
        common = [one.name for one in over_gloo if one.verdict == "passed" and one.has_used_group]
        ours = [_told(suite, "unisono", one) for one in run(suite, common, "unisono")]
        different = [f"{suite}.{one.name}" for one in ours if one.verdict != "passed"]
        unexpected += [name for name in different if name not in DIFFERENCES]
        print(
            f"{suite}: {len(common)} tests use a group and pass over Gloo, "
            f"{len(common) - len(different)} of them over Unisono",
            *different,
            sep="\n    ",
            flush=True,
        )
    print("not expected to differ:", *unexpected or ["none"])
    sys.exit(bool(unexpected))


def _told(suite: str, backend: str, outcome: Outcome) -> Outcome:
    print(f"{backend} {suite}.{outcome.name}: {outcome.verdict} {outcome.seconds:.1f} s")
    if outcome.verdict in ("failed", "hung"):
        print(outcome.why)
    sys.stdout.flush()
    return outcome


if __name__ == "__main__":
    main()
