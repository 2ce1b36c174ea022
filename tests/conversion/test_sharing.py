"""Layers of a group: aligned before they are merged, and merged where their inputs are."""

from itertools import permutations

import pytest
import torch
from conversion.metrics import logits
from tiny import marian_tokens, sizes
from transformers import AutoModelForSeq2SeqLM, MarianConfig, MarianMTModel

from lightformers_hf import LightFormerConfig, LightFormerForConditionalGeneration, StudyOptions, convert, plan
from lightformers_hf.conversion.sharing import Bases, align_bases, change_basis, merge_linear
from lightformers_hf.matrices import Weight

HEADS, WIDTH, INNER, NEURONS = 3, 10, 12, 7
SHAPES = {
    **{f"{part}.{name}_proj": (WIDTH, INNER) for part in ("self_attn", "encoder_attn") for name in "qkv"},
    **{f"{part}.out_proj": (INNER, WIDTH) for part in ("self_attn", "encoder_attn")},
    "fc1": (WIDTH, NEURONS),
    "fc2": (NEURONS, WIDTH),
}


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def random_layer(seed):
    return {
        name: Weight(random(m, n, seed=100 * seed + index), None, random(n, seed=100 * seed + 50 + index))
        for index, (name, (m, n)) in enumerate(SHAPES.items())
    }


def random_moments(seed):
    samples = {name: random(40, m, seed=seed + index) for index, (name, (m, _)) in enumerate(SHAPES.items())}
    return {name: x.T @ x / 40 for name, x in samples.items()}


def aligned(layers, heads, moments=None):
    """The layers in the bases that are found for them."""
    bases = align_bases(layers, heads, moments)
    return [
        {name: own.get(name, Bases()).of(linear) for name, linear in layer.items()}
        for layer, own in zip(layers, bases, strict=True)
    ]


def rotation(size, seed):
    return torch.linalg.qr(random(size, size, seed=seed))[0]


@pytest.mark.parametrize("weighted", [False, True])
@torch.no_grad()
def test_an_aligned_layer_computes_what_it_did(weighted):
    sizes = {f"{stack}_{name}": n for stack in ("encoder", "decoder") for name, n in (("layers", 3), ("ffn_dim", 7))}
    heads = {"encoder_attention_heads": 3, "decoder_attention_heads": 3, "d_model": WIDTH, "head_dim": 4}
    torch.manual_seed(0)
    model = LightFormerForConditionalGeneration(LightFormerConfig(vocab_size=20, dropout=0.0, **heads, **sizes))
    model = model.double().eval()
    for parameter in model.parameters():
        parameter += 0.3 * torch.randn_like(parameter)
    batch = {"input_ids": torch.randint(3, 20, (2, 6)), "decoder_input_ids": torch.randint(3, 20, (2, 5))}
    before = model(**batch).logits
    for stack in (model.get_encoder(), model.get_decoder()):
        parts = [
            {
                name: layer.get_submodule(name)
                for name in SHAPES
                if stack is not model.get_encoder() or "enc" not in name
            }
            for layer in stack.layers
        ]
        layers = [{name: Weight(part.weight.T, None, part.bias) for name, part in layer.items()} for layer in parts]
        moments = [random_moments(seed) for seed in range(3)] if weighted else None
        for layer, old, new in zip(parts, layers, aligned(layers, 3, moments), strict=True):
            for name, module in layer.items():
                changed = not torch.equal(new[name].left, old[name].left)
                assert changed == (layer is not parts[0]), name
                module.weight.copy_(new[name].left.T)
                module.bias.copy_(new[name].bias)
    torch.testing.assert_close(model(**batch).logits, before, rtol=1e-9, atol=1e-10)


def test_a_layer_in_other_order_and_bases_becomes_the_first_again():
    first = random_layer(1)
    heads, neurons = torch.tensor([2, 0, 1]), torch.randperm(NEURONS, generator=torch.Generator().manual_seed(3))
    other = {}
    for part in ("self_attn", "encoder_attn"):
        for seed, names in enumerate((("q", "k"), ("v", "out"))):
            basis = torch.zeros(HEADS, 4, HEADS, 4, dtype=torch.float64)
            for new, old in enumerate(heads):
                basis[old, :, new] = rotation(4, seed=10 * seed + new)
            basis = basis.reshape(INNER, INNER)
            for name in names:
                turn = Bases(inputs=basis) if name == "out" else Bases(outputs=basis)
                other[f"{part}.{name}_proj"] = turn.of(first[f"{part}.{name}_proj"])
    other |= {"fc1": Bases(outputs=neurons).of(first["fc1"]), "fc2": Bases(inputs=neurons).of(first["fc2"])}
    for moments in (None, [random_moments(0), random_moments(5)]):
        other_now = aligned([first, other], HEADS, moments)[1]
        for name, own in first.items():
            torch.testing.assert_close(other_now[name].left, own.left)
            torch.testing.assert_close(other_now[name].bias, own.bias)


