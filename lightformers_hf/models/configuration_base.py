"""What the configurations of all architectures have in common: sizes, ranks, token ids, and their checks."""

import copy
import difflib
import json
import re
from collections.abc import Collection, Iterable
from typing import Any, ClassVar

import transformers

OLDEST_TRANSFORMERS = "5.18"  # as in pyproject.toml
# Before anything is imported that older ones lack: what fails there would not say why.
if tuple(map(int, transformers.__version__.split(".")[:2])) < tuple(map(int, OLDEST_TRANSFORMERS.split("."))):
    raise ImportError(
        f"this model needs transformers {OLDEST_TRANSFORMERS} or newer, and {transformers.__version__} is installed: "
        f"run pip install --upgrade 'transformers>={OLDEST_TRANSFORMERS}'"
    )

from huggingface_hub.dataclasses import strict  # noqa: E402
from transformers import PreTrainedConfig  # noqa: E402
from transformers.activations import ACT2FN  # noqa: E402
from transformers.utils.logging import get_logger  # noqa: E402

logger = get_logger(__name__)

RANK_FIELDS = ("attention_rank", "ffn_rank", "embedding_rank", "decoder_attention_rank", "decoder_ffn_rank")


@strict
class FactorizedConfig(PreTrainedConfig):
    r"""Fields of every architecture. Each matrix may be low-rank: the rank fields say of which rank, `None` is dense.

    Args:
        vocab_size: V, tokens of the encoder's table, and of the decoder's where they share one.
        decoder_vocab_size: tokens of the decoder's own table; `None` means V.
        d_model: d, width of the model.
        encoder_layers, decoder_layers: depths. Causal language models use the `decoder_*` fields.
        encoder_attention_heads, decoder_attention_heads: H, heads of every attention.
        attention_rank, ffn_rank, embedding_rank: r of every matrix of that kind; `None` means dense.
        decoder_attention_rank, decoder_ffn_rank: r of the decoder's; `None` means as the encoder's.
        rank_pattern: module name pattern → r, or `None` for dense; the first that matches decides, before the fields
            above. A pattern is a regular expression for the end of the name: `fc1`, `decoder.layers.0.fc2`.
        embedding: `full`: token tables of width d. `adaptive`: adaptive input and adaptive softmax, for causal
            language models (Baevski and Auli 2019).
        adaptive_cutoffs: for `adaptive`, whose vocabulary is in order of falling frequency: the first token of every
            band but the first.
        adaptive_factor: for `adaptive`: how many times narrower each band is than the one before.
        max_position_embeddings: longest input, in tokens; `None` where nothing limits it.
        scale_embedding: embeddings times the square root of their width.
        scale_output: states times 1/√d before the output layer.
        activation_function: of the feed-forward networks.
        dropout: of every sublayer's output and of the embeddings, in training.
        attention_dropout: of attention weights, in training.
        activation_dropout: inside feed-forward networks, in training.
        share_encoder_decoder_embeddings: one token table for both stacks.
        tie_word_embeddings: output layer = the decoder's token table.
        init_std: standard deviation of every fresh matrix; factors are drawn so that their product has it. `None`: the
            architecture's own start (`starts.py`), which learns faster; give one where a paper prints it.
        use_cache: whether decoding keeps the keys and values of past tokens.
        is_encoder_decoder: whether there is an encoder; a causal language model sets it to `False` by itself.
        pad_token_id, bos_token_id, eos_token_id: tokens that fill up, begin and end a text; `None`: there is none.
        decoder_start_token_id: the token that every output begins with (Marian's is pad).
        forced_eos_token_id: the token that an output of the greatest length ends with; `None`: none is forced.

    Raises:
        ValueError: fields that cannot go together; the message names the field, its value and what would be right.
    """

    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012, Trainer adds lists to it
    embeddings: ClassVar[tuple[str, ...]] = ("full", "adaptive")
    # What makes matrices other than dense, and is `None` where they are; their m×n does not depend on it.
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
        self.warn_of_misspelt(kwargs)
        kwargs.setdefault("auto_map", dict(self.auto_classes))
        super().__post_init__(**kwargs)
        self.check()

    def set_defaults(self) -> None:
        """Set the fields that are `None` and follow from others."""
        if self.decoder_vocab_size is None:
            self.decoder_vocab_size = self.vocab_size

    def warn_of_misspelt(self, names: Iterable[str]) -> None:
        """Log a warning for every name that is no field, but nearly one: it would have no effect."""
        known = [*type(self).__dataclass_fields__, *self.attribute_map]
        for name in names:
            near = difflib.get_close_matches(name, known, 1, cutoff=0.85)
            if near and near[0] != name and not name.endswith("_token_id"):  # those of generation are like the fields
                logger.warning(f"{type(self).__name__} has no field {name!r}, which has no effect: {near[0]!r} is one")

    @property
    def patterns(self) -> tuple[str, ...]:
        """Fields that say of modules, by name, what differs from all others: every one that ends in `_pattern`."""
        return tuple(field for field in type(self).__dataclass_fields__ if field.endswith("_pattern"))

    @property
    def stacks(self) -> tuple[str, ...]:
        """The stacks whose fields are used: a causal language model has a decoder alone."""
        return ("encoder", "decoder") if self.is_encoder_decoder else ("decoder",)

    @property
    def embedding_width(self) -> int:
        """Width of the token table."""
        return self.d_model

    @property
    def needs_positions(self) -> bool:
        """Whether positions are a table, which has `max_position_embeddings` rows."""
        return True

    @property
    def output_is_input_table(self) -> bool:
        """Whether the output layer multiplies by the very vectors that the decoder's input is."""
        return self.tie_word_embeddings and self.embedding in ("full", "adaptive")

    @property
    def extra_cache_slots(self) -> int:
        """Cache slots of the decoder besides one for each depth."""
        return 0

    def get_text_config(self, decoder: bool | None = None, encoder: bool | None = None) -> PreTrainedConfig:
        """As the base class does; a decoder's says how many slots a cache has, which is what caches ask it for.

        Of a decoder's configuration it is that configuration again: the base class would find defaults there.
        """
        if not decoder or encoder or not (self.is_encoder_decoder or self.extra_cache_slots):
            return super().get_text_config(decoder=decoder, encoder=encoder)
        config = copy.copy(self)
        config.num_hidden_layers = self.decoder_layers + self.extra_cache_slots
        config.num_attention_heads = self.decoder_attention_heads
        config.vocab_size = self.decoder_vocab_size
        return config

    def to_json_string(self, *args: Any, **kwargs: Any) -> str:
        """As the base class does, but patterns stay in their order, which says which comes first."""
        content = json.loads(super().to_json_string(*args, **kwargs))
        patterns = {field: getattr(self, field) for field in content if field in self.patterns}
        return json.dumps(content | patterns, indent=2) + "\n"

    def check(self) -> None:
        """Raise `ValueError` where fields cannot go together."""
        for field in (name for name in type(self).__dataclass_fields__ if name.endswith("dropout")):
            if not 0 <= getattr(self, field) <= 1:
                raise ValueError(f"{field} is {getattr(self, field)}; it is a share, from 0 to 1")
        ranks = {field: getattr(self, field) for field in RANK_FIELDS}
        ranks |= {f"rank_pattern[{pattern!r}]": rank for pattern, rank in self.rank_pattern.items()}
        for field, rank in ranks.items():
            if rank is not None and rank < 1:
                raise ValueError(f"{field} is {rank}; a rank is at least 1, and None means dense")
        for field in self.patterns:
            check_patterns(field, getattr(self, field))
        check_one_of("activation_function", self.activation_function, ACT2FN)
        check_one_of("embedding", self.embedding, self.embeddings)
        if self.embedding == "adaptive":
            check_adaptive(self.adaptive_cutoffs, self.adaptive_factor, self.decoder_vocab_size, self.d_model)
            if self.embedding_rank is not None:
                raise ValueError(
                    f"embedding_rank is {self.embedding_rank}, but embedding='adaptive' has narrow bands instead"
                )
        if self.max_position_embeddings is None and self.needs_positions:
            raise ValueError("max_position_embeddings is None, but the table of positions needs a number")
        check_at_least("decoder_vocab_size", self.decoder_vocab_size, 1)
        tokens = min(self.vocab_size, self.decoder_vocab_size)
        if self.pad_token_id is not None and not 0 <= self.pad_token_id < tokens:
            raise ValueError(f"pad_token_id is {self.pad_token_id}, but there are {tokens} tokens (vocab_size)")
        if self.share_encoder_decoder_embeddings and self.decoder_vocab_size != self.vocab_size:
            raise ValueError(
                f"decoder_vocab_size is {self.decoder_vocab_size} and vocab_size {self.vocab_size}: set both alike, "
                "or give each stack a token table of its own (share_encoder_decoder_embeddings=False)"
            )

    def rank_of_kind(self, stack: str, kind: str) -> int | None:
        """r that the fields give to `attention`, `ffn` or `embedding` matrices of the `encoder` or `decoder`."""
        rank = getattr(self, f"{kind}_rank")
        if stack == "decoder" and kind != "embedding":
            own = getattr(self, f"decoder_{kind}_rank")
            rank = rank if own is None else own
        return rank


