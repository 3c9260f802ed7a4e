"""How the batches of a pass become the steps of one worker."""

from __future__ import annotations

from unisono.input.context import InputContext
from unisono.input.iterator import Deal
from unisono.input.passes import Pass
from unisono.input.sharding import filled_slices, fixed_sizes, slices_of
from unisono.input.splitting import Parts, Splitter


class WholeBatches(Deal):
    """Each batch is that of the one replica there is."""

    def draw(self) -> Parts:
        """See `Deal.draw`."""
        return self.splitter.whole(next(self.opened.batches[0]))


class SharedBatches(Deal):
    """All workers draw the same batches, and each keeps the parts of its replicas."""

    def __init__(
        self, opened: Pass, splitter: Splitter, num_replicas: int, context: InputContext
    ) -> None:
        super().__init__(opened, splitter)
        first = context.input_pipeline_id * num_replicas
        self._own = slice(first, first + num_replicas)
        self._num_parts = context.num_input_pipelines * num_replicas

    def draw(self) -> Parts:
        """See `Deal.draw`."""
        return self.splitter.split(next(self.opened.batches[0]), self._num_parts, self._own)


class OwnBatches(Deal):
    """A worker's own batches, each of which lasts for as many steps as there are workers.

    As TensorFlow splits, all batches are split as a full one is, and a shorter one fills its parts
    in order. The first batch of the first pass says what a full one is, unless the source does.
    """

    def __init__(
        self, opened: Pass, splitter: Splitter, num_replicas: int, context: InputContext
    ) -> None:
        super().__init__(opened, splitter)
        self._num_replicas = num_replicas
        self._place = context.num_input_pipelines, context.input_pipeline_id, num_replicas
        progress = opened.progress
        if progress.batch_size is None:
            progress.batch_size = opened.sources[0].batch_size
        # A pass may be resumed in the middle of a batch.
        self._to_skip = progress.num_steps % progress.steps_per_batch
        self._left: list[Parts] = []

    def _slices(self, num_samples: int) -> tuple[slice, ...]:
        if not self.splitter.leaves_empty:
            return slices_of(fixed_sizes(num_samples, *self._place))
        progress = self.opened.progress
        progress.batch_size = progress.batch_size or num_samples
        full = max(progress.batch_size, num_samples)
        return filled_slices(num_samples, fixed_sizes(full, *self._place))

    def draw(self) -> Parts:
        """See `Deal.draw`."""
        if not self._left:
            step, num_workers = self._num_replicas, self._place[0]
            num_parts = step * num_workers
            batch = next(self.opened.batches[0])
            parts = self.splitter.split(batch, num_parts, slices=self._slices)
            firsts = range(0, num_parts, step)
            self._left = [parts.of(slice(first, first + step)) for first in firsts]
            del self._left[: self._to_skip]
            self._to_skip = 0
        return self._left.pop(0)
