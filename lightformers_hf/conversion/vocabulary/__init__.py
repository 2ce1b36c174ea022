"""The vocabulary: which tokens stay, the tokenizer rebuilt from them, and a teacher with their rows alone."""
