"""Configuration of LightFormer (Lu et al. 2023), below the fields and checks that all architectures have in common."""

import copy
import difflib
import json
import re
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any, ClassVar

import transformers

OLDEST_TRANSFORMERS = "5.18"  # as in pyproject.toml
# This check precedes every import that an older version lacks, because that import's error would not give the reason.
if tuple(map(int, transformers.__version__.split(".")[:2])) < tuple(map(int, OLDEST_TRANSFORMERS.split("."))):
    raise ImportError(
        f"this model needs transformers {OLDEST_TRANSFORMERS} or newer, and {transformers.__version__} is installed: "
        f"run pip install --upgrade 'transformers>={OLDEST_TRANSFORMERS}'"
    )

from huggingface_hub.dataclasses import strict  # noqa: E402
from transformers import PreTrainedConfig  # noqa: E402
from transformers.activations import ACT2FN  # noqa: E402
from transformers.utils import TRANSFORMERS_DYNAMIC_MODULE_NAME  # noqa: E402
from transformers.utils.logging import get_logger  # noqa: E402

if TYPE_CHECKING:  # transformers copies the file of every relative import: the pipelines travel with a checkpoint
    from .pipelines import PIPELINES  # noqa: F401

logger = get_logger(__name__)

RANK_FIELDS = ("attention_rank", "ffn_rank", "embedding_rank", "decoder_attention_rank", "decoder_ffn_rank")
RELATIVE_POSITIONS = ("relative", "relative_per_layer")
POSITION_EMBEDDING_TYPES = ("sinusoidal", "sinusoidal_half", "learned", *RELATIVE_POSITIONS)
NORMALIZATIONS = ("layer_norm", "rms_norm")
# Task → class in `pipelines.py`, for `pipeline(task, model=..., trust_remote_code=True)` without this package.
PIPELINE_CLASSES = {
    "translation": "TranslationPipeline",
    "summarization": "SummarizationPipeline",
    "text2text-generation": "Text2TextGenerationPipeline",
}


def check_one_of(field: str, value: str, allowed: Collection[str]) -> None:
    """Raise `ValueError` naming `field` unless `value` is one of `allowed`."""
    if value not in allowed:
        raise ValueError(f"{field} is {value!r}; it is one of {', '.join(sorted(allowed))}")


def check_at_least(field: str, value: float | None, least: float) -> None:
    """Raise `ValueError` naming `field` unless `value` is `None` or at least `least`."""
    if value is not None and value < least:
        raise ValueError(f"{field} is {value}; it is at least {least}")


def check_heads(field: str, heads: int, width_field: str, width: int) -> None:
    """Raise `ValueError` naming both fields unless `heads` heads divide `width`."""
    if heads < 1 or width % heads:
        divisors = ", ".join(str(n) for n in range(1, min(width, 32) + 1) if width % n == 0)
        raise ValueError(f"{field} is {heads}, which does not divide {width_field} {width}; these do: {divisors}")


def check_groups(field: str, groups: int | None, layers: int) -> None:
    """Raise `ValueError` naming `field` unless `groups` divides `layers`."""
    if groups is not None and (groups < 1 or layers % groups):
        divisors = [n for n in range(1, layers + 1) if layers % n == 0]
        raise ValueError(f"{field} is {groups}, but {layers} layers form equal groups only for {divisors}")


