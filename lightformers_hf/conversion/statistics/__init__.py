"""What sample text says about a model."""
