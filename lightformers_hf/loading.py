"""A model by its folder or its name on the Hub: where it lies, what it is, how large it is."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.constants import HF_HUB_CACHE
from huggingface_hub.errors import RepositoryNotFoundError, StrictDataclassError
from transformers import (
    AutoConfig,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING
from transformers.utils import cached_file
from transformers.utils.logging import disable_progress_bar, enable_progress_bar, is_progress_bar_enabled

from . import models
from .checkpoint import (
    CheckpointReader,
    check_config,
    check_finite,
    check_stored,
    check_tokenizer,
    check_vocabulary,
    find_architecture,
    no_tokenizer,
    read_index,
)
from .files import EXPORT_FILE, TOKENIZER_FILES, WEIGHT_FILES, explain_unwritable, read_json
from .folders import check_folder, find_folder
from .languages import set_languages
from .models.configuration_base import FactorizedConfig
from .models.embeddings import SinusoidalPositions

# What transformers raises, besides ValueError, of files with other content than it takes for granted.
DAMAGED = (
    *(AttributeError, TypeError, LookupError, AssertionError, ArithmeticError, RuntimeError, ImportError),
    StrictDataclassError,
)


def resolve_source(source: str | os.PathLike) -> Path:
    """The local folder of a checkpoint: `source` itself, or the snapshot of a Hub model of that name.

    Of a Hub model only configuration, tokenizer, card and weights are fetched, and `.bin` weights only where there
    are no safetensors. Without network, a snapshot fetched before is used.

    Raises:
        FileNotFoundError: no such folder, no such model, or the Hub is out of reach.
        ValueError: a file instead of a folder.
    """
    if path := find_folder(source):
        return path
    wanted = ["*.json", "model*.safetensors", "*.spm", "*.model", "*.txt", "README.md"]
    try:
        folder = Path(snapshot_download(str(source), allow_patterns=wanted))
        if not any(folder.glob("model*.safetensors")):
            folder = Path(snapshot_download(str(source), allow_patterns=[*wanted, "pytorch_model*.bin"]))
    except RepositoryNotFoundError as error:
        raise FileNotFoundError(
            f"{source} is neither a folder here nor a model on the Hub (or it is private: log in with `hf auth login`)"
        ) from error
    except OSError as error:
        if trouble := explain_unwritable(error, "Hub", HF_HUB_CACHE):
            raise trouble from error
        reason = str(error).partition("\n")[0]
        raise FileNotFoundError(
            f"{source} is no folder here, and the Hub could not be asked for it ({reason}). "
            "Without network, give the folder of a checkpoint."
        ) from error
    return folder


def check_device(name: str | torch.device) -> torch.device:
    """The device of that name.

    Raises:
        ValueError: there is none here, or it computes nothing (`meta`).
    """
    try:
        device = torch.device(name)
        if device.type == "meta":
            raise RuntimeError("it holds no values")
        torch.ones(1, device=device).sum().item()
    except (RuntimeError, AssertionError, ImportError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"device is {str(name)!r}, which can't be used here ({reason}): give cpu, or one there is"
        ) from None
    return device


class AutoClass(Protocol):
    """`AutoConfig`, `AutoTokenizer` or one of models."""

    def from_pretrained(self, name: str | os.PathLike, **options: Any) -> Any:
        """What a checkpoint holds of it."""


class AutoNetwork(AutoClass, Protocol):
    """`AutoModelForSeq2SeqLM` or the like."""

    def from_config(self, config: PreTrainedConfig, **options: Any) -> PreTrainedModel:
        """A model with random weights."""


def printable_name(name: str | os.PathLike) -> str:
    """What is written down of a model or a file: of a path its last part, without what steers terminals.

    A name on the Hub stays whole.
    """
    path = Path(os.path.expanduser(name))
    return "".join(c for c in (path.resolve().name if path.exists() else str(name)) if c.isprintable())


def load_pretrained(auto: AutoClass, name: str | os.PathLike, **options: Any) -> Any:
    """As `auto.from_pretrained(name, **options)` of an Auto class, but code beside a checkpoint is never run.

    Where `auto_map` names code, transformers asks on standard input whether to run it; here nobody is asked. The
    architectures of this package, whose checkpoints have their code with them, load from the installed package.

    Raises:
        ValueError: a model or tokenizer that only its own code can load, a folder without any tokenizer, a weight that
            is NaN or infinite; else as `from_pretrained`.
    """
    if auto is AutoTokenizer and Path(name).is_dir() and not has_tokenizer(Path(name)):
        raise no_tokenizer(name)  # transformers would make one of nothing
    try:
        with _no_strange_code(name):
            loaded = auto.from_pretrained(name, trust_remote_code=False, **options)
            if isinstance(loaded, PreTrainedConfig):
                check_config(loaded, name)
            if isinstance(loaded, PreTrainedTokenizerBase):
                check_tokenizer(loaded, name)
            model = loaded[0] if isinstance(loaded, tuple) else loaded
            if isinstance(model, PreTrainedModel):
                for tensor_name, tensor in model.state_dict().items():
                    check_finite(tensor, tensor_name, name)
                if model.can_generate():
                    take_forced_start(model.generation_config, name)
            return loaded
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and not Path(name).exists() and str(name) not in str(error):
            reason = str(error).partition("\n")[0]
            raise OSError(f"{name} is no folder here, and the Hub does not give it: {reason}") from error
        raise


def take_forced_start(generation: GenerationConfig, name: str | os.PathLike) -> None:
    """Let translations begin with `forced_bos_token_id` of config.json where generation_config.json does not name it.

    Transformers reads the second file alone, if there is one. Raises `ValueError` for a value that is no number.
    """
    if generation.forced_bos_token_id is not None:
        return
    first = PreTrainedConfig.get_config_dict(name)[0].get("forced_bos_token_id")
    said = cached_file(name, "generation_config.json", _raise_exceptions_for_missing_entries=False)
    if first is None or (said and "forced_bos_token_id" in read_json(Path(said))):
        return
    if type(first) is not int:
        raise ValueError(f"forced_bos_token_id in config.json of {name} is {first!r}: expected the number of a token")
    generation.forced_bos_token_id = first


def has_tokenizer(folder: Path) -> bool:
    """Whether a folder holds files of a tokenizer."""
    return any(any(folder.glob(pattern)) for pattern in TOKENIZER_FILES)


def build_network(auto: AutoNetwork, config: PreTrainedConfig, **options: Any) -> PreTrainedModel:
    """As `auto.from_config(config, **options)`: random weights; and as in `load_pretrained`, no code is run."""
    with _no_strange_code(config.name_or_path or config.model_type):
        return auto.from_config(config, trust_remote_code=False, **options)


@contextmanager
def _no_strange_code(name: str | os.PathLike) -> Iterator[None]:
    """Say of what needs code of its own, instead of how to have it run, that it is not run."""
    try:
        yield
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            if str(name) in str(error):
                raise
            raise ValueError(f"{name} cannot be loaded: {error}") from error
        raise ValueError(
            f"{name} can only be loaded by code of its own (auto_map in its configuration), which is never run here: "
            "give a checkpoint of an architecture that transformers or this package has"
        ) from None
    except DAMAGED as error:
        raise ValueError(
            f"{name} cannot be loaded, one of its files is damaged, or a field of a JSON file has a wrong type or "
            f"value: {type(error).__name__}: {error}"
        ) from error


def load_model(
    name: str | os.PathLike,
    *,
    device: str | torch.device = "cpu",
    source: str | None = None,
    target: str | None = None,
    columns: bool = True,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a sequence-to-sequence checkpoint and its tokenizer from a folder or from the Hub: see `load_network`.

    Args:
        source, target, columns: languages that a multilingual one translates between, as of `set_language_codes`.
    """
    folder = resolve_source(name)
    model, tokenizer = load_network(folder, device=device), load_pretrained(AutoTokenizer, folder)
    check_vocabulary(tokenizer, model.config, folder)
    set_languages(model, tokenizer, source, target, columns=columns)
    return model, tokenizer