def causal_config(config: FactorizedConfig) -> FactorizedConfig:
    """`config` for the decoder alone; the caller's own stays an encoder-decoder's."""
    config = copy.deepcopy(config)
    if config.is_encoder_decoder:
        config.check()
        config.vocab_size = config.decoder_vocab_size
    config.is_encoder_decoder = config.share_encoder_decoder_embeddings = False
    config.decoder_vocab_size = config.vocab_size
    # What transformers calls num_hidden_layers and num_attention_heads are the encoder's.
    config.encoder_layers, config.encoder_attention_heads = config.decoder_layers, config.decoder_attention_heads
    # What is the encoder's alone goes, so that the configuration can be read again.
    if hasattr(config, "encoder_groups"):
        config.encoder_groups = config.decoder_groups
    if getattr(config, "vanilla_head_scaling", False) and config.decoder_style != "vanilla":
        config.vanilla_head_scaling = False
    config.set_defaults()
    config.check()
    return config


def check_one_of(field: str, value: str, allowed: Collection[str]) -> None:
    """Raise `ValueError` naming `field` unless `value` is one of `allowed`."""
    if value not in allowed:
        raise ValueError(f"{field} is {value!r}; it is one of {', '.join(sorted(allowed))}")


def check_patterns(field: str, patterns: Iterable[str]) -> None:
    """Raise `ValueError` naming `field` unless all `patterns` are regular expressions."""
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"{field} has {pattern!r}, which is no regular expression: {error}") from error


