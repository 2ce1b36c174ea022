"""Structural forms: what a part of a model can become to be smaller."""
