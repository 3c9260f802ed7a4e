"""Where batches come from, and how an epoch over them is begun and resumed."""

# The stages of the pipeline import from its modules.
__all__: list[str] = []
