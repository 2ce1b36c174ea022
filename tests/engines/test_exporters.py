"""transformers' own exporter to ONNX takes the models of this package as they are."""

import ctranslate2
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


def test_transformers_knows_ctranslate2(tmp_path):
    """The program gives the tokens of `generate()`, also after it was saved and loaded."""
    exporters = pytest.importorskip("transformers.exporters", reason="transformers has no exporters")
    if not hasattr(exporters, "register_backend"):
        pytest.skip("transformers has no registry of exporters")
    model = make_model("ConditionalGeneration", "lightformer-low-rank").eval()
    options = {"export_format": "ctranslate2", "quantization": "float32"}
    exported = exporters.AutoHfExporter.from_config(options).export(model, {}, options)
    exported.save_pretrained(tmp_path)
    (file,) = tmp_path.glob("*.ctranslate2.zip")
    program = exporters.ExportedModel.from_pretrained(tmp_path).program
    assert program == exported.program
    assert file.is_file()
    ids = [9, 17, 5, 22, 2]
    translator = ctranslate2.Translator("model", device="cpu", files=program)
    (result,) = translator.translate_batch([[str(token) for token in ids]], beam_size=1, max_decoding_length=8)
    expected = model.generate(torch.tensor([ids]), num_beams=1, max_new_tokens=8)[0, 1:].tolist()
    found = [int(token) for token in result.hypotheses[0]]
    assert found == expected[: len(found)]
    assert len(found) >= 3
    with pytest.raises(ValueError, match="quantization is 'int3'; ctranslate2 has float32, int8"):
        exporters.AutoHfExporter.from_config(options).export(model, {}, options | {"quantization": "int3"})
