"""A trained checkpoint in, a smaller one out.

`convert` and `plan` are public names of `lightformers_hf`; this module has parts for other modules. Names are imported
when they are first used, so that `.options` is read without torch.
"""

from typing import TYPE_CHECKING

from ..registration import lazy_names

if TYPE_CHECKING:
    from ..stored import CheckpointReader
    from .forms.svd import decompose
    from .report import copy_report

__all__ = ["CheckpointReader", "copy_report", "decompose"]

__getattr__, __dir__ = lazy_names(
    __name__, {"CheckpointReader": "..stored", "copy_report": ".report", "decompose": ".forms.svd"}
)
