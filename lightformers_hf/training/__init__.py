"""Reusable pieces of training: parallel data, token-budget batches, a trainer that distils."""
