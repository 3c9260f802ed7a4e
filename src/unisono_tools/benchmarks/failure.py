"""What ends a benchmark that cannot be believed."""


class BenchmarkError(RuntimeError):
    """A result was wrong, or a competitor failed or did not answer in time."""
