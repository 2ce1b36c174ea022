"""Slow, literal forward passes of Subformer and PartialFormer, written from the equations.

One sentence at a time (so that there is no padding and no mask), one position at a time (a causal position is shown
the earlier ones and nothing else), one head at a time; a vector is a 1-D float64 array. Of a model nothing is used but
its weights, by name. A low-rank matrix is multiplied out first.
"""

import math
from collections.abc import Callable

import numpy as np
import torch
from models.cases import padded

Vectors = list[np.ndarray]


@torch.no_grad()
def like_trained(model: torch.nn.Module, seed: int = 0) -> torch.nn.Module:
    """Every parameter random, biases and LayerNorms included, in evaluation mode.

    Matrices keep the size of what they multiply, so that no softmax saturates and no position goes under.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(parameter)
        if parameter.dim() > 1:
            parameter.copy_(noise * 1.5 / math.sqrt(parameter.shape[1]))
        else:
            parameter.copy_(0.3 * noise + float("norm" in name and name.endswith("weight")))
    return model.eval()


def double_model(model_class, config, seed: int = 0) -> torch.nn.Module:
    """A model in float64, buffers included, with weights like trained ones."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        return like_trained(model_class(config), seed)
    finally:
        torch.set_default_dtype(before)


class Weights:
    """The tensors of a model, by name: `weights["encoder.layers.0"]` has those below that name."""

    def __init__(self, tensors: dict[str, np.ndarray], prefix: str = ""):
        self.tensors, self.prefix = tensors, prefix

    @classmethod
    def of(cls, model: torch.nn.Module) -> "Weights":
        return cls({name: tensor.detach().double().numpy() for name, tensor in model.state_dict().items()})

    def __getitem__(self, name: str) -> "Weights":
        return Weights(self.tensors, f"{self.prefix}{name}.")

    def __contains__(self, name: str) -> bool:
        return any(key.startswith(f"{self.prefix}{name}.") for key in self.tensors)

    def tensor(self, name: str) -> np.ndarray:
        return self.tensors[self.prefix + name]

    def matrix(self, name: str) -> np.ndarray:
        """W of y = W·x + b; of factors, their product."""
        if f"{self.prefix}{name}.u.weight" in self.tensors:
            return self.tensor(f"{name}.v.weight") @ self.tensor(f"{name}.u.weight")
        return self.tensor(f"{name}.weight")

    def table(self, name: str) -> np.ndarray:
        """Token table; of factors, their product."""
        if f"{self.prefix}{name}.basis" in self.tensors:
            return self.tensor(f"{name}.weight") @ self.tensor(f"{name}.basis")
        return self.tensor(f"{name}.weight")

    def linear(self, name: str, x: np.ndarray) -> np.ndarray:
        bias = name if f"{self.prefix}{name}.bias" in self.tensors else f"{name}.v"
        return self.matrix(name) @ x + self.tensor(f"{bias}.bias")

    def norm(self, name: str, x: np.ndarray) -> np.ndarray:
        centred = x - sum(x) / len(x)
        variance = sum(centred**2) / len(x)
        return centred / math.sqrt(variance + 1e-5) * self.tensor(f"{name}.weight") + self.tensor(f"{name}.bias")


def relu(x: np.ndarray) -> np.ndarray:
    return np.where(x > 0, x, 0.0)


def softmax(logits: list[float]) -> list[float]:
    largest = max(logits)
    exponentials = [math.exp(logit - largest) for logit in logits]
    return [exponential / sum(exponentials) for exponential in exponentials]


def log_softmax(logits: np.ndarray) -> np.ndarray:
    largest = max(logits)
    return logits - largest - math.log(sum(math.exp(logit - largest) for logit in logits))


def head_of(x: np.ndarray, head: int, width: int) -> np.ndarray:
    return x[head * width : (head + 1) * width]


