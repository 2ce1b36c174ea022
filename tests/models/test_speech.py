"""A LightFormer for speech of full rank computes what Whisper computes, and generates what it generates."""

import numpy as np
import pytest
import torch
from models.strangers import BLOCKER, run_apart
from speech import RATE, SECONDS, make_whisper, sound, texts
from transformers import AutoModelForSpeechSeq2Seq, AutoProcessor, pipeline

from lightformers_hf.models import LightFormerForSpeechSeq2Seq, LightFormerSpeechConfig

SAME = (
    "vocab_size num_mel_bins max_source_positions max_target_positions d_model encoder_layers decoder_layers "
    "encoder_attention_heads decoder_attention_heads encoder_ffn_dim decoder_ffn_dim pad_token_id bos_token_id "
    "eos_token_id decoder_start_token_id"
).split()


def as_lightformer(whisper, **fields) -> LightFormerForSpeechSeq2Seq:
    """A model with Whisper's tensors, under Whisper's names."""
    config = LightFormerSpeechConfig(**{name: getattr(whisper.config, name) for name in SAME}, **fields)
    model = LightFormerForSpeechSeq2Seq(config).eval()
    result = model.load_state_dict(whisper.state_dict(), strict=False)
    assert (result.missing_keys, result.unexpected_keys) == (["lm_head.weight"], ["proj_out.weight"])
    model.tie_weights()
    model.generation_config = whisper.generation_config
    return model


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Whisper and its LightFormer."""
    root = tmp_path_factory.mktemp("speech")
    whisper = make_whisper(root / "whisper")
    as_lightformer(whisper).save_pretrained(root / "light")
    AutoProcessor.from_pretrained(root / "whisper").save_pretrained(root / "light")
    return root / "whisper", root / "light"


@pytest.fixture(scope="module")
def models(folders):
    return [AutoModelForSpeechSeq2Seq.from_pretrained(folder).eval() for folder in folders]


@pytest.fixture(scope="module")
def processor(folders):
    return AutoProcessor.from_pretrained(folders[1])


WAVES = [sound(text) for text in texts(3)]
LONG = [np.concatenate([sound(text) for text in texts(9)]), sound("abcdefgh" * 4)]
GENERATED = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "times": {"return_timestamps": True},
    "times-of-words": {"return_token_timestamps": True},
    "language": {"language": "de", "task": "translate"},
    "prompt": {"prompt": "abc", "language": "en"},
    "static": {"cache_implementation": "static", "language": "en"},
    "long": {"waves": LONG, "return_timestamps": True},
    "long-with-previous": {
        "waves": LONG, "return_timestamps": True, "condition_on_prev_tokens": True, "temperature": (0.0, 0.4),
        "compression_ratio_threshold": 1.2, "logprob_threshold": -1.0, "no_speech_threshold": 0.6,
    },
}  # fmt: skip


@torch.no_grad()
def test_logits_and_loss_are_whispers(models, processor):
    inputs = processor(WAVES, sampling_rate=RATE, return_tensors="pt")
    inputs |= {"labels": torch.tensor([[3, 4, 5], [6, 7, -100], [8, -100, -100]])}
    expected, found = (model(**inputs) for model in models)
    torch.testing.assert_close(found.logits, expected.logits)
    torch.testing.assert_close(found.loss, expected.loss)


@pytest.mark.parametrize("case", GENERATED)
def test_generated_tokens_are_whispers(case, models, processor):
    options = dict(GENERATED[case])
    long = {"truncation": False, "padding": "longest"} if "waves" in options else {}
    inputs = processor(
        options.pop("waves", WAVES), sampling_rate=RATE, return_tensors="pt", return_attention_mask=True, **long
    )
    if "prompt" in options:
        options["prompt_ids"] = processor.get_prompt_ids(options.pop("prompt"), return_tensors="pt")
    results = []
    for model in models:
        torch.manual_seed(0)
        outputs = model.generate(**inputs, **options)
        results.append(outputs if isinstance(outputs, dict) else {"sequences": outputs})
    expected, found = results
    assert expected["sequences"].shape[-1] > 3
    for name in ("sequences", "token_timestamps"):
        assert (name in found) == (name in expected)
        if name in found:
            torch.testing.assert_close(found[name], expected[name])


@pytest.mark.parametrize("options", [{}, {"return_timestamps": True}], ids=str)
def test_the_pipeline_transcribes_as_of_whisper(options, folders):
    wave = LONG[0] if options else WAVES[0]
    assert len(wave) / RATE > SECONDS or not options
    expected, found = (
        pipeline("automatic-speech-recognition", model=str(folder))(wave.copy(), generate_kwargs={"language": "en"},
                                                                    **options)
        for folder in folders
    )  # fmt: skip
    assert found == expected
    assert found["text"]


def test_training_reaches_both_stacks(models, processor):
    model = models[1]
    inputs = processor(WAVES[:1], sampling_rate=RATE, return_tensors="pt")
    model(**inputs, labels=torch.tensor([[3, 4]])).loss.backward()
    without = {name for name, parameter in model.named_parameters() if parameter.grad is None}
    assert without == {"model.encoder.embed_positions.weight"}  # fixed sines
    model.zero_grad()


STRANGER = (
    BLOCKER
    + """
model = transformers.AutoModelForSpeechSeq2Seq.from_pretrained(sys.argv[1], trust_remote_code=True)
assert type(model).__module__.startswith("transformers_modules")
pipe = transformers.pipeline("automatic-speech-recognition", model=sys.argv[1], trust_remote_code=True)
assert pipe.type == "seq2seq_whisper"
tokens = model.generate(torch.load("inputs.pt", weights_only=True), language="en")
torch.save(tokens, "tokens.pt")
"""
)


def test_users_without_the_package_load_its_code(models, processor, folders, tmp_path):
    features = processor(WAVES[0], sampling_rate=RATE, return_tensors="pt")["input_features"]
    torch.save(features, tmp_path / "inputs.pt")
    run_apart(STRANGER, folders[1], folder=tmp_path, HF_HUB_OFFLINE="1")
    expected = models[0].generate(features, language="en")
    assert torch.equal(torch.load(tmp_path / "tokens.pt", weights_only=True), expected)


def test_resizing_the_vocabulary_keeps_the_tie(folders):
    model = AutoModelForSpeechSeq2Seq.from_pretrained(folders[1])
    size = model.config.vocab_size + 2
    model.resize_token_embeddings(size)
    assert model.lm_head.weight is model.model.decoder.embed_tokens.weight
    assert model.config.vocab_size == model.config.decoder_vocab_size == len(model.lm_head.weight) == size


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"median_filter_width": 4}, "median_filter_width is 4; it is odd"),
        ({"max_source_positions": 0}, "max_source_positions is 0; it is at least 1"),
        ({"share_encoder_decoder_embeddings": True}, "has an encoder without tokens"),
    ],
)
def test_impossible_fields_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        LightFormerSpeechConfig(**fields)


def test_input_of_another_length_is_refused(models):
    with pytest.raises(ValueError, match="input_features have 60 frames, but the model reads 200"):
        models[1](torch.zeros(1, 16, 60), decoder_input_ids=torch.tensor([[3]]))


def test_new_models_have_whispers_positions(models):
    model = LightFormerForSpeechSeq2Seq(models[1].config)
    expected = type(models[0])(models[0].config).model.encoder.embed_positions.weight
    torch.testing.assert_close(model.model.encoder.embed_positions.weight, expected)
