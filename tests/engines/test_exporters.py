"""transformers' own exporter to ONNX takes the models of this package as they are."""

import numpy as np
import pytest
import torch
from models.cases import make_model

ARCHITECTURES = ["lightformer-low-rank", "subformer-sandwich", "partialformer"]


@pytest.mark.parametrize("variant", ARCHITECTURES)
def test_encoder_and_decoder_have_the_logits_of_the_model(variant, tmp_path):
    exporters = pytest.importorskip("transformers.exporters", reason="transformers has no exporters")
    pytest.importorskip("onnxscript", reason="transformers' exporter to ONNX needs onnxscript")
    import onnxruntime

    model = make_model("ConditionalGeneration", variant).eval()
    ids = torch.tensor([[9, 17, 5, 22, 2]])
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "decoder_input_ids": ids[:, :3]}
    exporters.OnnxExporter().export(model, inputs, exporters.OnnxConfig()).save_pretrained(tmp_path)
    (file,) = tmp_path.rglob("*.onnx")
    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    names = {value.name for value in session.get_inputs()}
    outputs = [value.name for value in session.get_outputs()]
    found = session.run(outputs, {name: value.numpy() for name, value in inputs.items() if name in names})
    with torch.no_grad():
        expected = model(**inputs).logits.numpy()
    logits = found[outputs.index("logits")]
    np.testing.assert_allclose(logits, expected, atol=1e-4)
