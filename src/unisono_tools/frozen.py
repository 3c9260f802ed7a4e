"""Freezes what a process has imported: those that are forked from it neither search nor copy it.

Otherwise each of them takes 0.1 to 0.2 s to look for garbage, or for parameters of the program.
"""

from __future__ import annotations

import gc

gc.freeze()
