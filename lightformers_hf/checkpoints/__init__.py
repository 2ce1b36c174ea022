"""Trained models as sources: families, reading and checking."""
