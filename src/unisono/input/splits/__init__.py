"""How a batch becomes one part per replica."""

from unisono.input.splits.counts import counts_of
from unisono.input.splits.layout import is_column, lay_out
from unisono.input.splits.parts import Part, PartQueue, together
from unisono.input.splits.sizes import even_sizes, filled_slices, fixed_sizes, tensorflow_sizes
from unisono.input.splits.splitter import MISSING, SplitBatch, Splitter, copied, grouped
from unisono.input.splits.steps import (
    BatchPerReplica,
    OwnBatches,
    SharedBatches,
    SplitEpoch,
    WholeBatches,
)

__all__ = [
    "MISSING",
    "BatchPerReplica",
    "OwnBatches",
    "Part",
    "PartQueue",
    "SharedBatches",
    "SplitBatch",
    "SplitEpoch",
    "Splitter",
    "WholeBatches",
    "copied",
    "counts_of",
    "even_sizes",
    "filled_slices",
    "fixed_sizes",
    "grouped",
    "is_column",
    "lay_out",
    "tensorflow_sizes",
    "together",
]
