"""Every program; to import this is to have them all."""

from programs import foreign, generative, language, learning, packages, updates, vision

__all__ = ["foreign", "generative", "language", "learning", "packages", "updates", "vision"]
