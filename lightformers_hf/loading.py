"""Read checkpoints: open, check the configuration, check the tokenizer, read tensors, match them with a model."""

from __future__ import annotations

import copy
import math
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.constants import HF_HUB_CACHE
from huggingface_hub.errors import RepositoryNotFoundError, StrictDataclassError
from torch import Tensor
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
from .files import EXPORT_FILE, TOKENIZER_FILES, check_folder, explain_unwritable, find_folder, read_json
from .languages import set_languages
from .matrices import NOWHERE, STACKS
from .models.configuration_lightformer import FactorizedConfig
from .models.layers import SinusoidalPositions
from .processors import check_device, usual_settings
from .stored import CheckpointReader, find_weights, is_out_of_memory, raise_unless_damaged, read_index

# Errors of transformers, besides ValueError, for files with unexpected content.
DAMAGED = (
    *(AttributeError, TypeError, LookupError, AssertionError, ArithmeticError, RuntimeError, ImportError),
    StrictDataclassError,
)
# Prefixes of tensor names in checkpoints of wrapped models: the wrapper, and the path of the model in it.
WRAPPERS = {
    "_orig_mod.": ("torch.compile", "model._orig_mod"),
    "module.": ("DataParallel", "model.module"),
    "base_model.model.": ("peft", "model.merge_and_unload()"),
}
QUANTIZED = (".SCB", ".absmax", ".quant_map", ".qweight", ".weight_format")  # suffixes of quantized weights
LOADING = threading.RLock()  # transformers changes functions of PyTorch while it loads, for all threads
POSITIONS, DEPTHS = 1 << 15, 1 << 8  # believed where no tensor is as long, or where layers are shared


# --- Open a folder or a model of the Hub


def resolve_source(source: str | os.PathLike) -> Path:
    """The local folder of a checkpoint: `source` itself, or the snapshot of a Hub model of that name.

    Only configuration, tokenizer, card and weights of a Hub model are fetched, and `.bin` weights only where there are
    no safetensors. Without network, a snapshot fetched before is used.

    Raises:
        FileNotFoundError: no such folder, no such model, or the Hub is out of reach.
        ValueError: a file instead of a folder.
    """
    if path := find_folder(source):
        return path
    wanted = ["*.json", "model*.safetensors", "*.spm", "*.model", "*.txt", "README.md"]
    try:
        folder = Path(snapshot_download(str(source), allow_patterns=wanted))
        if any(folder.glob("model*.safetensors")):
            return folder
        return Path(snapshot_download(str(source), allow_patterns=[*wanted, "pytorch_model*.bin"]))
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


def printable_name(name: str | os.PathLike) -> str:
    """Printable name of a model or a file: the last part of a path, without control characters.

    A name on the Hub stays whole.
    """
    path = Path(os.path.expanduser(name))
    return "".join(c for c in (path.resolve().name if path.exists() else str(name)) if c.isprintable())


def is_export(name: str | os.PathLike) -> bool:
    """Whether a folder was written by `lightformers export`."""
    return Path(os.path.expanduser(name), EXPORT_FILE).is_file()


def check_no_export(name: str | os.PathLike) -> None:
    """Raise `ValueError` where `lightformers export` wrote the folder."""
    if is_export(name):
        raise ValueError(
            f"{name} was exported for an engine, not for transformers: give the checkpoint that it was exported from."
        )


# --- Check the configuration


def check_checkpoint(folder: Path, *, translates: bool = False) -> PreTrainedConfig:
    """The configuration of a checkpoint folder that can be loaded as it is stored; else an error with the reason."""
    check_no_export(folder)
    check_folder(folder)
    try:
        config = load_pretrained(AutoConfig, folder)
    except OSError as error:
        raise FileNotFoundError(f"{folder} is no folder of a checkpoint: {error}") from error
    if translates and type(config) not in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING:
        remedy = ". pipeline('automatic-speech-recognition') transcribes with it" * hasattr(config, "num_mel_bins")
        raise ValueError(
            f"{folder} is a {config.model_type!r} model: expected a sequence-to-sequence model such as Marian, BART "
            f"or LightFormer{remedy}."
        )
    check_stored(config, CheckpointReader(folder).shapes(), folder)
    return config


