"""A stranger without this package loads a checkpoint from the code that lies beside its weights."""

import pytest
import torch
from models.cases import VARIANTS, every, make_model
from models.strangers import AUTO, BLOCKER, inputs_for, run_apart

STRANGER = (
    BLOCKER
    + """
torch.set_grad_enabled(False)
for folder, auto_name in zip(sys.argv[1::2], sys.argv[2::2]):
    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=True)
    model = getattr(transformers, auto_name).from_pretrained(folder, trust_remote_code=True).eval()
    assert "lightformers_hf" not in sys.modules
    assert type(model).__module__.startswith("transformers_modules")
    inputs = torch.load(f"{folder}/inputs.pt", weights_only=True)
    result = {"outputs": model(**inputs)[0].detach()}
    if model.can_generate():
        inputs.pop("decoder_input_ids", None)
        result["tokens"] = model.generate(**inputs, max_new_tokens=8, num_beams=2, no_repeat_ngram_size=1)
    torch.save(result, f"{folder}/result.pt")
    model.save_pretrained(f"{folder}/again")
"""
)
# Of every family one with everything that its code can do, as far as one model can have it.
CASES = every(
    variants=[
        "lightformer-private-norms",
        "lightformer-adaptive",
        "subformer-sandwich",
        "subformer-adaptive",
        "partialformer-relative",
        "partialformer-vanilla-decoder",
        "partialformer-adaptive",
    ]
)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A checkpoint of every head of every family, `variant-head`; a stranger has been to all of them."""
    root, arguments = tmp_path_factory.mktemp("checkpoints"), []
    for head, variant in CASES.args[1]:
        model, folder = make_model(head, variant), root / f"{variant}-{head}"
        model.save_pretrained(folder)
        torch.save(inputs_for(model), folder / "inputs.pt")
        arguments += [str(folder), AUTO[head]]
    run_apart(STRANGER, *arguments, folder=root, HF_HUB_OFFLINE="1")
    return root


@CASES
@torch.no_grad()
def test_loading_without_the_package(head, variant, root):
    folder, model = root / f"{variant}-{head}", make_model(head, variant)
    inputs, result = inputs_for(model), torch.load(folder / "result.pt", weights_only=True)
    torch.testing.assert_close(result["outputs"], model(**inputs)[0])
    if model.can_generate():
        inputs.pop("decoder_input_ids", None)
        tokens = model.generate(**inputs, max_new_tokens=8, num_beams=2, no_repeat_ngram_size=1)
        assert torch.equal(result["tokens"], tokens)
    code = {path.name for path in (folder / "again").glob("*.py")}
    assert code == {path.name for path in folder.glob("*.py")}
    family = VARIANTS[variant][0]
    assert {f"modeling_{family}.py", f"configuration_{family}.py", "low_rank.py"} < code