def load_network(name: str | os.PathLike, *, device: str | torch.device = "cpu") -> PreTrainedModel:
    """Load a sequence-to-sequence checkpoint from a folder or from the Hub, in evaluation mode.

    It computes in float32, whatever it is stored in, so that speeds of different checkpoints compare.

    Raises:
        FileNotFoundError: no such folder, and no such model on the Hub.
        ValueError: the checkpoint is not a sequence-to-sequence model, or lacks weights that would come out random.
    """
    name, device = resolve_source(name), check_device(device)
    config = check_checkpoint(name, translates=True)
    model, loading = load_pretrained(
        AutoModelForSeq2SeqLM, name, config=config, dtype=torch.float32, output_loading_info=True
    )
    if loading["missing_keys"]:
        raise ValueError(
            f"{name} lacks the weights {', '.join(sorted(loading['missing_keys']))}: get the whole checkpoint."
        )
    return model.to(device).eval()


def check_checkpoint(folder: Path, *, translates: bool = False) -> PreTrainedConfig:
    """The configuration of a checkpoint folder that can be loaded as it is stored.

    Args:
        translates: whether it has to be a sequence-to-sequence model.

    Raises:
        ValueError: an export, an adapter, a wrapped model, quantized weights, sizes that do not belong together.
        FileNotFoundError: no configuration, or no weights.
    """
    check_no_export(folder)
    check_folder(folder)
    try:
        config = load_pretrained(AutoConfig, folder)
    except OSError as error:
        raise FileNotFoundError(f"{folder} is no folder of a checkpoint: {error}") from error
    if translates and type(config) not in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING:
        raise ValueError(
            f"{folder} is a {config.model_type!r} model: expected a sequence-to-sequence model such as Marian, BART "
            "or LightFormer."
        )
    with CheckpointReader(folder) as reader:
        check_stored(config, reader, folder)
    return config