def check_config(config: PreTrainedConfig, name: str | os.PathLike) -> None:
    """Raise `ValueError` for a type that is none of floats, a dropout that is no probability, wrong names of code."""
    dtype, code = config.dtype, getattr(config, "auto_map", None)
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ValueError(f"dtype in config.json of {name} is {dtype!r}: expected float32 or the like")
    if not isinstance(code, dict | None) or not all(isinstance(value, str | list) for value in (code or {}).values()):
        raise ValueError(f"auto_map in config.json of {name} is {code!r}: expected classes and their names")
    for field, share in vars(config).items():
        if "dropout" in field and isinstance(share, int | float) and not 0 <= share <= 1:
            raise ValueError(f"{field} in config.json of {name} is {share}: expected a probability, 0 to 1")
    find_architecture(config, name)


def find_architecture(config: PreTrainedConfig, name: str | os.PathLike) -> str | None:
    """The name of the class of a checkpoint, if its configuration contains it."""
    names = config.architectures
    if names is None:
        return None
    if not isinstance(names, list) or not names or not all(isinstance(value, str) for value in names):
        raise ValueError(f"architectures in config.json of {name} is {names!r}: expected a list of names")
    return names[0]


def check_stored(config: PreTrainedConfig, shapes: Mapping[str, tuple[int, ...]], name: str | os.PathLike) -> None:
    """Raise `ValueError` for weights of a wrapped model, for quantized ones without a `quantization_config`, and where
    the configuration has a size that no tensor has.

    A model is built before its tensors are put in place: depths and tables that nothing was stored for would take
    hours, or more memory than there is.
    """
    names = list(shapes)
    if not is_quantized(config) and any(key.endswith(QUANTIZED) for key in names):
        raise ValueError(
            f"{name} holds weights that were quantized, and its config.json does not say how (quantization_config): "
            "give the checkpoint before it was quantized"
        )
    for prefix, (wrapper, inner) in WRAPPERS.items():
        if 2 * sum(key.startswith(prefix) for key in names) > len(names):
            raise ValueError(
                f"the names of the tensors of {name} begin with {prefix!r}, because a model wrapped by {wrapper} was "
                f"saved. Save the model inside, with {inner}.save_pretrained(folder), and give that folder"
            )
    longest = max((max(shape, default=1) for shape in shapes.values()), default=1)
    largest = max((math.prod(shape) for shape in shapes.values()), default=1)
    for field, value in vars(config).items():
        stack = field.partition("_")[0]
        if stack in STACKS and not any(stack in stored for stored in shapes):
            continue  # the other stack in the configuration of a single stack is not built
        if field.endswith("layers"):
            most, what = max(DEPTHS, len(shapes)), f"{len(shapes)} tensors are stored"
        elif field.endswith("positions") or field == "max_position_embeddings":
            most, what = max(POSITIONS, longest), f"no stored tensor is longer than {longest}"
        elif field in ("d_model", "hidden_size"):
            most, what = longest, f"no stored tensor is longer than {longest}"
        elif field.endswith(("_dim", "_size", "_heads", "_rank", "_groups", "_buckets", "d_ff", "d_kv")):
            most, what = max(largest, DEPTHS), f"no stored tensor has more than {largest} numbers"
        else:
            continue
        if isinstance(value, int) and value > most:
            raise ValueError(f"config.json of {name} has {field!r} {value:,}, but {what}: they do not belong together")


# --- Check the tokenizer


def has_tokenizer(folder: Path) -> bool:
    """Whether a folder holds files of a tokenizer."""
    return any(any(folder.glob(pattern)) for pattern in TOKENIZER_FILES)


def no_tokenizer(name: str | os.PathLike) -> ValueError:
    """The error where a checkpoint comes without a tokenizer."""
    return ValueError(
        f"{name} holds no tokenizer, or one without words (tokenizer_config.json and the files that it needs): give a "
        "folder with one, or put its files there"
    )


def no_extractor(name: str | os.PathLike) -> ValueError:
    """The error where a model for speech comes without a feature extractor."""
    return ValueError(
        f"{name} holds no feature extractor (preprocessor_config.json), which makes spectrograms of sound: put the "
        "file of the model that it was trained from there"
    )