@strict
class FactorizedConfig(PreTrainedConfig):
    r"""Fields of every architecture. Each matrix may be low-rank: the rank fields give its rank, and `None` is dense.

    Args:
        vocab_size: V, number of tokens of the encoder's embedding, and of the decoder's if both share one.
        decoder_vocab_size: number of tokens of a separate decoder embedding; `None` means V.
        d_model: d, width of the model.
        encoder_layers, decoder_layers: depths. Causal language models use the `decoder_*` fields.
        encoder_attention_heads, decoder_attention_heads: H, heads of every attention.
        attention_rank, ffn_rank, embedding_rank: r of every matrix of that kind; `None` means dense.
        decoder_attention_rank, decoder_ffn_rank: r in the decoder; `None` means as in the encoder.
        rank_pattern: module name pattern → r, or `None` for dense; the first that matches decides, before the fields
            above. A pattern is a regular expression for the end of the name: `fc1`, `decoder.layers.0.fc2`.
        embedding: `full`: embedding matrices of width d. `adaptive`: adaptive input and adaptive softmax, for causal
            language models whose vocabulary is in order of falling frequency (Baevski and Auli 2019).
        adaptive_cutoffs: for `adaptive`: the first token of every band but the first.
        adaptive_factor: for `adaptive`: how many times narrower each band is than the one before.
        max_position_embeddings: longest input, in tokens; `None` if nothing limits it.
        scale_embedding: embeddings times the square root of their width.
        scale_output: hidden states times 1/√d before the output layer.
        activation_function: activation function of the feed-forward networks.
        dropout, attention_dropout, activation_dropout: in training, of every sublayer's output and of the embeddings;
            of attention weights; inside feed-forward networks.
        share_encoder_decoder_embeddings: one embedding matrix for both stacks.
        tie_word_embeddings: output layer = the decoder's embedding matrix.
        init_std: standard deviation of every new matrix; factors are drawn so that their product has it. `None`: the
            initialization of the architecture, which learns faster; give a number if a paper prints one.
        use_cache: whether decoding keeps the keys and values of past tokens.
        is_encoder_decoder: whether there is an encoder; a causal language model sets it to `False` by itself.
        pad_token_id, bos_token_id, eos_token_id: tokens that fill up, begin and end a text; `None`: there is none.
        decoder_start_token_id: the token that every output begins with (Marian's is pad).
        forced_eos_token_id: the token that an output of the greatest length ends with, or `None`.

    Raises:
        ValueError: fields that contradict each other; the message names the field, its value and the expected one.
    """

    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012, Trainer adds lists to it
    embeddings: ClassVar[tuple[str, ...]] = ("full", "adaptive")
    extra_cache_slots: ClassVar[int] = 0  # slots of the decoder, besides one for each depth
    # Fields that are `None` if all matrices are dense; m and n of a matrix do not depend on them.
    matrix_fields: ClassVar[tuple[str, ...]] = (*RANK_FIELDS, "rank_pattern")
    attribute_map = {  # noqa: RUF012
        "hidden_size": "d_model",
        "num_attention_heads": "encoder_attention_heads",
        "num_hidden_layers": "encoder_layers",
    }

    vocab_size: int = 32000
    decoder_vocab_size: int | None = None
    d_model: int = 512
    encoder_layers: int = 6
    decoder_layers: int = 6
    encoder_attention_heads: int = 8
    decoder_attention_heads: int = 8
    attention_rank: int | None = None
    ffn_rank: int | None = None
    embedding_rank: int | None = None
    decoder_attention_rank: int | None = None
    decoder_ffn_rank: int | None = None
    rank_pattern: dict[str, int | None] | None = None
    embedding: str = "full"
    adaptive_cutoffs: list[int] | None = None
    adaptive_factor: int = 4
    max_position_embeddings: int | None = 1024
    scale_embedding: bool = True
    scale_output: bool = False
    activation_function: str = "relu"
    dropout: float | int = 0.1
    attention_dropout: float | int = 0.0
    activation_dropout: float | int = 0.0
    share_encoder_decoder_embeddings: bool = True
    tie_word_embeddings: bool = True
    init_std: float | int | None = None
    use_cache: bool = True
    is_encoder_decoder: bool = True
    pad_token_id: int | None = 1
    bos_token_id: int | None = 0
    eos_token_id: int | list[int] | None = 2
    decoder_start_token_id: int | None = 2
    forced_eos_token_id: int | list[int] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        for field in ("vocab_size", "d_model", "encoder_layers", "decoder_layers", "max_position_embeddings"):
            check_at_least(field, getattr(self, field), 1)
        for field in self.patterns:
            setattr(self, field, getattr(self, field) or {})
        self.set_defaults()
        self.warn_about_misspelled(kwargs)
        kwargs.setdefault("auto_map", dict(self.auto_classes))
        if not __name__.startswith(f"{TRANSFORMERS_DYNAMIC_MODULE_NAME}."):
            kwargs.pop("custom_pipelines", None)  # the package has registered them, and no code must be trusted
        super().__post_init__(**kwargs)
        self.check()

    def __setattr__(self, name: str, value: Any) -> None:
        """Extend the base class: of a single embedding matrix, `decoder_vocab_size` follows `vocab_size`."""
        sizes = [vars(self).get(field) for field in ("vocab_size", "decoder_vocab_size")]
        super().__setattr__(name, value)
        has_one = self.share_encoder_decoder_embeddings or not self.is_encoder_decoder
        if name == "vocab_size" and has_one and None not in sizes and sizes[0] == sizes[1]:
            super().__setattr__("decoder_vocab_size", value)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Extend the base class: a `vocab_size` that replaces the stored one is also that of a shared decoder."""
        sizes = [config_dict.get(field) for field in ("vocab_size", "decoder_vocab_size")]
        if (
            "vocab_size" in kwargs
            and sizes[0] == sizes[1]
            and config_dict.get("share_encoder_decoder_embeddings", True)
        ):
            kwargs.setdefault("decoder_vocab_size", kwargs["vocab_size"])
        return super().from_dict(config_dict, **kwargs)

    def set_defaults(self) -> None:
        """Set the fields that are `None` and follow from others."""
        if self.decoder_vocab_size is None:
            self.decoder_vocab_size = self.vocab_size

    def warn_about_misspelled(self, names: Iterable[str]) -> None:
        """Log a warning for every name that is nearly the name of a field, because it has no effect."""
        known = [*type(self).__dataclass_fields__, *self.attribute_map]
        for name in names:
            near = difflib.get_close_matches(name, known, 1, cutoff=0.85)
            if near and near[0] != name and not name.endswith("_token_id"):  # generation has similar names
                logger.warning(f"{type(self).__name__} has no field {name!r}, which has no effect: {near[0]!r} is one")

    @property
    def patterns(self) -> tuple[str, ...]:
        """Fields that map module name patterns to values: every field that ends in `_pattern`."""
        return tuple(field for field in type(self).__dataclass_fields__ if field.endswith("_pattern"))

    @property
    def stacks(self) -> tuple[str, ...]:
        """The stacks whose fields are used: a causal language model has only a decoder."""
        return ("encoder", "decoder") if self.is_encoder_decoder else ("decoder",)

    @property
    def has_two_vocabularies(self) -> bool:
        """Whether encoder and decoder have separate embeddings of tokens."""
        return self.is_encoder_decoder and not self.share_encoder_decoder_embeddings

    @property
    def embedding_width(self) -> int:
        """Width of the embedding matrix."""
        return self.d_model

    @property
    def output_is_input_table(self) -> bool:
        """Whether the output layer multiplies by the vectors that are the decoder's input."""
        return self.tie_word_embeddings and self.embedding in ("full", "adaptive")

    def get_text_config(self, decoder: bool | None = None, encoder: bool | None = None) -> PreTrainedConfig:
        """Extend the base class: `num_hidden_layers` of a decoder is its number of cache slots."""
        if not decoder or encoder or not (self.is_encoder_decoder or self.extra_cache_slots):
            return super().get_text_config(decoder=decoder, encoder=encoder)
        config = copy.copy(self)
        config.num_hidden_layers = self.decoder_layers + self.extra_cache_slots
        config.num_attention_heads = self.decoder_attention_heads
        config.vocab_size = self.decoder_vocab_size
        return config

    def to_json_string(self, *args: Any, **kwargs: Any) -> str:
        """Extend the base class: patterns keep their order, because the first match decides. An encoder-decoder names
        its pipelines."""
        content = json.loads(super().to_json_string(*args, **kwargs))
        content.pop("custom_pipelines", None)
        if self.is_encoder_decoder:
            model = {"pt": ["AutoModelForSeq2SeqLM"], "type": "text"}
            named = {task: {"impl": f"pipelines.{name}", **model} for task, name in PIPELINE_CLASSES.items()}
            content["custom_pipelines"] = named
        patterns = {field: getattr(self, field) for field in content if field in self.patterns}
        return json.dumps(content | patterns, indent=2) + "\n"

    def check(self) -> None:
        """Raise `ValueError` if fields cannot go together."""
        for field in (name for name in type(self).__dataclass_fields__ if name.endswith("dropout")):
            if not 0 <= getattr(self, field) <= 1:
                raise ValueError(f"{field} is {getattr(self, field)}; it is a share, from 0 to 1")
        ranks = {field: getattr(self, field) for field in RANK_FIELDS}
        ranks |= {f"rank_pattern[{pattern!r}]": rank for pattern, rank in self.rank_pattern.items()}
        for field, rank in ranks.items():
            if rank is not None and rank < 1:
                raise ValueError(f"{field} is {rank}; a rank is at least 1, and None means dense")
        for field in self.patterns:
            for pattern in getattr(self, field):
                try:
                    re.compile(pattern)
                except re.error as error:
                    raise ValueError(f"{field} has {pattern!r}, which is no regular expression: {error}") from error
        check_one_of("activation_function", self.activation_function, ACT2FN)
        check_one_of("embedding", self.embedding, self.embeddings)
        if self.embedding == "adaptive":
            self.check_adaptive()
        check_at_least("decoder_vocab_size", self.decoder_vocab_size, 1)
        tokens = min(self.vocab_size, self.decoder_vocab_size)
        if self.pad_token_id is not None and not 0 <= self.pad_token_id < tokens:
            raise ValueError(f"pad_token_id is {self.pad_token_id}, but there are {tokens} tokens (vocab_size)")
        if self.share_encoder_decoder_embeddings and self.decoder_vocab_size != self.vocab_size:
            raise ValueError(
                f"decoder_vocab_size is {self.decoder_vocab_size} and vocab_size {self.vocab_size}: set both equal, "
                "or give each stack its own embedding matrix (share_encoder_decoder_embeddings=False)"
            )
        is_relative = getattr(self, "position_embedding_type", None) in RELATIVE_POSITIONS
        if self.max_position_embeddings is None and not is_relative:
            raise ValueError("max_position_embeddings is None, but the table of positions needs a number")

    def check_adaptive(self) -> None:
        """Raise `ValueError` unless `adaptive_cutoffs` divide the vocabulary, and `adaptive_factor` the width."""
        cutoffs, factor = self.adaptive_cutoffs, self.adaptive_factor
        vocab_size, width = self.decoder_vocab_size, self.d_model
        if not cutoffs or any(a >= b for a, b in zip([0, *cutoffs], [*cutoffs, vocab_size], strict=True)):
            raise ValueError(
                f"adaptive_cutoffs is {cutoffs}: with embedding='adaptive' they rise from 1 to below the vocabulary, "
                f"which has {vocab_size} tokens (vocab_size)"
            )
        if factor < 1 or width // factor ** len(cutoffs) < 1:
            raise ValueError(
                f"adaptive_factor is {factor}: {len(cutoffs) + 1} bands would have widths from {width} down to "
                f"{width / max(factor, 1) ** len(cutoffs):.2g}; it is at least 1, and the last width too"
            )
        if self.embedding_rank is not None:
            raise ValueError(
                f"embedding_rank is {self.embedding_rank}, but embedding='adaptive' has narrow bands instead"
            )

    def rank_of_kind(self, stack: str, kind: str) -> int | None:
        """Return r of the `attention`, `ffn` or `embedding` matrices of the `encoder` or `decoder`."""
        rank = getattr(self, f"decoder_{kind}_rank", None) if stack == "decoder" else None
        return getattr(self, f"{kind}_rank") if rank is None else rank


