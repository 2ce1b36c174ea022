"""Whole ways from one model to another, each as one call: `plan`, `convert`, `recover` and `compress`."""
