"""Saving, loading, ties, resizing, precisions."""

import copy
import re

import accelerate
import pytest
import torch
import transformers
from models import strangers
from models.cases import (
    GENERATING,
    HEADS,
    PLAIN,
    SPECIAL,
    TRAINED,
    VARIANTS,
    every,
    has_head,
    make_config,
    make_model,
    model_class,
    padded,
    run_model,
    sentences,
)
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightformers_hf.matrices import product_of
from lightformers_hf.models import LightFormerModel
from lightformers_hf.models.layers import SinusoidalPositions
from lightformers_hf.models.low_rank import LowRankEmbedding

AUTO = {head: getattr(transformers, name) for head, name in strangers.AUTO.items()}
# Stored layers of encoder and decoder, of those whose depths share them.
STORED_LAYERS = {
    "lightformer-groups": (2, 2),
    "lightformer-private-norms": (2, 1),
    "subformer-sandwich": (3, 3),
    "subformer-same-width": (3, 3),
    "subformer-all": (1, 1),
    "subformer-independent-ffn": (1, 1),
    "subformer-except-last": (2, 2),
    "subformer-every-2": (2, 2),
    "subformer-none": (4, 3),
    "subformer-adaptive": (None, 3),
    "partialformer-relative": (2, 2),
    "partialformer-cross-ffn": (4, 1),
    "partialformer-vanilla-encoder": (2, 2),
}


@torch.no_grad()
def outputs(model) -> torch.Tensor:
    """What the model says about a fixed padded batch."""
    return run_model(model, *padded(sentences()))[0]


@every()
def test_round_trip(head, variant, tmp_path):
    model = make_model(head, variant)
    model.save_pretrained(tmp_path)
    loaded, report = AUTO[head].from_pretrained(tmp_path, output_loading_info=True)
    assert type(loaded) is type(model)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert torch.equal(outputs(loaded), outputs(model))
    state = model.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in loaded.state_dict().items())
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert len(stored) == len(list(model.parameters())) + ("final_logits_bias" in stored)
    assert sum(map(torch.Tensor.numel, stored.values())) == sum(p.numel() for p in model.parameters()) + (
        model.config.decoder_vocab_size if "final_logits_bias" in stored else 0
    )


@pytest.mark.parametrize("variant", STORED_LAYERS)
def test_a_shared_layer_is_stored_once(variant, tmp_path):
    make_model("CausalLM" if variant.endswith("adaptive") else "Model", variant).save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        names = list(file.keys())
    for stack, number in zip(("encoder", "decoder"), STORED_LAYERS[variant], strict=True):
        found = {match[1] for name in names if (match := re.match(rf"{stack}\.layers\.(\d+)\.", name))}
        assert len(found) == (number or 0), stack


def tied_names(model) -> set[frozenset[str]]:
    """Names of every tensor that the model has under several."""
    by_tensor = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        by_tensor.setdefault(id(parameter), set()).add(name)
    storages = [parameter.untyped_storage().data_ptr() for parameter in model.parameters()]
    assert len(set(storages)) == len(storages)
    return {frozenset(names) for names in by_tensor.values() if len(names) > 1}


@pytest.mark.parametrize("embedding_rank", [None, 7])
@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("variant", [*PLAIN, "subformer-all", "subformer-same-width"])
def test_what_is_tied(variant, embedding_rank, share, tie, tmp_path):
    """Exactly the ties that the two fields name, in a fresh, a loaded and a resized model."""
    fresh = make_model(
        "ConditionalGeneration",
        variant,
        embedding_rank=embedding_rank,
        share_encoder_decoder_embeddings=share,
        tie_word_embeddings=tie,
    )
    fresh.save_pretrained(tmp_path)
    loaded = type(fresh).from_pretrained(tmp_path)
    models = [fresh, loaded, copy.deepcopy(loaded)]
    if share:
        models[-1].resize_token_embeddings(50)
    head = "lm_head.output" if variant in ("subformer-sandwich", "subformer-same-width") else "lm_head"
    pairs = [("weight", f"{head}.weight")]
    if embedding_rank is not None:
        pairs = [("weight", f"{head}.output.weight"), ("basis", f"{head}.basis")]
    expected = set()
    for table, output in pairs:
        names = {f"model.decoder.embed_tokens.{table}"}
        names |= {f"model.shared.{table}", f"model.encoder.embed_tokens.{table}"} if share else set()
        names |= {output} if tie else set()
        expected |= {frozenset(names)} if len(names) > 1 else set()
    for model in models:
        assert tied_names(model) == expected
    assert torch.equal(outputs(loaded), outputs(fresh))


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize(
    "variant",
    [
        "lightformer-low-rank",
        "subformer-low-rank",
        "partialformer-low-rank",
        "lightformer-adaptive",
        "subformer-adaptive",
        "partialformer-adaptive",
    ],
)
def test_causal_ties(variant, tie, tmp_path):
    model = make_model("CausalLM", variant, tie_word_embeddings=tie)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    output = "lm_head.output" if variant == "subformer-low-rank" else "lm_head"
    pairs = {"weight": f"{output}.output.weight", "basis": f"{output}.basis"}
    if variant.endswith("adaptive"):
        parts = [f"{part}.{band}.weight" for part in ("tables", "projections") for band in range(3)]
        pairs = {part: f"lm_head.{part}" for part in parts}
    expected = {frozenset({f"decoder.embed_tokens.{table}", name}) for table, name in pairs.items()}
    for each in (model, loaded):
        assert tied_names(each) == (expected if tie else set())
    assert torch.equal(outputs(loaded), outputs(model))


