"""Sound that a tiny Whisper can learn: every letter is a tone. Checkpoints of such models, made from nothing."""

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    GenerationConfig,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
    WhisperProcessor,
    WhisperTokenizer,
)

RATE, SECONDS, STEP = 16000, 2, 0.02  # STEP: seconds of one position of the encoder
LETTERS = "abcdefgh"
LANGUAGES = ("<|en|>", "<|de|>")
SPECIAL = ["<|endoftext|>", "<|startoftranscript|>", *LANGUAGES, "<|translate|>", "<|transcribe|>", "<|startoflm|>"]
SPECIAL += ["<|startofprev|>", "<|nospeech|>", "<|notimestamps|>"]
TIMES = [f"<|{index * STEP:.2f}|>" for index in range(round(SECONDS / STEP) + 1)]


def sound(text: str, rate: int = RATE, letter: float = 0.14, volume: float = 0.5) -> np.ndarray:
    """The waveform of a text: a tone for each letter, a pause for each space."""
    time = np.arange(int(letter * rate)) / rate
    tones = {name: np.sin(2 * np.pi * 300 * 1.35**index * time) for index, name in enumerate(LETTERS)}
    envelope = volume * np.sin(np.pi * time / letter) ** 0.5
    return np.concatenate([envelope * tones.get(name, 0 * time) for name in text]).astype(np.float32)


def texts(number: int, seed: int = 0, longest: int = 8) -> list[str]:
    """Random words of letters."""
    random = np.random.default_rng(seed)
    return ["".join(random.choice(list(LETTERS), random.integers(2, longest + 1))) for _ in range(number)]


def make_processor() -> WhisperProcessor:
    """A tokenizer of bytes with Whisper's special tokens, and a feature extractor of 2 seconds."""
    vocabulary = {letter: index for index, letter in enumerate(sorted(ByteLevel.alphabet()))}
    pairs = [(first, second) for first, second in pairwise("abcd")]
    for token in ["".join(pair) for pair in pairs] + ["", SPECIAL[0]]:  # as in Whisper, one is empty
        vocabulary[token] = len(vocabulary)
    tokenizer = WhisperTokenizer(vocabulary, pairs, pad_token=SPECIAL[0])
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL})
    tokenizer.add_tokens(TIMES)
    return WhisperProcessor(WhisperFeatureExtractor(chunk_length=SECONDS, feature_size=16), tokenizer)


def make_whisper(folder: Path, **sizes) -> WhisperForConditionalGeneration:
    """A multilingual Whisper with weights like trained ones, saved in `folder`; 2 layers of width 32."""
    processor = make_processor()
    ids = {token: processor.tokenizer.convert_tokens_to_ids(token) for token in SPECIAL}
    end, start = ids["<|endoftext|>"], ids["<|startoftranscript|>"]
    tokens = {"bos_token_id": end, "eos_token_id": end, "pad_token_id": end, "decoder_start_token_id": start}
    shapes = {f"{stack}_{name}": size for stack in ("encoder", "decoder") for name, size in
              {"layers": 2, "attention_heads": 4, "ffn_dim": 64}.items()}  # fmt: skip
    shapes |= {"d_model": 32, "num_mel_bins": 16, "max_source_positions": round(SECONDS / STEP)}
    suppressed = {"suppress_tokens": [], "begin_suppress_tokens": [end]}
    config = WhisperConfig(
        vocab_size=len(processor.tokenizer), max_target_positions=48, **{**shapes, **sizes}, **tokens, **suppressed
    )
    torch.manual_seed(0)
    model = WhisperForConditionalGeneration(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.add_(0.2 * torch.randn(parameter.shape) if "norm" not in name else 0.05)
    model.generation_config = GenerationConfig(
        **tokens, **suppressed, max_length=48, is_multilingual=True, alignment_heads=[[0, 1], [1, 3]],
        no_timestamps_token_id=ids["<|notimestamps|>"], max_initial_timestamp_index=50, return_timestamps=False,
        prev_sot_token_id=ids["<|startofprev|>"], task="transcribe", language=None,
        lang_to_id={language: ids[language] for language in LANGUAGES},
        task_to_id={task: ids[f"<|{task}|>"] for task in ("transcribe", "translate")},
    )  # fmt: skip
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return model


def train_whisper(folder: Path, steps: int = 150) -> list[str]:
    """`make_whisper`, trained in seconds to write the letter that it hears; returns such texts."""
    processor, random = make_processor(), np.random.default_rng(0)
    shell = make_whisper(folder)
    torch.manual_seed(0)
    model = WhisperForConditionalGeneration(shell.config)
    model.generation_config = shell.generation_config
    words = [3 * str(letter) for letter in random.choice(list(LETTERS), 256)]
    features = processor([sound(word) for word in words], sampling_rate=RATE, return_tensors="pt").input_features
    prompt = ["<|startoftranscript|>", "<|en|>", "<|transcribe|>", "<|notimestamps|>"]
    start = processor.tokenizer.convert_tokens_to_ids(prompt)
    texts = processor.tokenizer([f" {word}<|endoftext|>" for word in words], add_special_tokens=False)["input_ids"]
    rows = torch.nn.utils.rnn.pad_sequence(
        [torch.tensor([*start, *text]) for text in texts], batch_first=True, padding_value=-100
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=steps)
    for step in range(steps):
        batch = torch.arange(16) + 16 * step % len(words)
        inputs = rows[batch, :-1].clamp(min=0)
        logits = model(input_features=features[batch], decoder_input_ids=inputs).logits[:, len(start) - 1 :]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[batch, len(start) :].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    model.save_pretrained(folder)
    return words


def write_speech(folder: Path, sentences: list[str], *, rate: int = RATE, transcribed: bool = True) -> Path:
    """A folder of sound files in the layout of `audiofolder`."""
    import soundfile

    folder.mkdir(parents=True)
    rows = [{"file_name": f"{index:03}.flac", "text": text} for index, text in enumerate(sentences)]
    for row in rows:
        soundfile.write(folder / row["file_name"], sound(row["text"], rate), rate)
    if transcribed:
        (folder / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder
