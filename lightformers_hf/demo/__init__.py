"""A small translation model trained, compressed and recovered before your eyes: `lightformers demo`."""
