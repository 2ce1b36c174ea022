"""Trained models for engines made to run them: `export` to CTranslate2 or ONNX, `load_engine` to run any of them."""

from .engines import Engine, load_engine
from .write import ExportReport, export

__all__ = ["Engine", "ExportReport", "export", "load_engine"]
