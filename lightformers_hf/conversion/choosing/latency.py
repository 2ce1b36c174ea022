"""What translating a sentence costs on this machine: microseconds on one core, batch 1, greedy, through `generate()`.

The cost is that of the matrix products (`costs`), each as often as it is computed for a sentence, and that of
everything else: attention, LayerNorms, caches, Python. The latter hardly depends on widths: it is measured on narrow
models of the same class.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace

import torch
from torch import Tensor, nn
from transformers import AutoModelForSeq2SeqLM, PreTrainedConfig, PreTrainedModel

from ...loading import build_network
from ...models.configuration_base import FactorizedConfig
from ...models.matrices import matrices_of, product_shapes
from ..sharing.originals import short_name
from ..workers import from_main, is_main
from .machine import (
    MachineCosts,
    Number,
    Timer,
    machine_costs,
    median_seconds,
    one_core,
    store_costs,
)

STORED_LAYER = re.compile(r"(?:^|\.)(encoder|decoder)\.(layers|depths)\.(\d+)\.")
ENCODED = re.compile(r"encoder_attn\.[kv]_proj$")
# The narrow models that overheads are measured on: everything is that wide, and each stack that deep.
NARROW, SHALLOW, DEEP, LONG = 64, 1, 5, 17


@dataclass(frozen=True)
class Layer:
    """A matrix of a model and how often a sentence needs it.

    Attributes:
        shapes: m×n of the products that compute it, one after another; of tables and output layers as
            `product_shapes` has them, V×d.
        sentence: products with all of the source's states.
        token: products with one state, for each target token.
        kind: `linear`, `table` (its rows), `output` (an output layer of its own) or `tied` (a table that is the
            output layer, too).
    """

    shapes: tuple[tuple[Number, Number], ...]
    sentence: int
    token: int
    kind: str = "linear"

    @classmethod
    def of(cls, module: nn.Module, sentence: int, token: int, kind: str = "linear") -> Layer:
        """The matrix of a module, needed so often."""
        return cls(product_shapes(module), sentence, token, kind)

    @property
    def bytes_read(self) -> Number:
        """For each target token, in fp32; of a table that is only looked up, none to speak of."""
        if self.kind == "table" or not self.token:
            return 0
        return 4 * sum(m * n for m, n in self.shapes)


def layers_of(model: PreTrainedModel) -> dict[str, Layer]:
    """{module name without `model.`: matrix} of an encoder-decoder: LightFormer, Marian, BART and their like.

    Raises:
        ValueError: it is none of them.
    """
    base = getattr(model, model.base_model_prefix, None)
    has_layers = all(hasattr(getattr(base, stack, None), "layers") for stack in ("encoder", "decoder"))
    if not has_layers or (isinstance(model.config, FactorizedConfig) and model.config.model_type != "lightformer"):
        raise ValueError(
            f"the cost of a sentence is known of encoder-decoders like Marian, BART and LightFormer, and "
            f"{type(model).__name__} is none"
        )
    found = {}
    for name, module in matrices_of(model):
        place = STORED_LAYER.search(name)
        if not place or isinstance(module, nn.Embedding):  # relative positions
            continue
        stack, kind, index = getattr(base, place[1]), place[2], int(place[3])
        depths = getattr(stack.layers, "stored_at", None)
        times = depths.count(index) if depths and kind == "layers" else 1
        if ENCODED.search(name) and not getattr(stack, "has_residuals", False):
            times = 1  # of the encoder's states, alike for all depths of a layer
        of_source = place[1] == "encoder" or bool(ENCODED.search(name))
        found[short_name(name)] = Layer.of(module, *((times, 0) if of_source else (0, times)))
    return found | _tables(model, base)


def _tables(model: PreTrainedModel, base: nn.Module) -> dict[str, Layer]:
    """The token tables and the output layer."""
    tied = model.config.tie_word_embeddings
    kind = "tied" if tied else "table"
    if hasattr(base, "shared"):
        found = {"shared": Layer.of(base.shared, 1, 1, kind)}
    else:
        found = {
            "encoder.embed_tokens": Layer.of(base.encoder.embed_tokens, 1, 0, "table"),
            "decoder.embed_tokens": Layer.of(base.decoder.embed_tokens, 0, 1, kind),
        }
    return found if tied else found | {"lm_head": Layer.of(model.lm_head, 0, 1, "output")}


@dataclass(frozen=True)
class Overheads:
    """Microseconds besides matrix products: of a sentence, of an encoder layer for it, of a token, of a decoder layer
    for it."""

    sentence: float
    encoder_layer: float
    token: float
    decoder_layer: float


@dataclass(frozen=True)
class SentenceCosts:
    """Costs of a model's parts in microseconds a sentence. Called, it is a measure of what a part would cost.

    Attributes:
        machine: costs of products.
        layers: the model's matrices.
        source_tokens, target_tokens: lengths of the sentence.
        working_set: bytes of weights that a token reads. A model that is yet to be made smaller should be given what
            will be left (`replace(costs, working_set=…)`), as it decides what stays in the cache.
        overhead: of the sentence, all layers included.
    """

    machine: MachineCosts
    layers: dict[str, Layer]
    source_tokens: float
    target_tokens: float
    working_set: float
    overhead: float

    def __call__(self, name: str, *shapes: tuple[Number, Number]) -> Tensor:
        """Microseconds a sentence of the matrix `name` if it were computed by products of these shapes.

        Args:
            shapes: m×n, which may be tensors; of tables and output layers V×d, or V×r and r×d.

        Raises:
            ValueError: the model has no such matrix.
        """
        layer = self.layers.get(short_name(name))
        if layer is None:
            raise ValueError(f"the model has no matrix {name!r} whose cost is known")

        def one(m: Number, n: Number) -> Tensor:
            return self.machine.row(m, n, self.working_set)

        def source(m: Number, n: Number) -> Tensor:
            return self.machine.rows(m, n, self.source_tokens)

        tokens, total = self.target_tokens, torch.zeros((), dtype=torch.float64)
        computed: Sequence[tuple[Number, Number]] = shapes
        if layer.kind != "linear":
            (vocabulary, width), *computed = shapes  # a table's own rows are looked up
        if layer.kind != "output":
            for m, n in computed:
                if layer.sentence:
                    total = total + layer.sentence * source(m, n)
                if layer.token:
                    total = total + layer.token * tokens * one(m, n)
        if layer.kind in ("output", "tied"):  # the same matrices, from the other side
            products = [*((n, m) for m, n in computed), (width, vocabulary)]
            total = total + tokens * sum(one(*shape) for shape in products)
        return total

    def bytes_read(self, name: str, *shapes: tuple[Number, Number]) -> Number:
        """Bytes that a target token reads of the matrix `name` if it were computed by products of these shapes."""
        return replace(self.layers[short_name(name)], shapes=shapes).bytes_read

    @property
    def products(self) -> float:
        """Of all matrices as they are."""
        return sum(self(name, *layer.shapes).item() for name, layer in self.layers.items())

    @property
    def total(self) -> float:
        """Of the model as it is."""
        return self.products + self.overhead


def sentence_costs(
    model: PreTrainedModel | PreTrainedConfig,
    source_tokens: float = 25,
    target_tokens: float = 25,
    *,
    machine: MachineCosts | None = None,
    timer: Timer = median_seconds,
) -> SentenceCosts:
    """Costs of an encoder-decoder on this machine, from its tables (`machine_costs`), which may be measured first.

    Of several processes the main one measures, so that all have the same figures; all of them must call this.

    Args:
        model: a model, on any device, or a configuration.
        source_tokens, target_tokens: of an average sentence.
        machine: default: this machine's, which are kept in a file; what is given here is not.

    Raises:
        ValueError: it is no encoder-decoder.
    """
    if isinstance(model, PreTrainedConfig):
        with torch.device("meta"):
            model = build_network(AutoModelForSeq2SeqLM, model)
    layers = layers_of(model)
    kept = machine is None
    machine = from_main(lambda: machine_costs(timer=timer)) if kept else machine
    key = f"{model.config.model_type}, {model.config.vocab_size} tokens"
    if key not in machine.overheads:
        machine.overheads[key] = from_main(lambda: list(astuple(measure_overheads(model, machine, timer))))
        if kept and is_main():
            store_costs(machine)
    each = Overheads(*machine.overheads[key])
    config = model.config
    overhead = each.sentence + config.encoder_layers * each.encoder_layer
    overhead += target_tokens * (each.token + config.decoder_layers * each.decoder_layer)
    return _costs(model, layers, machine, source_tokens, target_tokens, overhead)


def _costs(
    model: PreTrainedModel,
    layers: dict[str, Layer],
    machine: MachineCosts,
    source_tokens: float,
    target_tokens: float,
    overhead: float,
) -> SentenceCosts:
    working_set = sum(layer.bytes_read for layer in layers.values())
    return SentenceCosts(machine, layers, source_tokens, target_tokens, working_set, overhead)


def narrow_config(config: PreTrainedConfig, encoder_layers: int, decoder_layers: int) -> PreTrainedConfig:
    """The configuration of a model as `config`'s, dense, of so many layers, as narrow as its heads allow."""
    heads = max(config.encoder_attention_heads, config.decoder_attention_heads)
    width = heads * max(4, math.ceil(NARROW / heads))
    changes = {"encoder_layers": encoder_layers, "decoder_layers": decoder_layers, "d_model": width}
    changes |= dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), NARROW)
    changes |= dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), heads)
    if isinstance(config, FactorizedConfig):
        own = ("head_dim", "encoder_groups", "decoder_groups", "group_residual_rank")
        changes |= dict.fromkeys((*own, *config.matrix_fields, *config.patterns))
    fields = copy.deepcopy(config.to_dict()) | {
        name: value for name, value in changes.items() if hasattr(config, name)
    }
    return type(config)(**fields)


