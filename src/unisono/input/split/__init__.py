"""How a batch becomes one part per replica."""

# The stages of the pipeline import from its modules.
__all__: list[str] = []
