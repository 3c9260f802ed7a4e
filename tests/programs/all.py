"""Every program; to import this is to have them all."""

from programs import generative, language, learning, packages, updates, vision

__all__ = ["generative", "language", "learning", "packages", "updates", "vision"]
