"""Which setting every part of a model gets: by rule (ratio, rank, energy), or together under one budget."""
