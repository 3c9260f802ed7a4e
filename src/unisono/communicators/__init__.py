"""Ways for workers to talk to each other."""