def check_at_least(field: str, value: float | None, least: float) -> None:
    """Raise `ValueError` naming `field` unless `value` is `None` or at least `least`."""
    if value is not None and value < least:
        raise ValueError(f"{field} is {value}; it is at least {least}")


def check_heads(field: str, heads: int, width_field: str, width: int) -> None:
    """Raise `ValueError` naming both fields unless `heads` heads divide `width`."""
    if heads < 1 or width % heads:
        divisors = [n for n in range(1, min(width, 32) + 1) if width % n == 0]
        raise ValueError(
            f"{field} is {heads}, which does not divide {width_field} {width}; these do: "
            f"{', '.join(map(str, divisors))}"
        )


def check_adaptive(cutoffs: list[int] | None, factor: int, vocab_size: int, width: int) -> None:
    """Raise `ValueError` unless `adaptive_cutoffs` cut `vocab_size` tokens, and `adaptive_factor` a `width`."""
    rising = cutoffs and all(a < b for a, b in zip([0, *cutoffs], [*cutoffs, vocab_size], strict=True))
    if not rising:
        raise ValueError(
            f"adaptive_cutoffs is {cutoffs}: with embedding='adaptive' they rise from 1 to below the vocabulary, "
            f"which has {vocab_size} tokens (vocab_size)"
        )
    if factor < 1 or width // factor ** len(cutoffs) < 1:
        raise ValueError(
            f"adaptive_factor is {factor}: {len(cutoffs) + 1} bands would have widths from {width} down to "
            f"{width / max(factor, 1) ** len(cutoffs):.2g}; it is at least 1, and the last width too"
        )