@pytest.mark.parametrize("weighted", [False, True])
def test_the_assignment_is_the_nearest_of_all(weighted):
    layers = [random_layer(1), random_layer(2)]
    moments = [random_moments(0), random_moments(9)] if weighted else None
    turns = align_bases(layers, HEADS, moments)[1]

    def root(name):
        """R with RᵀR = E[(x, 1)ᵀ(x, 1)], inputs and bias taken as uncorrelated."""
        size = SHAPES[name][0]
        second = sum(m[name] for m in moments) / 2 if weighted else torch.eye(size).double()
        return torch.linalg.cholesky(torch.block_diag(second, torch.ones(1, 1).double())).T

    def rows(layer, name):
        return torch.cat([layer[name].left, layer[name].bias[None]])

    def head_maps(layer, part):
        """What each head does: its scores' form, and its values' map, in the metric of the inputs."""
        for head in range(HEADS):
            own = slice(4 * head, 4 * head + 4)
            query, key, value = (rows(layer, f"{part}.{name}_proj")[:, own] for name in "qkv")
            key = key.clone()
            key[-1] = 0
            out = layer[f"{part}.out_proj"].left[own]
            yield (
                root(f"{part}.q_proj") @ query @ key.T @ root(f"{part}.k_proj").T,
                root(f"{part}.v_proj") @ value @ out,
            )

    def neuron_maps(layer):
        ins = root("fc1") @ rows(layer, "fc1")
        yield from ((ins[:, i], layer["fc2"].left[i]) for i in range(NEURONS))

    def best(maps):
        sizes = [[sum(m[k].square().sum() for m in layer) for k in (0, 1)] for layer in maps]

        def distance(order):
            scale = [(sizes[0][k] * sizes[1][k]).sqrt() for k in (0, 1)]
            pairs = [(maps[0][new], maps[1][old]) for new, old in enumerate(order)]
            return sum((a[k] - b[k]).square().sum() / scale[k] for a, b in pairs for k in (0, 1))

        return min(permutations(range(len(maps[0]))), key=distance)

    assert turns["fc1"].outputs.tolist() == list(best([list(neuron_maps(layer)) for layer in layers]))
    for part in ("self_attn", "encoder_attn"):
        order = best([list(head_maps(layer, part)) for layer in layers])
        for name in ("q", "v"):
            blocks = turns[f"{part}.{name}_proj"].outputs.reshape(HEADS, 4, HEADS, 4)
            used = blocks.abs().amax((1, 3)) > 0
            assert used.int().argmax(0).tolist() == list(order)
            assert (used.sum(0) == 1).all()


def test_rotations_only_bring_matrices_nearer():
    layers = [random_layer(1), random_layer(2)]
    turns = align_bases(layers, HEADS)[1]
    basis = turns["self_attn.q_proj"].outputs
    names = ("self_attn.q_proj", "self_attn.k_proj")
    sides = [torch.cat([layer[names[0]].left, layer[names[0]].bias[None], layer[names[1]].left]) for layer in layers]
    sizes = [[layer[name].left.square().sum() for name in names] for layer in layers]
    sizes = [[sizes[k][0] + layers[k][names[0]].bias.square().sum(), sizes[k][1]] for k in (0, 1)]
    weight = [(sizes[0][k] * sizes[1][k]).rsqrt().expand(n) for k, n in ((0, WIDTH + 1), (1, WIDTH))]

    def distance(turn):
        return (torch.cat(weight)[:, None] * (sides[0] - sides[1] @ turn).square()).sum()

    nearest = distance(basis)
    for seed in range(20):  # any other rotation inside the heads, small or large
        for size in (1e-3, 1.0):
            skew = size * random(HEADS, 4, 4, seed=seed)
            assert distance(basis @ torch.block_diag(*torch.linalg.matrix_exp(skew - skew.mT))) >= nearest


