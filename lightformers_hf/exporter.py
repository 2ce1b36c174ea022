"""CTranslate2 in the registry of `transformers.exporters`: `AutoHfExporter` finds it by `export_format="ctranslate2"`.

Only versions of transformers with `register_backend` have this registry: see `registration`.
"""

from __future__ import annotations

import io
import tempfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel
from transformers.exporters import ExportConfigMixin, ExportMetadata, HfExporter, register_backend


@dataclass
class CTranslate2Config(ExportConfigMixin):
    """Options of an export to CTranslate2: `quantization` is one of `engines.ctranslate2.QUANTIZATIONS`."""

    export_format: str = "ctranslate2"
    quantization: str = "int8"
    quantizer: None = None  # transformers asks every configuration for it


class CTranslate2Exporter(HfExporter):
    """Export a whole sequence-to-sequence model to CTranslate2, whose library searches, too.

    The program is {name of a file: its bytes}, as `ctranslate2.Translator("model", files=program)` takes it. A token
    is the number of its id as text. `lightformers_hf.export` also writes the tokenizer, and compares outputs.

    Example:
        >>> exported = CTranslate2Exporter().export(model, {}, CTranslate2Config(quantization="int8"))
        >>> exported.save_pretrained("exported")
    """

    export_format = "ctranslate2"
    config_class = CTranslate2Config
    program_suffix = ".ctranslate2.zip"
    required_packages = ["ctranslate2"]  # noqa: RUF012, as in the base class

    def export_program(
        self, model: PreTrainedModel, sample_inputs: Mapping[str, Any], config: ExportConfigMixin
    ) -> tuple[dict[str, bytes], ExportMetadata]:
        """Return the program, and what is known about it. Nothing is traced: `sample_inputs` are not used."""
        from .engines.layers import read_source
        from .engines.write import check_engine

        quantization = getattr(config, "quantization", "int8")
        engine = check_engine("ctranslate2", quantization)
        with tempfile.TemporaryDirectory() as folder:
            checkpoint, written = Path(folder, "checkpoint"), Path(folder, "written")
            model.save_pretrained(checkpoint)  # a loaded model would need its tokenizer
            written.mkdir()
            engine.write(read_source(checkpoint, "ctranslate2"), written, quantization)
            program = {file.name: file.read_bytes() for file in sorted(written.iterdir())}
        return program, ExportMetadata(architecture=type(model).__name__, export_dtype="float32", export_device="cpu")

    @classmethod
    def save_program(cls, program: Mapping[str, bytes], path: str | Path) -> None:
        """Write a program as one archive."""
        with zipfile.ZipFile(path, "w") as archive:
            for name, content in program.items():
                archive.writestr(zipfile.ZipInfo(name), content)

    @classmethod
    def load_program(cls, path: str | Path) -> dict[str, bytes]:
        """Read a program that `save_program` wrote."""
        with zipfile.ZipFile(io.BytesIO(Path(path).read_bytes())) as archive:
            return {name: archive.read(name) for name in archive.namelist()}


def register() -> None:
    """Register the exporter, unless the format is known."""
    register_backend(CTranslate2Exporter)