def check_tokenizer(tokenizer: PreTrainedTokenizerBase, name: str | os.PathLike) -> None:
    """Raise `ValueError` for a tokenizer without words, numbers that are not whole, and languages that are no text."""
    if not tokenizer.get_vocab().keys() - {*tokenizer.all_special_tokens, *tokenizer.get_added_vocab(), "▁", "Ġ"}:
        raise no_tokenizer(name)
    for side in ("source_lang", "target_lang"):
        if not isinstance(language := getattr(tokenizer, side, None), str | None):
            raise ValueError(f"tokenizer_config.json of {name} names {language!r} as a language: expected a word")
    if not all(type(number) is int for number in tokenizer.get_vocab().values()):
        raise ValueError(f"the tokenizer of {name} gives tokens other numbers than whole ones: fetch it again")
    longest: Any = tokenizer.model_max_length
    if type(longest) not in (int, float) or not longest >= 1 or longest != longest // 1:
        raise ValueError(
            f"model_max_length in tokenizer_config.json of {name} is {longest!r}: expected a whole number of tokens"
        )
    tokenizer.model_max_length = int(longest)


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig, name: str | os.PathLike) -> None:
    """Raise `ValueError` where a token has no row in the embedding matrix that it is looked up in."""
    tables = {"vocab_size": tokenizer.get_vocab()}
    if getattr(config, "decoder_vocab_size", None) not in (None, config.vocab_size):
        tables["decoder_vocab_size"] = getattr(tokenizer, "target_encoder", tables["vocab_size"])
    for field, tokens in tables.items():
        last = max(tokens, key=tokens.get, default=None)
        if last is not None and tokens[last] >= (size := getattr(config, field)):
            raise ValueError(
                f"the tokenizer of {name} gives {last!r} the number {tokens[last]}, but {field} is {size}: give the "
                "checkpoint its own tokenizer, or a row for every token (resize_token_embeddings)"
            )


# --- Look at tensors


def main_dtype(tensors: Iterable[Tensor]) -> torch.dtype:
    """The type that most numbers are stored in."""
    sizes: Counter[torch.dtype] = Counter()
    for tensor in tensors:
        sizes[tensor.dtype] += tensor.numel()
    return sizes.most_common(1)[0][0]


def all_finite(tensor: Tensor) -> bool:
    """Whether nothing in a tensor is NaN or infinite: in one pass, with no other tensor as large, such as a mask."""
    return not tensor.numel() or all(bool(end.isfinite()) for end in torch.aminmax(tensor))


def check_finite(tensor: Tensor, tensor_name: str, name: str | os.PathLike) -> None:
    """Raise `ValueError` where a tensor of a checkpoint holds NaN or infinity."""
    if not all_finite(tensor):
        raise ValueError(
            f"{tensor_name} of {name} holds NaN or infinite values: the checkpoint is damaged, or its training "
            "diverged; take an earlier one"
        )


# --- Match tensors with a model


def skeleton(model_class: type[PreTrainedModel], config: PreTrainedConfig) -> PreTrainedModel:
    """The model without storage: every name and shape, no byte of weights."""
    with NOWHERE:
        return model_class(config)


def load_skeleton(folder: Path) -> PreTrainedModel:
    """The model of this package that a folder holds, without storage."""
    config = check_checkpoint(folder)
    architecture = find_architecture(config, folder)
    if not isinstance(config, FactorizedConfig) or architecture not in models.__all__:
        raise ValueError(f"{folder} holds a {architecture}, no model of this package: convert it first")
    try:
        return skeleton(getattr(models, architecture), config)
    except DAMAGED as error:
        raise_unless_damaged(error, folder)
        raise ValueError(f"{folder / 'config.json'} describes no model: {error}") from error


def assemble(
    model_class: type[PreTrainedModel], config: PreTrainedConfig, tensors: Mapping[str, torch.Tensor]
) -> PreTrainedModel:
    """The model made of these tensors themselves, in evaluation mode: nothing is copied, nothing random drawn."""
    model = skeleton(model_class, config)
    load_tensors(model, tensors, assign=True)
    return complete(model, {})


def complete(model: PreTrainedModel, tensors: Mapping[str, torch.Tensor]) -> PreTrainedModel:
    """Give a `skeleton` the tensors that it lacks, and those that are tied or computed.

    Raises `ValueError` if one is still without values.
    """
    model.load_state_dict(tensors, strict=False, assign=True)
    model.tie_weights()
    if gaps := [name for name, tensor in stored_tensors(model).items() if tensor.device == NOWHERE]:
        raise ValueError(f"{type(model).__name__} lacks values of {', '.join(gaps)}, which is a mistake: report it")
    for module in model.modules():
        if isinstance(module, SinusoidalPositions):
            module.to_empty(device="cpu").reset()
    return model.eval()