def sines(position: int, d: int) -> np.ndarray:
    """Sinusoidal position: sines of wavelengths 2π·10000^(2i/d), then cosines of the same."""
    angles = [position / 10000 ** (2 * i / d) for i in range((d + 1) // 2)]
    return np.array([math.sin(angle) for angle in angles] + [math.cos(angle) for angle in angles[: d // 2]])


def seen_by(t: int, memory: Vectors, causal: bool) -> range:
    return range(t + 1) if causal else range(len(memory))


# Subformer -----------------------------------------------------------------------------------------------------------


def attention(w: Weights, states: Vectors, memory: Vectors, heads: int, *, causal: bool) -> Vectors:
    """Multi-head attention of Vaswani et al. 2017."""
    width = len(states[0]) // heads
    keys = [w.linear("k_proj", m) for m in memory]
    values = [w.linear("v_proj", m) for m in memory]
    outputs = []
    for t, x in enumerate(states):
        query, mixed = w.linear("q_proj", x), []
        for head in range(heads):
            q, seen = head_of(query, head, width), seen_by(t, memory, causal)
            p = softmax([q @ head_of(keys[s], head, width) / math.sqrt(width) for s in seen])
            mixed.append(sum(p[s] * head_of(values[s], head, width) for s in seen))
        outputs.append(w.linear("out_proj", np.concatenate(mixed)))
    return outputs


def safe(w: Weights, states: Vectors, heads: int, *, causal: bool) -> Vectors:
    """Self-attentive factorized embeddings (§2.1), from scaled vectors with positions."""
    attended = attention(w["attn"], states, states, heads, causal=causal)
    outputs = []
    for x, a in zip(states, attended, strict=True):
        x = w.norm("attn_layer_norm", x + a)
        outputs.append(w.norm("final_layer_norm", w.linear("fc2", relu(w.linear("fc1", x)))))
    return outputs


def sandwich_cross_attention(w: Weights, states: Vectors, memory: Vectors, heads: int) -> Vectors:
    """Cross-attention of the sandwich at the encoder's width (Appendix A)."""
    queries = [w.norm("query_layer_norm", w.linear("query_projection", x)) for x in states]
    attended = attention(w["attention"], queries, memory, heads, causal=False)
    return [w.norm("output_layer_norm", w.linear("output_projection", a)) for a in attended]


def subformer_projection(w: Weights, name: str, x: np.ndarray, between: Callable = lambda x: x) -> np.ndarray:
    """One linear layer, or two (Table 1; Appendix A)."""
    if "first" not in w[name]:
        return w.linear(name, x)
    return w[name].linear("second", between(w[name].linear("first", x)))


def subformer_embed(w: Weights, config, ids: list[int], *, causal: bool) -> Vectors:
    """Ids to the input of the first layer: the table, scaled, with positions, and SAFE or a linear layer."""
    if config.embedding == "adaptive":
        vectors = [adaptive_embedding(w["embed_tokens"], config, token) for token in ids]
    else:
        vectors = [w.table("embed_tokens")[token] for token in ids]
    if config.embedding == "linear":
        vectors = [subformer_projection(w, "embed_projection", x) for x in vectors]
    d = len(vectors[0])
    scale = config.decoder_embedding_scale if causal else None
    scale = math.sqrt(d) if scale is None else scale
    states = [scale * x + sines(t, d) for t, x in enumerate(vectors)]
    if config.embedding == "safe":
        states = safe(w["safe"], states, config.embedding_attention_heads, causal=causal)
    return states


def subformer_stored_layer(sharing: str, depth: int, layers: int) -> int:
    """Number of the stored layer at a depth (§2.2): sandwich, all, ..."""
    if sharing == "sandwich":
        return 0 if depth == 0 else 2 if depth == layers - 1 else 1
    if sharing in ("all", "all_independent_ffn"):
        return 0
    if sharing == "all_except_last":
        return 1 if depth == layers - 1 else 0
    return {"every_2": depth // 2, "none": depth}[sharing]


def add_and_norm(states: Vectors, w: Weights, name: str, sublayer: Callable, pre_norm: bool) -> Vectors:
    """Residual connection and LayerNorm around a sublayer of the whole sentence."""
    if pre_norm:
        outputs = sublayer([w.norm(name, x) for x in states])
        return [x + y for x, y in zip(states, outputs, strict=True)]
    return [w.norm(name, x + y) for x, y in zip(states, sublayer(states), strict=True)]


def subformer_stack(
    w: Weights, config, stack: str, ids: list[int], memory: Vectors | None = None, *, pre_norm: bool = False
) -> Vectors:
    """All depths of a stack, §2 and Appendix A."""
    layers, own_heads = getattr(config, f"{stack}_layers"), getattr(config, f"{stack}_attention_heads")
    causal = stack == "decoder"
    states = subformer_embed(w, config, ids, causal=causal)
    for depth in range(layers):
        middle = config.sharing == "sandwich" and 0 < depth < layers - 1
        if config.sandwich_dim != config.d_model and depth in (1, layers - 1):
            width = w["up" if depth == 1 else "down"]
            states = [width.norm("layer_norm", width.linear("projection", x)) for x in states]
        layer = w[f"layers.{subformer_stored_layer(config.sharing, depth, layers)}"]
        own = w[f"depths.{depth}"]
        heads = config.sandwich_attention_heads if middle else own_heads
        ffn = own if config.sharing == "all_independent_ffn" else layer

        def self_attention(states, layer=layer, heads=heads):
            return attention(layer["self_attn"], states, states, heads, causal=causal)

        def cross_attention(states, layer=layer["encoder_attn"]):
            if "query_projection" in layer:
                return sandwich_cross_attention(layer, states, memory, config.decoder_attention_heads)
            return attention(layer, states, memory, config.decoder_attention_heads, causal=False)

        def feed_forward(states, ffn=ffn):
            return [ffn.linear("fc2", relu(ffn.linear("fc1", x))) for x in states]

        states = add_and_norm(states, own, "self_attn_layer_norm", self_attention, pre_norm)
        if memory is not None:
            states = add_and_norm(states, own, "encoder_attn_layer_norm", cross_attention, pre_norm)
        states = add_and_norm(states, own, "final_layer_norm", feed_forward, pre_norm)
    return [w.norm("layer_norm", x) for x in states] if pre_norm else states


def subformer_logits(w: Weights, config, source: list[int], target: list[int]) -> np.ndarray:
    """Logits (T, V) of the encoder-decoder, post-norm."""
    memory = subformer_stack(w["model.encoder"], config, "encoder", source)
    states = subformer_stack(w["model.decoder"], config, "decoder", target, memory)
    return np.array([output_logits(w, w["model.decoder"].table("embed_tokens"), x) for x in states])


def output_logits(w: Weights, table: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Logits of one position against the tied table, through the output's linear layer where there is one."""
    if "lm_head.projection" in w:
        x = subformer_projection(w, "lm_head.projection", x, relu)
    return np.array([row @ x for row in table])


def subformer_causal_logits(w: Weights, config, ids: list[int]) -> np.ndarray:
    """Logits (T, V), or log-probabilities where the softmax is adaptive, of the causal language model, pre-norm."""
    states = subformer_stack(w["decoder"], config, "decoder", ids, pre_norm=True)
    return causal_output(w, config, states)


def causal_output(w: Weights, config, states: Vectors) -> np.ndarray:
    if config.embedding == "adaptive":
        return np.array([adaptive_log_p(w["lm_head"], config, x) for x in states])
    return np.array([output_logits(w, w["decoder"].table("embed_tokens"), x) for x in states])


# Adaptive input and softmax ------------------------------------------------------------------------------------------


def band_of(cutoffs: list[int], token: int) -> tuple[int, int]:
    """Number of a token's band, and the token's place in it."""
    band = sum(token >= cutoff for cutoff in cutoffs)
    return band, token - [0, *cutoffs][band]


def adaptive_embedding(w: Weights, config, token: int) -> np.ndarray:
    """The token's row in its band's table, projected to d."""
    band, place = band_of(config.adaptive_cutoffs, token)
    return w.tensor(f"projections.{band}.weight") @ w.tensor(f"tables.{band}.weight")[place]


def adaptive_log_p(w: Weights, config, x: np.ndarray) -> np.ndarray:
    """log p of every token (Grave et al. 2017): of its band's class, plus of the token among those of its band."""
    bands = len(config.adaptive_cutoffs) + 1

    def logits(band: int) -> np.ndarray:
        return w.tensor(f"tables.{band}.weight") @ (w.tensor(f"projections.{band}.weight").T @ x)

    first = log_softmax(np.concatenate([logits(0), w.tensor("classes.weight") @ x]))
    tails = [log_softmax(logits(band)) for band in range(1, bands)]
    log_p = []
    for token in range(config.vocab_size):
        band, place = band_of(config.adaptive_cutoffs, token)
        class_log_p = first[config.adaptive_cutoffs[0] + band - 1]
        log_p.append(first[token] if band == 0 else class_log_p + tails[band - 1][place])
    return np.array(log_p)


# PartialFormer -------------------------------------------------------------------------------------------------------

GATES = {"relu": relu, "sigmoid": lambda x: 1 / (1 + np.exp(-x)), "tanh": np.tanh}
ACTIVATIONS = {"relu": relu, "silu": lambda x: x / (1 + np.exp(-x))}


def cut(x: np.ndarray, *widths: int) -> list[np.ndarray]:
    """What one matrix holds one above the other."""
    assert len(x) == sum(widths)
    ends = [sum(widths[: i + 1]) for i in range(len(widths))]
    return [x[end - width : end] for end, width in zip(ends, widths, strict=True)]


def scaled_heads(w: Weights, logits: list[float]) -> np.ndarray:
    """Head scaling (§3.4): the logits of one pair of positions in h heads → in H heads."""
    return w.linear("mix", relu(w.linear("expand", np.array(logits))))


def head_feed_forward(w: Weights, config, h: np.ndarray) -> np.ndarray:
    """PG-FFN without its gate (Eq. 4): one network for all heads."""
    activation = ACTIVATIONS[config.activation_function]
    if config.ffn_glu:
        inner = activation(w.linear("fc_gate", h)) * w.linear("fc1", h)
    else:
        inner = activation(w.linear("fc1", h))
    return w.linear("fc2", inner) + (h if config.ffn_residual else 0)


def partial_attention(
    w: Weights,
    config,
    states: Vectors,
    memory: Vectors,
    heads: int,
    *,
    is_cross: bool,
    causal: bool,
    has_ffn: bool,
    head_scaling: bool,
    global_logits: Callable[[int, int, int], float] = lambda head, t, s: 0.0,
) -> Vectors:
    """Attention whose heads have a feed-forward network and a gate. `global_logits`: A^G of (head, t, s)."""
    d_k = config.head_dim
    base = config.base_attention_heads if head_scaling else heads
    gate_width = heads * d_k if has_ffn else 0
    if is_cross:
        query_gate = [cut(w.linear("query_proj", x), base * d_k, gate_width) for x in states]
        queries, gates = zip(*query_gate, strict=True)
        keys, values = zip(*[cut(w.linear("memory_proj", m), base * d_k, heads * d_k) for m in memory], strict=True)
    else:
        parts = [cut(w.linear("in_proj", x), base * d_k, base * d_k, heads * d_k, gate_width) for x in states]
        queries, keys, values, gates = zip(*parts, strict=True)
    outputs = []
    for t in range(len(states)):
        seen, logits = seen_by(t, memory, causal), {}
        for s in seen:
            dots = [head_of(queries[t], h, d_k) @ head_of(keys[s], h, d_k) / math.sqrt(d_k) for h in range(base)]
            logits[s] = scaled_heads(w, dots) if head_scaling else dots
        result = []
        for head in range(heads):
            p = softmax([logits[s][head] + global_logits(head, t, s) for s in seen])
            h = sum(p[s] * head_of(values[s], head, d_k) for s in seen)
            if has_ffn:
                h = head_feed_forward(w, config, h) * GATES[config.gate_activation](head_of(gates[t], head, d_k))
            result.append(h)
        outputs.append(w.linear("out_proj", np.concatenate(result)))
    return outputs


def global_attention(w: Weights, config, embedded: Vectors, heads: int) -> Callable[[int, int, int], float]:
    """A^G of Eq. 6 over the embeddings; `relative`: with q·r of the clipped distance (Shaw et al. 2018, Eq. 4)."""
    d_k, furthest = config.head_dim, config.max_relative_position
    parts = [cut(w.linear("in_proj", w.norm("layer_norm", x)), heads * d_k, heads * d_k) for x in embedded]

    def logit(head: int, t: int, s: int) -> float:
        query, key = head_of(parts[t][0], head, d_k), head_of(parts[s][1], head, d_k)
        if config.global_attention == "relative":
            key = key + w.tensor("distances.weight")[max(-furthest, min(furthest, s - t)) + furthest]
        return query @ key / math.sqrt(d_k)

    return logit


def partialformer_stack(w: Weights, config, stack: str, ids: list[int], memory: Vectors | None = None) -> Vectors:
    """All depths of a stack, pre-norm, in contiguous groups that share a layer."""
    layers, groups = getattr(config, f"{stack}_layers"), getattr(config, f"{stack}_groups")
    heads, causal = getattr(config, f"{stack}_attention_heads"), stack == "decoder"
    partial = getattr(config, f"{stack}_style") == "partial"
    ffn_in = {"both": ("self", "cross"), "none": ()}.get(
        getattr(config, f"{stack}_ffn_in"), (getattr(config, f"{stack}_ffn_in"),)
    )
    d = config.d_model
    if config.embedding == "adaptive":
        vectors = [adaptive_embedding(w["embed_tokens"], config, token) for token in ids]
    else:
        vectors = [w.table("embed_tokens")[token] for token in ids]
    states = [math.sqrt(d) * x + sines(t, d) for t, x in enumerate(vectors)]
    extra = {}
    if partial and config.global_attention != "none":
        extra["global_logits"] = global_attention(w["global_attention"], config, states, heads)

    def attend(layer: Weights, states: Vectors, kind: str) -> Vectors:
        w = layer["self_attn" if kind == "self" else "encoder_attn"]
        seen, see_past = (states, causal) if kind == "self" else (memory, False)
        if not partial and not config.vanilla_head_scaling:
            return attention(w, states, seen, config.base_attention_heads, causal=see_past)
        return partial_attention(
            w,
            config,
            states,
            seen,
            heads,
            is_cross=kind == "cross",
            causal=see_past,
            has_ffn=partial and kind in ffn_in,
            head_scaling=config.head_scaling if partial else True,
            **(extra if kind == "self" else {}),
        )

    for depth in range(layers):
        layer = w[f"layers.{depth if groups is None else depth // (layers // groups)}"]
        for kind, name in (("self", "self_attn_layer_norm"), ("cross", "encoder_attn_layer_norm")):
            if kind == "self" or memory is not None:
                outputs = attend(layer, [layer.norm(name, x) for x in states], kind)
                states = [x + y for x, y in zip(states, outputs, strict=True)]
        if not partial:
            activation = ACTIVATIONS[config.activation_function]
            inner = [layer.norm("final_layer_norm", x) for x in states]
            outputs = [layer.linear("fc2", activation(layer.linear("fc1", x))) for x in inner]
            states = [x + y for x, y in zip(states, outputs, strict=True)]
    return [w.norm("layer_norm", x) for x in states]


def partialformer_logits(w: Weights, config, source: list[int], target: list[int]) -> np.ndarray:
    """Logits (T, V) of the encoder-decoder."""
    memory = partialformer_stack(w["model.encoder"], config, "encoder", source)
    states = partialformer_stack(w["model.decoder"], config, "decoder", target, memory)
    return np.array([output_logits(w, w["model.decoder"].table("embed_tokens"), x) for x in states])


def partialformer_causal_logits(w: Weights, config, ids: list[int]) -> np.ndarray:
    """Logits (T, V), or log-probabilities where the softmax is adaptive, of the causal language model."""
    return causal_output(w, config, partialformer_stack(w["decoder"], config, "decoder", ids))


# Batches -------------------------------------------------------------------------------------------------------------


SOURCES = [[5, 9, 12, 4, 17, 20, 2], [8, 21, 2], [13, 6, 6, 19, 2]]
TARGETS = [[2, 7, 15], [2, 11, 4, 22, 9, 16], [2, 10, 18, 10]]


def assert_real_positions_equal(actual: torch.Tensor, mask: torch.Tensor, expected: list) -> None:
    """Rows of a padded batch, without the padding, equal what each sentence gives alone: to 1e-10."""
    assert actual.dtype == torch.float64
    for row, alone in enumerate(expected):
        np.testing.assert_allclose(actual[row, mask[row].bool()].detach().numpy(), np.array(alone), rtol=0, atol=1e-10)


def check_logits(model, logits_of: Callable, side: str | None) -> None:
    """A padded batch through an encoder-decoder, against `logits_of(weights, config, source, target)`.

    Without a side, a sentence alone and without any mask: another path of fused attention.
    """
    if side is None:
        source, target = SOURCES[0], TARGETS[1]
        logits = model(torch.tensor([source]), decoder_input_ids=torch.tensor([target])).logits
        expected = logits_of(Weights.of(model), model.config, source, target)
        assert_real_positions_equal(logits, torch.ones(1, len(target)), [expected])
        return
    config, weights = model.config, Weights.of(model)
    source, source_mask = padded(SOURCES, side, config.pad_token_id)
    target, target_mask = padded(TARGETS, side, config.pad_token_id)
    logits = model(source, source_mask, target, target_mask).logits
    expected = [logits_of(weights, config, *pair) for pair in zip(SOURCES, TARGETS, strict=True)]
    assert np.std(expected[0]) > 0.1  # the comparison is of numbers that say something
    assert_real_positions_equal(logits, target_mask, expected)


def check_causal_logits(model, logits_of: Callable, side: str) -> None:
    """A padded batch through a causal language model, against `logits_of(weights, config, ids)`."""
    ids, mask = padded(SOURCES, side, model.config.pad_token_id)
    expected = [logits_of(Weights.of(model), model.config, sentence) for sentence in SOURCES]
    assert np.std(expected[0]) > 0.1
    assert_real_positions_equal(model(ids, mask).logits, mask, expected)


@torch.no_grad()
def multiplied_out(model, dense_config) -> torch.nn.Module:
    """The dense model whose matrices are the products of `model`'s factors."""
    dense = double_model(type(model), dense_config)
    tensors = {}
    state = model.state_dict()
    for name, tensor in state.items():
        stem, _, last = name.rpartition(".")
        if last == "basis":
            continue
        if f"{stem}.basis" in state and last == "weight":
            tensor = tensor @ state[f"{stem}.basis"]
        elif stem.endswith("lm_head.output.output") or (stem == "lm_head.output" and "lm_head.basis" in state):
            stem = stem.removesuffix(".output")
            tensor, name = tensor @ state[f"{stem}.basis"], f"{stem}.weight"
        elif stem.endswith(".u"):
            tensor, name = state[f"{stem[:-1]}v.weight"] @ tensor, f"{stem[:-2]}.weight"
        elif stem.endswith(".v"):
            if last == "weight":
                continue
            name = f"{stem[:-2]}.bias"
        tensors[name] = tensor
    dense.load_state_dict(tensors, strict=True)
    return dense
