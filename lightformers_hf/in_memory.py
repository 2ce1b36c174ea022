"""Loaded models: saved to a temporary folder, so that all functions read them like checkpoints."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias, TypeGuard

from transformers import FeatureExtractionMixin, PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

from .files import REPORT_FILE, write_json
from .loading import hide_bars, save_all
from .processors import usual_settings
from .speech import reads_sound, save_extractor

# A folder, a name on the Hub, or a loaded model.
AnyModel: TypeAlias = str | os.PathLike | PreTrainedModel
# What a loaded model reads with: the processor is that of a model for speech.
AnyTokenizer: TypeAlias = PreTrainedTokenizerBase | ProcessorMixin


@contextmanager
def on_disk(tokenizer: AnyTokenizer | None, *models: AnyModel) -> Iterator[list[str]]:
    """Give folders or Hub names of models; those that are loaded are in a temporary folder while the block runs.

    `tokenizer` is that of the loaded models. Raises `ValueError` if one of the two is missing, and for other objects.
    Inside, transformers shows no bar, and PyTorch has its usual settings.
    """
    check_tokenizer_of(tokenizer, *models)
    tokenizer, extractor = split_processor(tokenizer)
    paths = []
    with usual_settings(), hide_bars(), tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        for number, model in enumerate(models):
            if tokenizer is None or not is_loaded(model):
                paths.append(os.path.expanduser(model))
                continue
            if extractor is None and reads_sound(model.config):
                raise lacks_processor()
            path = Path(folder, str(number), model_name(model).rpartition("/")[2])
            save_all(model, path)
            tokenizer.save_pretrained(path)
            if extractor is not None:
                save_extractor(extractor, tokenizer, path)
            if report := getattr(model, "compression_report", None):
                write_json(report.to_dict(), path / REPORT_FILE)
            paths.append(str(path))
        yield paths


def check_tokenizer_of(tokenizer: AnyTokenizer | None, *models: AnyModel | None, optional: bool = False) -> None:
    """Raise `ValueError` if models are loaded and their tokenizer is not, or the other way round.

    `optional`: loaded models may lack a tokenizer.
    """
    loaded = any(model is not None and is_loaded(model) for model in models)
    if tokenizer is not None and not loaded:
        raise ValueError("tokenizer is given, but no loaded model: remove tokenizer, a checkpoint has its own")
    found, _ = split_processor(tokenizer)
    if loaded and not (isinstance(found, PreTrainedTokenizerBase) or (optional and tokenizer is None)):
        raise lacks_tokenizer(tokenizer)


def split_processor(
    given: AnyTokenizer | None,
) -> tuple[PreTrainedTokenizerBase | None, FeatureExtractionMixin | None]:
    """Return a tokenizer, and the feature extractor beside it in a processor."""
    if isinstance(given, ProcessorMixin):
        return getattr(given, "tokenizer", None), getattr(given, "feature_extractor", None)
    return given, None


def lacks_tokenizer(given: object = None) -> ValueError:
    """The error where a loaded model comes without its loaded tokenizer."""
    found = "missing" if given is None else f"a {type(given).__name__}"
    return ValueError(f"model is loaded, but tokenizer is {found}: give tokenizer, the model's loaded one, too")


def lacks_processor() -> ValueError:
    """The error where a loaded model for speech comes without its feature extractor."""
    return ValueError(
        "the loaded model is for speech, and lacks its feature extractor: give tokenizer, its processor "
        "(AutoProcessor.from_pretrained)"
    )


def is_loaded(model: AnyModel) -> TypeGuard[PreTrainedModel]:
    """Whether a model is loaded, not a folder or a name on the Hub.

    Raises `ValueError` for other objects, and for a model that has an adapter, or weights on a disk.
    """
    if not isinstance(model, str | os.PathLike | PreTrainedModel):
        raise ValueError(
            f"model is a {type(model).__name__}: expected a folder, a name on the Hub or a PreTrainedModel. "
            "Merge an adapter with merge_and_unload()"
        )
    if not isinstance(model, PreTrainedModel):
        return False
    if hasattr(model, "peft_config"):
        raise ValueError(
            "the loaded model has an adapter beside its weights: merge it, "
            "PeftModel.from_pretrained(base, adapter).merge_and_unload(), and give the result"
        )
    if any(tensor.is_meta for tensor in model.parameters()):
        raise ValueError("the loaded model has weights that are not in memory (device_map): give its folder")
    return True


def given_folders(*models: AnyModel) -> list[str]:
    """Folders and Hub names of those models that are not loaded."""
    return [os.path.expanduser(model) for model in models if not isinstance(model, PreTrainedModel)]


def model_name(model: AnyModel) -> str:
    """Return the folder or Hub name of a model; of a loaded model, the name in its configuration, without the path."""
    if not is_loaded(model):
        return os.fspath(model)
    name = str(getattr(model.config, "name_or_path", ""))
    name = Path(name).name if Path(name).exists() or name.count("/") > 1 else name
    return name or model.config.model_type


def identify(model: AnyModel) -> str:
    """Return a text that is the same for the same model; of a loaded one, its name and a digest of its weights."""
    if not is_loaded(model):
        return os.fspath(model)
    sums = {name: tensor.double().sum().item() for name, tensor in model.state_dict().items()}
    return f"{model_name(model)} (loaded, {hashlib.sha256(repr(sums).encode()).hexdigest()[:8]})"