def measure_overheads(model: PreTrainedModel, machine: MachineCosts, timer: Timer = median_seconds) -> Overheads:
    """Measure what a model of that class takes besides matrix products: some seconds."""
    source = torch.full((1, 25), max(3, model.config.vocab_size // 2))

    def rest(encoder_layers: int, decoder_layers: int, tokens: int) -> float:
        """Microseconds of a narrow model beyond its products."""
        narrow = type(model)(narrow_config(model.config, encoder_layers, decoder_layers)).eval()
        ends = {"eos_token_id": None, "forced_eos_token_id": None, "forced_bos_token_id": None}

        def run() -> None:
            narrow.generate(
                source, attention_mask=torch.ones_like(source), max_new_tokens=tokens, max_length=None,
                num_beams=1, do_sample=False, **ends,
            )  # fmt: skip

        with one_core():
            measured = timer(run) * 1e6
        return measured - _costs(narrow, layers_of(narrow), machine, source.shape[1], tokens, 0.0).products

    with torch.random.fork_rng(devices=()), torch.device("cpu"):
        least, long = rest(SHALLOW, SHALLOW, 1), rest(SHALLOW, SHALLOW, LONG)
        encoder_layer = (rest(DEEP, SHALLOW, 1) - least) / (DEEP - SHALLOW)
        decoder_layer = (rest(SHALLOW, DEEP, LONG) - long) / (DEEP - SHALLOW) / LONG
    token = (long - least) / (LONG - 1) - decoder_layer
    sentence = least - encoder_layer - token - decoder_layer
    return Overheads(*(max(value, 0.0) for value in (sentence, encoder_layer, token, decoder_layer)))
