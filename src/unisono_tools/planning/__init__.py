"""Predicts the communication time of a step on a cluster."""
