"""How a batch becomes one part per replica."""
