"""Measuring a checkpoint: quality, speed, size."""
