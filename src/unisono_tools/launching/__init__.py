"""Starts a script in several workers and looks after them."""
