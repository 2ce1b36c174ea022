"""What a metric is, by its definition: the matrix that errors are measured by, whole."""

from lightformers_hf.conversion.statistics.metric import Damped


def weigh(metric, matrix):
    """Lᵀ W R, float64."""
    rows = metric.left.T if isinstance(metric.rows, Damped) else metric.left.diag()
    return rows @ matrix.double() @ metric.right