@pytest.mark.parametrize(
    ("variant", "matrix"),
    [
        ("lightformer-low-rank", "model.encoder.layers.1.fc1.v.weight"),
        ("subformer-low-rank", "model.encoder.layers.1.fc1.v.weight"),
        ("partialformer-low-rank", "model.encoder.layers.1.self_attn.fc1.v.weight"),
    ],
)
def test_loading_draws_only_what_is_missing(variant, matrix, tmp_path):
    """Half of a low-rank table is missing: the other half stays, its padding row, which is not zero here, included."""
    model = make_model("ConditionalGeneration", variant)
    assert model.model.shared.weight[1].abs().min() > 0
    model.save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    rank = state[matrix].shape[1]
    del state["model.shared.basis"], state[matrix]
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    loaded, report = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert {"model.shared.basis", matrix} <= set(report["missing_keys"])
    now = loaded.state_dict()
    assert all(torch.equal(now[name], tensor) for name, tensor in state.items())
    spread = (0.02 * rank**-0.5) ** 0.5  # of each of the two factors
    assert now[matrix].std().item() == pytest.approx(spread, rel=0.35)


@pytest.mark.parametrize("variant", [name for name in SPECIAL if not name.startswith("lightformer")])
def test_loading_draws_a_missing_matrix_as_a_fresh_model_does(variant, tmp_path):
    """And leaves all others: matrices that hold several side by side, and adaptive tables, are drawn in parts."""
    model = make_model("CausalLM", variant)
    model.save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    for missing in ("decoder.layers.0.self_attn.out_proj", "decoder.layers.0.self_attn.out_proj.v"):
        state.pop(f"{missing}.weight", None)
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    now = type(model).from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(now[name], tensor) for name, tensor in state.items())
    assert now.keys() > state.keys()


@pytest.mark.parametrize("kind", ["sinusoidal", "sinusoidal_half"])
def test_sines_are_filled_when_nothing_holds_them(kind, tmp_path):
    model = make_model("Model", "lightformer", position_embedding_type=kind, position_offset=2)
    model.save_pretrained(tmp_path)
    table = model.encoder.embed_positions.table
    assert table.shape == (50, 16)
    assert torch.count_nonzero(table[1:]) > 700
    assert torch.equal(LightFormerModel.from_pretrained(tmp_path).encoder.embed_positions.table, table)
    with torch.device("meta"):
        empty = LightFormerModel(model.config)
    assert empty.encoder.embed_positions.table.is_meta
    empty.to_empty(device="cpu")
    empty.encoder.embed_positions.reset()
    assert torch.equal(empty.encoder.embed_positions.table, table)


class Operations(TorchDispatchMode):
    """Notes the names of what is computed inside."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function.__name__)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("spacing", ["d", "half"])
@pytest.mark.parametrize("width", [6, 7])
def test_no_sine_is_computed_without_storage(spacing, width):
    with Operations() as computed, torch.device("meta"):
        empty = SinusoidalPositions(5, width, spacing, offset=2).table
    assert {name.partition(".")[0] for name in computed.names} == {"empty"}
    filled = SinusoidalPositions(5, width, spacing, offset=2).table
    assert (empty.device.type, empty.shape, empty.dtype) == ("meta", filled.shape, filled.dtype)


@every(TRAINED, SPECIAL)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.no_grad()
def test_half_precision(head, variant, dtype, tmp_path):
    """Also behind padding, where rows of the decoder's mask see nothing."""
    model = make_model(head, variant, spread=0.2)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, dtype=dtype).eval()
    wide = (
        {torch.float32}
        if dtype == torch.float16 and getattr(loaded.config, "normalization", None) == "rms_norm"
        else {dtype}
    )
    for name, parameter in loaded.named_parameters():
        assert parameter.dtype in (wide if ".fc2." in name else {dtype}), name
    ids, mask = padded(sentences(), "left")
    expected, result = (run_model(each, ids, mask, ids, mask)[0] for each in (model, loaded))
    assert result.dtype == dtype
    assert result.isfinite().all()
    if head != "SequenceClassification":
        expected, result = expected[mask == 1], result[mask == 1]
    error = (result.float() - expected).std() / expected.std()
    assert error < (0.05 if dtype == torch.bfloat16 else 0.01)


