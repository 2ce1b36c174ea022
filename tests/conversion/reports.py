"""Reports of conversions that never were."""

from lightformers_hf.conversion.report import CompressionReport, MatrixReport


def matrix(name="m", form="dense", size=None, setting="dense", after=16, **changed):
    """4×4."""
    facts = {"name": name, "kind": "ffn", "m": 4, "n": 4, "energy": 0.9, "relative_error": 0.1, **changed}
    return MatrixReport(form=form, size=size, setting=setting, parameters_after=after, **facts)


def report_of(*matrices, **changed):
    facts = {
        "source": "teacher", "family": "marian", "architecture": "lightformer", "auto_class": "AutoModelForSeq2SeqLM",
        "options": {"ratio": 2}, "calibration": None, "calibrated_on": [],
        "layers": {"encoder": [2, 2], "decoder": [2, 2]}, "groups": {"encoder": [2, 2], "decoder": [2, 2]},
        "parameters_before": 100, "parameters_after": 60, "bytes_before": 400, "bytes_after": 240, "inherited": {},
    }  # fmt: skip
    return CompressionReport(matrices=list(matrices), **facts | changed)
