"""The competitors, each in processes of its own where it needs them."""

__all__: list[str] = []