@pytest.mark.parametrize("device_map", ["auto", "cpu", {"": "cpu"}])
@pytest.mark.parametrize("variant", ["lightformer-private-norms", "subformer-sandwich", "partialformer"])
def test_device_map(variant, device_map, tmp_path):
    model = make_model("ConditionalGeneration", variant)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, device_map=device_map)
    assert torch.equal(outputs(loaded), outputs(model))
    assert tied_names(loaded) == tied_names(model) != set()


SPLIT = ["lightformer", "lightformer-private-norms", "subformer-sandwich", "partialformer"]


@pytest.mark.parametrize("variant", SPLIT)
@torch.no_grad()
def test_parts_on_disk(variant, tmp_path):
    """A map may put every part of a decoder elsewhere."""
    model = make_model("ConditionalGeneration", variant)
    model.save_pretrained(tmp_path)
    split = dict.fromkeys(["lm_head", "final_logits_bias"], "cpu")
    split |= {f"model.{name}": "cpu" for name, _ in model.model.named_children() if name != "decoder"}
    for name, _ in model.model.decoder.named_children():
        split[f"model.decoder.{name}"] = "cpu" if name == "embed_tokens" else "disk"
    loaded = type(model).from_pretrained(tmp_path, device_map=split, offload_folder=tmp_path / "disk")
    assert {str(parameter.device) for parameter in loaded.parameters()} == {"cpu", "meta"}
    torch.testing.assert_close(outputs(loaded), outputs(model))