def stored_tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return the tensors of a checkpoint of `model`: its state dict without names that repeat another tensor."""
    ties = model.get_expanded_tied_weights_keys(all_submodels=True)
    return {name: tensor for name, tensor in model.state_dict().items() if name not in ties}


def load_tensors(model: PreTrainedModel, tensors: Mapping[str, torch.Tensor], *, assign: bool = False) -> None:
    """Give `model` the tensors of a whole checkpoint, as `stored_tensors` names them, and tie what is tied.

    `assign` puts the tensors themselves in place, as a `skeleton` needs. Raises `ValueError`, and loads nothing, where
    a tensor is missing, has no place in the model, or has another shape.
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


# --- Load models and tokenizers


def load_pretrained(auto: Any, name: str | os.PathLike, **options: Any) -> Any:
    """Return `auto.from_pretrained(name, **options)` of an Auto class, without running code beside the checkpoint.

    The architectures of this package, whose checkpoints have their code with them, load from the installed package.
    Quantized weights are dequantized.

    Raises:
        ValueError: a model or tokenizer that only its own code can load, a folder without any tokenizer, a weight that
            is NaN or infinite, quantized weights that transformers can't dequantize; else as `from_pretrained`.
    """
    name = os.path.expanduser(name)
    if auto is AutoTokenizer and Path(name).is_dir() and not has_tokenizer(Path(name)):
        raise no_tokenizer(name)  # transformers would make one of nothing
    try:
        with _no_strange_code(name), hide_bars(), LOADING, usual_settings():
            if issubclass(auto, PreTrainedModel) or hasattr(auto, "from_config"):
                config = options.get("config") or AutoConfig.from_pretrained(name, trust_remote_code=False)
                if is_quantized(config):  # some methods dequantize when they load, and only if this is set
                    options["config"] = config = copy.deepcopy(config)
                    config.quantization_config = dict(config.quantization_config, dequantize=True)
            loaded = auto.from_pretrained(name, trust_remote_code=False, **options)
            if isinstance(loaded, PreTrainedConfig):
                check_config(loaded, name)
            if isinstance(loaded, PreTrainedTokenizerBase):
                check_tokenizer(loaded, name)
                loaded.padding_side = "right"  # of the positions of an encoder, as in its training
            model = loaded[0] if isinstance(loaded, tuple) else loaded
            if isinstance(model, PreTrainedModel):
                dequantize(model, name)
                for tensor_name, tensor in model.state_dict().items():
                    check_finite(tensor, tensor_name, name)
                if model.can_generate():
                    take_forced_start(model.generation_config, name)
            return loaded
    except OSError as error:
        if Path(name).exists() or str(name) in str(error):
            raise
        reason = str(error).partition("\n")[0]
        raise OSError(f"{name} is no folder here, and the Hub does not give it: {reason}") from error


def is_quantized(model: PreTrainedModel | PreTrainedConfig) -> bool:
    """Whether the weights of a loaded model, or those that a configuration describes, are quantized."""
    config = model.config if isinstance(model, PreTrainedModel) else model
    return bool(getattr(config, "quantization_config", None))


def dequantize(model: PreTrainedModel, name: str | os.PathLike) -> None:
    """Replace quantized layers of a loaded model by layers in float32. Raises `ValueError` if transformers can't."""
    if not is_quantized(model):
        return
    try:
        model.dequantize(dtype=torch.float32).float()  # its other layers, too
    except (NotImplementedError, ValueError):  # the second: a method that transformers does not have
        method = model.config.to_dict()["quantization_config"].get("quant_method")
        method = getattr(method, "value", method)
        raise ValueError(
            f"{name} holds weights that were quantized by {method}, which transformers can't dequantize: give the "
            "checkpoint before it was quantized"
        ) from None


def build_network(auto: Any, config: PreTrainedConfig, **options: Any) -> PreTrainedModel:
    """As `auto.from_config(config, **options)`: random weights; and as in `load_pretrained`, no code is run."""
    with _no_strange_code(config.name_or_path or config.model_type):
        return auto.from_config(config, trust_remote_code=False, **options)


