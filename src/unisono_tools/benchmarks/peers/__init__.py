"""The competitors, each in its own processes where it needs them."""

__all__: list[str] = []