@pytest.mark.parametrize("variant", ["lightformer-private-norms", "subformer-sandwich"])
def test_depths_are_on_the_device_of_their_layers(variant):
    """As accelerate plans it for devices too small for the whole."""
    model = make_model("ConditionalGeneration", variant)
    assert {"LightFormerDecoder", "SubformerDecoder"} & set(model._no_split_modules)
    decoder = sum(parameter.nbytes for parameter in model.model.decoder.parameters())
    total = sum(parameter.nbytes for parameter in model.parameters())
    memory = {"cpu": total - decoder // 2}  # the rest on disk
    split = accelerate.infer_auto_device_map(model, memory, no_split_module_classes=list(model._no_split_modules))
    assert not [name for name in split if re.search(r"coder\.(layers|depths)", name)]


@every(GENERATING, SPECIAL)
@torch.no_grad()
def test_maps_for_any_memory(head, variant, tmp_path):
    """`device_map="auto"` with some of the memory and nearly all; the rest lies on disk."""
    model = make_model(head, variant)
    model.save_pretrained(tmp_path)
    size, places = sum(parameter.nbytes for parameter in model.parameters()), set()
    for share in (0.4, 0.95):
        memory = {"max_memory": {"cpu": int(share * size)}, "offload_folder": tmp_path / "disk"}
        loaded = type(model).from_pretrained(tmp_path, device_map="auto", **memory)
        torch.testing.assert_close(outputs(loaded), outputs(model))
        places.update(map(str, loaded.hf_device_map.values()))
    assert "disk" in places


@every(GENERATING, SPECIAL)
@torch.no_grad()
def test_weights_that_are_loaded_for_each_call(head, variant):
    """Offloading hooks give a module its weights while it runs: nothing may read the weights of another."""
    model = make_model(head, variant)
    expected = outputs(model)
    assert torch.equal(outputs(accelerate.cpu_offload(model, execution_device="cpu")), expected)


SIZES = [((47,), 47), ((34,), 34), ((None, 32), 64), ((41, 16), 48)]


@every(HEADS, [*PLAIN, "subformer-all"])
@pytest.mark.parametrize("embedding_rank", [None, 7])
def test_resize(head, variant, embedding_rank, tmp_path):
    """Old tokens keep their meaning, the table keeps its form, and the result survives saving."""
    for arguments, size in SIZES:
        model = make_model(head, variant, embedding_rank=embedding_rank)
        before = outputs(model)
        table = model.resize_token_embeddings(*arguments)
        assert table is model.get_input_embeddings()
        assert type(table) is (nn.Embedding if embedding_rank is None else LowRankEmbedding)
        assert table.weight.shape == (size, embedding_rank or model.config.embedding_width)
        assert model.config.vocab_size == model.config.decoder_vocab_size == size
        after, kept = outputs(model), min(size, 40)
        if hasattr(model, "lm_head"):
            assert after.shape[-1] == size
            before, shared = before[..., :kept], after[..., :kept]
        else:
            shared = after
        torch.testing.assert_close(shared, before)
        model.save_pretrained(tmp_path)
        assert torch.equal(outputs(type(model).from_pretrained(tmp_path)), after)


def test_resize_without_a_size_changes_nothing():
    model = make_model("ConditionalGeneration", "lightformer")
    assert model.resize_token_embeddings() is model.get_input_embeddings()
    assert model.config.vocab_size == 40


@every(
    ["Model", "ConditionalGeneration"],
    ["lightformer-two-vocabularies", "subformer-two-vocabularies", "partialformer-self-ffn"],
)
def test_two_vocabularies_are_not_resized(head, variant):
    with pytest.raises(ValueError, match="separate source and target vocabularies"):
        make_model(head, variant).resize_token_embeddings(50)


@every(["CausalLM"], [variant for variant in VARIANTS if variant.endswith("-adaptive")])
def test_an_adaptive_vocabulary_is_not_resized(head, variant):
    model = make_model(head, variant)
    with pytest.raises(ValueError, match=r"adaptive embedding .* can't be resized"):
        model.resize_token_embeddings(50)
    assert model.resize_token_embeddings() is model.get_input_embeddings()


@pytest.mark.parametrize("variant", [*PLAIN, "subformer-adaptive"])
def test_heads_leave_the_callers_configuration_alone(variant):
    config = make_config(variant)
    before = config.to_dict()
    for head in filter(lambda head: has_head(head, variant), HEADS):
        model_class(head, VARIANTS[variant][0])(config)
    assert config.to_dict() == before


@pytest.mark.parametrize("rank", [None, 5])
@pytest.mark.parametrize("vocabulary", [{}, {"vocab_size": 50, "decoder_vocab_size": 50}])
def test_a_classifier_as_another_model_has_a_fresh_table_where_its_own_does_not_fit(rank, vocabulary, tmp_path):
    """Tied tables of another size than stored ones were left without values."""
    wide = {} if rank else {"embedding_dim": 10}
    classifier = make_model("SequenceClassification", "lightformer", embedding_rank=rank, **wide)
    classifier.save_pretrained(tmp_path)
    changes = {**vocabulary, "is_encoder_decoder": True, "embedding_dim": None}
    model = transformers.AutoModel.from_pretrained(tmp_path, ignore_mismatched_sizes=True, **changes)
    assert not any(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])
    table = model.get_input_embeddings()
    assert len(tied_names(model)) == (2 if rank else 1)
    if rank and not vocabulary:
        assert torch.equal(product_of(table), product_of(classifier.get_input_embeddings()))
    elif not rank:
        assert table(torch.arange(4, 40)).std().item() == pytest.approx(model.config.init_std, rel=0.3)
    assert torch.equal(model.encoder.layers[0].fc1.weight, classifier.encoder.layers[0].fc1.weight)
    assert outputs(model).isfinite().all()


@pytest.mark.parametrize("head", ["Model", "ConditionalGeneration"])
@pytest.mark.parametrize("fields", [{}, {"share_encoder_decoder_embeddings": False}, {"embedding_rank": None}])
def test_a_classifier_has_the_encoder_of_a_pair(head, fields, tmp_path):
    pair = make_model(head, "lightformer-groups", **{"embedding_rank": 5} | fields)
    pair.save_pretrained(tmp_path / "pair")
    auto = AUTO["SequenceClassification"]
    classifier, report = auto.from_pretrained(tmp_path / "pair", num_labels=3, output_loading_info=True)
    assert report["missing_keys"] == {"classifier.weight", "classifier.bias"}
    ids, mask = padded(sentences())
    states = [model.get_encoder()(ids, mask).last_hidden_state for model in (pair, classifier)]
    torch.testing.assert_close(*states)
    classifier.save_pretrained(tmp_path / "classifier")
    stored = load_file(tmp_path / "classifier/model.safetensors")
    assert stored.keys() <= classifier.state_dict().keys()
    again = auto.from_pretrained(tmp_path / "classifier")
    assert torch.equal(outputs(again), outputs(classifier))


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("lightformer", {"encoder_layers": 18, "encoder_groups": 6, "decoder_layers": 3}),
        ("partialformer", {"encoder_style": "vanilla", "vanilla_head_scaling": True}),
    ],
)
def test_what_only_an_encoder_has_does_not_hinder_a_causal_model(family, fields, tmp_path):
    model = make_model("CausalLM", family, **fields)
    model.save_pretrained(tmp_path)
    assert torch.equal(outputs(AUTO["CausalLM"].from_pretrained(tmp_path)), outputs(model))