def load_pair(
    name: str | os.PathLike,
    teacher: str | os.PathLike | None,
    *,
    device: str | torch.device = "cpu",
    source: str | None = None,
    target: str | None = None,
) -> dict[str, tuple[PreTrainedModel, PreTrainedTokenizerBase]]:
    """{`model` and, if there is one, `teacher`: network and tokenizer}, between the same languages: see `load_model`.

    Where the model knows one pair of languages alone, codes are its teacher's.
    """
    found = {"model": load_model(name, device=device)}
    light = found["model"][1]
    if teacher is None or hasattr(light, "src_lang"):
        set_languages(*found["model"], source, target)
    if teacher is not None:
        found["teacher"] = load_teacher(teacher, light, device=device, source=source, target=target)
    return found


def load_teacher(
    name: str | os.PathLike,
    light: PreTrainedTokenizerBase,
    *,
    device: str | torch.device = "cpu",
    source: str | None = None,
    target: str | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """As `load_model`; a multilingual teacher translates between the languages of `light`, its student's tokenizer."""
    own = [getattr(light, side, None) for side in ("src_lang", "tgt_lang")]
    if all(own):
        source, target = own
    return load_model(name, device=device, source=source, target=target)


def is_export(name: str | os.PathLike) -> bool:
    """Whether a folder was written by `lightformers export`."""
    return Path(name, EXPORT_FILE).is_file()


def check_no_export(name: str | os.PathLike) -> None:
    """Raise `ValueError` where `lightformers export` wrote the folder."""
    if is_export(name):
        raise ValueError(f"{name} was exported for another engine: give the checkpoint that it was exported from.")


def skeleton(model_class: type[PreTrainedModel], config: PreTrainedConfig) -> PreTrainedModel:
    """The model without storage: every name and shape, no byte of weights."""
    with torch.device("meta"):
        return model_class(config)


def assemble(
    model_class: type[PreTrainedModel], config: PreTrainedConfig, tensors: Mapping[str, torch.Tensor]
) -> PreTrainedModel:
    """The model made of these tensors themselves, in evaluation mode: nothing is copied, nothing random drawn.

    Raises:
        ValueError: see `load_tensors`.
    """
    model = skeleton(model_class, config)
    load_tensors(model, tensors, assign=True)
    for module in model.modules():
        if isinstance(module, SinusoidalPositions):
            module.to_empty(device="cpu").reset()
    return model.eval()


def load_skeleton(folder: Path) -> PreTrainedModel:
    """The model of this package that a folder holds, without storage.

    Raises:
        FileNotFoundError: no weights there.
        ValueError: another model, or files that are damaged.
    """
    config = check_checkpoint(folder)
    architecture = find_architecture(config, folder)
    if not isinstance(config, FactorizedConfig) or architecture not in models.__all__:
        raise ValueError(f"{folder} holds a {architecture}, no model of this package: convert it first")
    try:
        return skeleton(getattr(models, architecture), config)
    except DAMAGED as error:
        raise ValueError(f"{folder / 'config.json'} describes no model: {error}") from error


def stored_tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """What a checkpoint of `model` holds: its state dict less the names that only repeat another tensor."""
    ties = model.get_expanded_tied_weights_keys(all_submodels=True)
    return {name: tensor for name, tensor in model.state_dict().items() if name not in ties}


def load_tensors(model: PreTrainedModel, tensors: Mapping[str, torch.Tensor], *, assign: bool = False) -> None:
    """Give `model` the tensors of a whole checkpoint, as `stored_tensors` names them, and tie what is tied.

    Args:
        model: with storage, or a `skeleton` where the tensors are assigned.
        tensors: all that is stored. Names that only repeat another tensor may be there or not.
        assign: put the tensors themselves in place, in their own type, instead of copying their values.

    Raises:
        ValueError: a tensor is missing, has no place in the model, or has another shape; nothing is loaded then.
    """
    expected, stored = model.state_dict(), stored_tensors(model)
    shapes = {name: tuple(tensor.shape) for name, tensor in expected.items()}
    wrong = {
        "is not there": [name for name in stored if name not in tensors],
        "has no place in it": [name for name in tensors if name not in expected],
        "has another shape": [
            f"{name} {tuple(tensor.shape)} instead of {shapes[name]}"
            for name, tensor in tensors.items()
            if shapes.get(name, tuple(tensor.shape)) != tuple(tensor.shape)
        ],
    }
    if found := [f"{', '.join(names)} {what}" for what, names in wrong.items() if names]:
        raise ValueError(f"the tensors do not fit a {type(model).__name__} of this configuration: {'; '.join(found)}")
    model.load_state_dict(tensors, strict=False, assign=assign)
    model.tie_weights()


def unique_parameters(model: PreTrainedModel) -> int:
    """The number of scalars that were learned: a shared or tied tensor counts once, buffers do not count."""
    return sum(parameter.numel() for _, parameter in learned_parameters(model))


def learned_parameters(model: PreTrainedModel) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Name and tensor of every parameter that was learned, a shared or tied one once.

    Tables that the class computes instead of storing them (Marian's sinusoidal positions are `nn.Parameter`s) are not
    among them, so that two ways of holding the same positions give the same number. Nor are copies of token tables:
    without ties, transformers has one of each stack, and a shared one that no stack reads.
    """
    named = dict(model.named_parameters())
    left_out = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    endings = ("shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
    shared, *own = (next((name for name in named if name.endswith(ending)), None) for ending in endings)
    if all(own):
        first, second = (named[name] for name in own)
        left_out |= {shared} | ({own[1]} if not first.is_meta and torch.equal(first, second) else set())
    yield from ((name, parameter) for name, parameter in named.items() if name not in left_out)


def weight_bytes(name: str | os.PathLike) -> int:
    """Bytes of the weight files that `from_pretrained` reads for a local folder or a model of the Hub.

    Of several formats side by side only the one that is loaded counts, of shards those that the index names.
    """
    files = _fetch_weights(name)
    return sum(file.stat().st_size for file in files if not file.name.endswith(".index.json"))


def _fetch_weights(name: str | os.PathLike) -> list[Path]:
    """The files of weights that `from_pretrained` reads, index first, here or fetched from the Hub, in one folder."""
    name = os.fspath(name)
    for candidate in WEIGHT_FILES:
        found = cached_file(name, candidate, _raise_exceptions_for_missing_entries=False)
        if found is None:
            continue
        files = [Path(found)]
        if candidate.endswith(".index.json"):
            files += [Path(cached_file(name, shard)) for shard in sorted(read_index(files[0]))]
        return files
    raise FileNotFoundError(f"{name} has no weight file: expected {' or '.join(WEIGHT_FILES[:2])}.")


def tensor_bytes(model: PreTrainedModel) -> int:
    """Bytes of the tensors that a checkpoint of `model` holds, in the type its configuration names (else fp32)."""
    itemsize = (model.config.dtype or torch.float32).itemsize
    return itemsize * sum(tensor.numel() for tensor in stored_tensors(model).values())


def position_limit(config: PreTrainedConfig) -> int | None:
    """The number of tokens that a model has positions for; `None` where its configuration names no limit (T5)."""
    return getattr(config, "max_position_embeddings", None)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out; torch has no class of its own for it on the CPU."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)


@contextmanager
def hide_bars() -> Iterator[None]:
    """Inside, transformers shows no bar when it loads or saves a model."""
    shown = is_progress_bar_enabled()
    disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            enable_progress_bar()