def test_the_weighted_mean_is_a_regression():
    inputs = [random(30, 6, seed=1), 3 * random(50, 6, seed=2) + 1]
    layers = [Weight(random(6, 4, seed=seed), None, random(4, seed=seed + 1)) for seed in (3, 5)]
    scale = [len(x) ** -0.5 for x in inputs]
    wanted = torch.cat([s * (x @ one.left + one.bias) for s, x, one in zip(scale, inputs, layers, strict=True)])
    shown = torch.cat([s * torch.cat([x, torch.ones(len(x), 1)], 1) for s, x in zip(scale, inputs, strict=True)])
    expected = torch.linalg.lstsq(shown, wanted).solution
    merged = merge_linear(layers, [(x.T @ x / len(x), x.mean(0)) for x in inputs])
    torch.testing.assert_close(merged.left, expected[:-1], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(merged.bias, expected[-1], rtol=1e-4, atol=1e-4)
    plain = merge_linear(layers)
    torch.testing.assert_close(plain.left, (layers[0].left + layers[1].left) / 2)
    torch.testing.assert_close(plain.bias, (layers[0].bias + layers[1].bias) / 2)
    assert (
        merge_linear([Weight(layer.left.float()) for layer in layers], [(torch.eye(6), torch.zeros(6))] * 2).left.dtype
        == torch.float32
    )


def test_moments_turn_with_their_layer():
    x, basis, order = random(20, 6), rotation(6, 1), torch.tensor([3, 1, 0, 5, 4, 2])
    torch.testing.assert_close(change_basis(x.T @ x, basis, basis), (x @ basis).T @ (x @ basis))
    torch.testing.assert_close(change_basis(x.T @ x, order, order), x[:, order].T @ x[:, order])
    torch.testing.assert_close(change_basis(x.mean(0), basis), (x @ basis).mean(0))


COUNT, HEAD_WIDTH = 2, 8


def make_teacher(folder):
    fields = sizes(COUNT * HEAD_WIDTH, layers=2, heads=COUNT, ffn=24, decoder_ffn_dim=20, max_position_embeddings=64)
    config = MarianConfig(**fields, **marian_tokens(40), bos_token_id=None)
    torch.manual_seed(0)
    model = MarianMTModel(config).eval()
    with torch.no_grad():
        for parameter in filter(lambda parameter: parameter.requires_grad, model.parameters()):  # not the sines
            parameter.add_(torch.randn(parameter.shape), alpha=0.3)
    return model, folder


@torch.no_grad()
def rearrange(layer):
    """Other heads first, other bases inside them, other neurons first: the same function."""
    for name in ("self_attn", "encoder_attn"):
        if not hasattr(layer, name):
            continue
        attention = getattr(layer, name)
        order = torch.cat([torch.arange(HEAD_WIDTH, 2 * HEAD_WIDTH), torch.arange(HEAD_WIDTH)])
        keys, values = (torch.block_diag(*(torch.linalg.qr(torch.randn(8, 8))[0] for _ in range(2))) for _ in range(2))
        for part, basis in (("q_proj", keys), ("k_proj", keys), ("v_proj", values)):
            linear = getattr(attention, part)
            linear.weight.copy_((basis @ linear.weight)[order])
            linear.bias.copy_((basis @ linear.bias)[order])
        attention.out_proj.weight.copy_((attention.out_proj.weight @ values.T)[:, order])
    order = torch.randperm(layer.fc1.out_features)
    layer.fc1.weight.copy_(layer.fc1.weight[order])
    layer.fc1.bias.copy_(layer.fc1.bias[order])
    layer.fc2.weight.copy_(layer.fc2.weight[:, order])


GROUPS = {"encoder_groups": 1, "decoder_groups": 1, "progress": False}


@pytest.mark.parametrize("calibrated", [True, False])
def test_layers_that_compute_the_same_become_one_without_loss(tmp_path, calibrated):
    teacher, folder = make_teacher(tmp_path / "teacher")
    for stack in (teacher.model.encoder, teacher.model.decoder):
        stack.layers[1].load_state_dict(stack.layers[0].state_dict())
        rearrange(stack.layers[1])
    teacher.save_pretrained(folder)
    expected = logits(teacher)
    # A rank that is no compression makes the conversion calibrate all the same.
    pattern = {"pattern": {"shared": 16}} if calibrated else {}
    convert(folder, tmp_path / "light", **GROUPS, **pattern)
    light = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "light").eval()
    assert light.config.encoder_groups == light.config.decoder_groups == 1
    torch.testing.assert_close(logits(light), expected, atol=2e-4, rtol=1e-3)
    convert(folder, tmp_path / "mean", **GROUPS, method="paper")
    mean = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "mean").eval()
    assert (logits(mean) - expected).abs().max() > 0.5


def test_layers_of_different_widths_are_not_merged(tmp_path):
    teacher, folder = make_teacher(tmp_path / "teacher")
    teacher.save_pretrained(folder)
    convert(folder, tmp_path / "narrow", params="6k", method="narrow", progress=False)
    narrow = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "narrow")
    assert narrow.config.head_dim_pattern or narrow.config.ffn_dim_pattern
    with pytest.raises(ValueError, match=r"encoder_groups is 1, but layers of narrow differ in shape"):
        convert(tmp_path / "narrow", tmp_path / "light", encoder_groups=1, progress=False)


@pytest.mark.parametrize(("own", "asked"), [(True, False), (False, True)])
def test_norms_that_are_shared_otherwise_are_refused_before_anything_takes_long(tmp_path, own, asked):
    teacher, folder = make_teacher(tmp_path / "teacher")
    teacher.save_pretrained(folder)
    study = StudyOptions(share_layer_norms=own)
    convert(folder, tmp_path / "shared", encoder_groups=1, study=study, method="paper", progress=False)
    again = StudyOptions(share_layer_norms=asked)
    with pytest.raises(ValueError, match=rf"share_layer_norms={asked}, but layers of shared are shared with .*{own}"):
        plan(tmp_path / "shared", decoder_groups=1, study=again, method="paper", progress=False)