@contextmanager
def _no_strange_code(name: str | os.PathLike) -> Iterator[None]:
    """Replace transformers' advice to run a checkpoint's code by the message that it is not run."""
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
        raise_unless_damaged(error, name)
        raise ValueError(
            f"{name} cannot be loaded, one of its files is damaged, or a field of a JSON file has a wrong type or "
            f"value: {type(error).__name__}: {error}"
        ) from error


def take_forced_start(generation: GenerationConfig, name: str | os.PathLike) -> None:
    """Let translations begin with `forced_bos_token_id` of config.json where generation_config.json does not name it.

    Transformers reads the second file alone, if there is one.
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


def generate_tokens(model: PreTrainedModel, **arguments: Any) -> torch.Tensor:
    """`model.generate(**arguments)`. Raises `ValueError` where a damaged configuration makes it fail."""
    try:
        return model.generate(**arguments)
    except DAMAGED as error:
        if is_out_of_memory(error):
            raise
        raise ValueError(
            "the model cannot generate, its config.json or generation_config.json has a field of a wrong type or "
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
    return load_whole(AutoModelForSeq2SeqLM, name, config=config).to(device).eval()


def load_whole(auto: Any, name: str | os.PathLike, **options: Any) -> PreTrainedModel:
    """As `load_pretrained`, in float32; raises `ValueError` where weights are missing, which would come out random."""
    model, info = load_pretrained(auto, name, dtype=torch.float32, output_loading_info=True, **options)
    if missing := sorted(info["missing_keys"]):
        raise ValueError(
            f"{name} lacks {len(missing)} of the model's weights, such as {missing[0]}: get the whole checkpoint."
        )
    return model


def load_pair(
    name: str | os.PathLike,
    teacher: str | os.PathLike | None,
    *,
    device: str | torch.device = "cpu",
    source: str | None = None,
    target: str | None = None,
) -> dict[str, tuple[PreTrainedModel, PreTrainedTokenizerBase]]:
    """{`model` and, if there is one, `teacher`: network and tokenizer}, between the same languages: see `load_model`.

    If the model supports one pair of languages, the codes are those of its teacher.
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


def save_all(model: PreTrainedModel, folder: Path) -> None:
    """Save a loaded model with all of its tensors: transformers leaves out positions of Marian, even trained ones."""
    whole = copy.copy(model)  # a module's copy has the same tensors
    whole._keys_to_ignore_on_save = None
    whole.save_pretrained(folder)


# --- Count parameters and bytes


def unique_parameters(model: PreTrainedModel) -> int:
    """The number of scalars that were learned: a shared or tied tensor counts once, buffers do not count."""
    return sum(parameter.numel() for _, parameter in learned_parameters(model))


def learned_parameters(model: PreTrainedModel) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Name and tensor of every parameter that was learned, a shared or tied one once.

    Tables that the class computes instead of storing them (Marian's sinusoidal positions are `nn.Parameter`s) do not
    count. Nor do copies of token tables: without ties, transformers has one of each stack, and a shared one.
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

    Only the format that is loaded counts, and only the shards that the index names.
    """
    found = find_weights(resolve_source(name))
    files = [found.parent / shard for shard in read_index(found)] if found.suffix == ".json" else [found]
    return sum(file.stat().st_size for file in files)


def tensor_bytes(model: PreTrainedModel) -> int:
    """Bytes of the tensors that a checkpoint of `model` holds, in the type its configuration names (else fp32)."""
    itemsize = (model.config.dtype or torch.float32).itemsize
    return itemsize * sum(tensor.numel() for tensor in stored_tensors(model).values())


def position_limit(config: PreTrainedConfig) -> int | None:
    """The number of tokens that a model has positions for; `None` where its configuration names no limit (T5)."""
    return getattr(config, "max_position_embeddings", None)


@contextmanager
def hide_bars() -> Iterator[None]:
    """Inside, transformers shows no bar when it loads or saves a model, and datasets none when it maps rows."""
    switches: list[tuple[bool, Callable[[], None]]] = [(is_progress_bar_enabled(), enable_progress_bar)]
    disable_progress_bar()
    if library := sys.modules.get("datasets"):
        switches.append((not library.utils.are_progress_bars_disabled(), library.enable_progress_bars))
        library.disable_progress_bars()
    try:
        yield
    finally:
        for shown, enable in switches:
            if shown:
                enable()