def causal_config(config: FactorizedConfig) -> FactorizedConfig:
    """Return a copy of `config` for a decoder alone, whose fields of the encoder do not contradict the decoder's."""
    config = copy.deepcopy(config)
    if config.is_encoder_decoder:
        config.check()
        config.vocab_size = config.decoder_vocab_size
    config.is_encoder_decoder = config.share_encoder_decoder_embeddings = False
    config.decoder_vocab_size = config.vocab_size
    # transformers reads num_hidden_layers and num_attention_heads from the encoder's fields.
    for field in ("layers", "attention_heads", "groups"):
        if hasattr(config, f"encoder_{field}"):
            setattr(config, f"encoder_{field}", getattr(config, f"decoder_{field}"))
    if getattr(config, "vanilla_head_scaling", False) and config.decoder_style != "vanilla":
        config.vanilla_head_scaling = False
    if getattr(config, "normalize_before", False) is None:
        config.normalize_before = True  # Subformer, §3: as Baevski and Auli
    config.set_defaults()
    config.check()
    return config


@strict
class LightFormerConfig(FactorizedConfig):
    r"""Every shape of a LightFormer follows from these fields and those of `FactorizedConfig`. With every rank `None`
    and no groups it is the Transformer (Vaswani et al. 2017) that the paper compares with.

    Args:
        encoder_ffn_dim, decoder_ffn_dim: inner width of the feed-forward networks.
        ffn_dim_pattern: layer name pattern → that width, for layers that differ (`decoder.layers.0`).
        head_dim: d_k, width of a head; `None` means d_model / heads, and stays `None` where heads differ.
        head_dim_pattern: attention name pattern → d_k, for those that differ (`decoder.layers.0.encoder_attn`).
        encoder_groups, decoder_groups: N, number of stored layers, in contiguous groups (§3.2). `None`: one a depth.
        share_layer_norms: whether the LayerNorms of a group are shared too; else each depth has its own.
        joint_qkv: one projection d → 3d in self-attention (Table 1 of the paper).
        attention_output_projection: whether attention has `out_proj` (Table 1 has none).
        scale_attention: scores divided by √d_k. T5's are not.
        use_bias: whether linear layers of attention and feed-forward networks add a bias. T5's do not.
        key_bias: whether `k_proj` does, too. Whisper's does not, because attention does not depend on it.
        gated_ffn: networks of three matrices, fc2(activation(fc_gate(x)) · fc1(x)) (GEGLU, Shazeer 2020; T5 v1.1).
        position_embedding_type: `sinusoidal` (Marian, Pegasus), `sinusoidal_half` (M2M100, NLLB), `learned` (BART), or
            biases of attention by distance: `relative` for all layers of a stack (T5) or `relative_per_layer` (UMT5).
            Biases need eager attention or SDPA, and have no longest input (max_position_embeddings is `None`).
        relative_buckets, relative_furthest: number of biases of a head, and the distance from which all are equal.
        position_offset: added to positions before the table is read (2 in BART and M2M100).
        normalization: `layer_norm`, or `rms_norm` without mean and bias (T5); everywhere.
        norm_epsilon: ε, added to the variance.
        normalize_before: LayerNorm before each sublayer (mBART) rather than after it (Marian, BART).
        layernorm_embedding: LayerNorm on the embeddings.
        final_layer_norm: LayerNorm after the last layer of each stack.
        classifier_dropout: before the classifier of `LightFormerForSequenceClassification`, in training.
        embedding_dim: width of word vectors (GloVe: 300) below a `Linear(embedding_dim, d)`, for the same class.
    """

    model_type = "lightformer"
    # Every Auto class finds its model in the code that travels with a checkpoint, whichever head was saved.
    auto_classes = {  # noqa: RUF012
        "AutoConfig": "configuration_lightformer.LightFormerConfig",
        "AutoModel": "modeling_lightformer.LightFormerModel",
        "AutoModelForSeq2SeqLM": "modeling_lightformer.LightFormerForConditionalGeneration",
        "AutoModelForCausalLM": "modeling_lightformer.LightFormerForCausalLM",
        "AutoModelForSequenceClassification": "modeling_lightformer.LightFormerForSequenceClassification",
    }

    encoder_ffn_dim: int = 2048
    decoder_ffn_dim: int = 2048
    ffn_dim_pattern: dict[str, int] | None = None
    head_dim: int | None = None
    head_dim_pattern: dict[str, int] | None = None
    encoder_groups: int | None = None
    decoder_groups: int | None = None
    share_layer_norms: bool = True
    joint_qkv: bool = False
    attention_output_projection: bool = True
    scale_attention: bool = True
    use_bias: bool = True
    key_bias: bool = True
    gated_ffn: bool = False
    position_embedding_type: str = "sinusoidal"
    position_offset: int = 0
    relative_buckets: int = 32
    relative_furthest: int = 128
    normalization: str = "layer_norm"
    norm_epsilon: float = 1e-5
    normalize_before: bool = False
    layernorm_embedding: bool = False
    final_layer_norm: bool = False
    classifier_dropout: float | int = 0.0
    embedding_dim: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        if (rank := kwargs.pop("group_residual_rank", None)) is not None:  # version 0.1 stores it
            raise ValueError(
                f"group_residual_rank is {rank}: only version 0.1 of lightformers_hf has residuals of depths. "
                "Load the checkpoint with `pip install lightformers_hf==0.1.*`, or convert its teacher again"
            )
        if self.position_embedding_type in RELATIVE_POSITIONS:
            self.max_position_embeddings = None
        super().__post_init__(**kwargs)

    def set_defaults(self) -> None:
        """Set `head_dim`, which tools read (caches, servers), if all heads have one width."""
        super().set_defaults()
        heads = self.encoder_attention_heads
        are_alike = not self.head_dim_pattern and heads == self.decoder_attention_heads
        if self.head_dim is None and are_alike and heads > 0 and self.d_model % heads == 0:
            self.head_dim = self.d_model // heads

    def check(self) -> None:
        super().check()
        check_at_least("head_dim", self.head_dim, 1)
        for field in ("ffn_dim_pattern", "head_dim_pattern"):
            for pattern, width in getattr(self, field).items():
                check_at_least(f"{field}[{pattern!r}]", width, 1)
        for stack in ("encoder", "decoder"):
            heads = f"{stack}_attention_heads"
            if self.head_dim is None:
                check_heads(heads, getattr(self, heads), "d_model", self.d_model)
            check_at_least(heads, getattr(self, heads), 1)
            inner = {self.head_dim or self.d_model // getattr(self, heads), *self.head_dim_pattern.values()}
            if not self.attention_output_projection and inner != {self.d_model // getattr(self, heads)}:
                raise ValueError(
                    f"head_dim is {self.head_dim} and head_dim_pattern {self.head_dim_pattern}; heads that together "
                    "are not d_model wide need attention_output_projection=True"
                )
            check_groups(f"{stack}_groups", getattr(self, f"{stack}_groups"), getattr(self, f"{stack}_layers"))
        check_one_of("position_embedding_type", self.position_embedding_type, POSITION_EMBEDDING_TYPES)
        check_one_of("normalization", self.normalization, NORMALIZATIONS)
        check_at_least("norm_epsilon", self.norm_epsilon, 0)
        check_at_least("relative_buckets", self.relative_buckets, 4)
        if self.relative_furthest <= self.relative_buckets // 2:
            raise ValueError(
                f"relative_furthest is {self.relative_furthest}: with {self.relative_buckets} relative_buckets, half "
                f"of them for one distance each, it is at least {self.relative_buckets // 2 + 1}"
            )
