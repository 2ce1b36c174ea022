"""`python -m lightformers_hf` is the `lightformers` command."""

from .cli import main

if __name__ == "__main__":
    main()
