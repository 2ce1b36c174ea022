"""A trained checkpoint in, a smaller one out: `convert`, and `plan` for what it would do."""

from .convert import convert, plan
from .options import CompressionOptions
from .report import CompressionReport, MatrixReport

__all__ = ["CompressionOptions", "CompressionReport", "MatrixReport", "convert", "plan"]
