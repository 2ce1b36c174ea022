"""Whole ways from one model to another, each as one call: `recover` and `compress`."""
