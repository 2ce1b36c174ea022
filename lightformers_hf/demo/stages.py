"""The corpus and the teacher of the demo."""

from __future__ import annotations

import io
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path

import sentencepiece
from tqdm.auto import tqdm
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    GenerationConfig,
    MarianConfig,
    MarianTokenizer,
    PrinterCallback,
    Seq2SeqTrainingArguments,
    set_seed,
)

from lightformers_hf.loading import build_network, load_pretrained
from lightformers_hf.processors import has_fast_bf16
from lightformers_hf.recovery import RecoveryTrainer
from lightformers_hf.recovery.progress import Progress
from lightformers_hf.text import load_parallel, tokenize_pairs

LONGEST = 96  # tokens; no sentence of the corpus comes near
# Attention written out: on a CPU, with sentences this short, it trains a quarter faster than the fused kernel.
ATTENTION = {"attn_implementation": "eager"}


@dataclass(frozen=True)
class DemoSettings:
    """How large the demo is. The defaults fill five minutes of two cores, seven without fast bfloat16."""

    seed: int = 0
    train_pairs: int = 20_000
    held_out_pairs: int = 500  # for validation, and as many for the test
    vocabulary: int = 1500
    d_model: int = 256
    ffn_dim: int = 1024
    heads: int = 4
    encoder_layers: int = 3
    decoder_layers: int = 2
    batch_size: int = 32
    teacher_steps: int = 600
    teacher_learning_rate: float = 1e-3
    ratio: float = 4.0
    calibration_pairs: int = 300
    minutes: float = 2.0  # of the recovery


def write_corpus(folder: Path, settings: DemoSettings) -> None:
    """Write `train.jsonl`, `validation.jsonl` and `test.jsonl`, a pair `{"de": …, "en": …}` a line."""
    from .corpus import SPLITS, make_corpus  # needs the extra `demo`

    counts = dict.fromkeys(SPLITS, settings.held_out_pairs) | {"train": settings.train_pairs}
    with tqdm(total=sum(counts.values()), desc="writing sentences", unit="pair") as bar:
        corpus = make_corpus(counts, seed=settings.seed, advance=bar.update)
    for split, sentences in corpus.items():
        lines = [json.dumps({"de": s.de, "en": s.en}, ensure_ascii=False) + "\n" for s in sentences]
        (folder / f"{split}.jsonl").write_text("".join(lines), encoding="utf-8")


def write_teacher(folder: Path, corpus: Path, settings: DemoSettings) -> None:
    """Train tokenizer and Marian teacher, and save both in the layout of an opus-mt checkpoint."""
    train = load_parallel(str(corpus / "train.jsonl"), source="de", target="en")
    _write_tokenizer(folder, [*train["source"], *train["target"]], settings.vocabulary)
    tokenizer = load_pretrained(AutoTokenizer, folder)
    set_seed(settings.seed)
    config = _teacher_config(len(tokenizer), tokenizer.eos_token_id, tokenizer.pad_token_id, settings)
    model = build_network(AutoModelForSeq2SeqLM, config, **ATTENTION)
    model.generation_config = GenerationConfig(
        max_length=LONGEST,
        num_beams=1,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        decoder_start_token_id=tokenizer.pad_token_id,
        bad_words_ids=[[tokenizer.pad_token_id]],
    )
    steps = settings.teacher_steps
    with (
        tempfile.TemporaryDirectory() as scratch,
        tqdm(total=steps, desc="training", unit="step") as bar,
    ):
        arguments = Seq2SeqTrainingArguments(
            output_dir=scratch,
            use_cpu=True,
            bf16=has_fast_bf16(),
            seed=settings.seed,
            max_steps=steps,
            # Not batches of one length by a token budget: in this corpus, sentences of one length are often of one
            # template, and such batches took more than twice the time to learn from.
            per_device_train_batch_size=settings.batch_size,
            learning_rate=settings.teacher_learning_rate,
            lr_scheduler_type="linear",
            warmup_steps=max(1, steps // 12),
            adam_beta2=0.98,
            label_smoothing_factor=0.1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            dataloader_pin_memory=False,
        )
        trainer = RecoveryTrainer(
            model,
            arguments,
            train_dataset=tokenize_pairs(train, tokenizer, max_source_length=LONGEST, max_target_length=LONGEST),
            data_collator=DataCollatorForSeq2Seq(tokenizer, model=model),
            callbacks=[Progress(bar)],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _write_tokenizer(folder: Path, sentences: list[str], vocabulary: int) -> None:
    """A SentencePiece model for both languages; digits are pieces of their own, so that any number can be written."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences),
        model_writer=model,
        model_type="bpe",
        vocab_size=vocabulary,
        split_digits=True,
        character_coverage=1.0,
        num_threads=1,
        minloglevel=2,
    )
    pieces = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    words = [pieces.id_to_piece(i) for i in range(len(pieces)) if not (pieces.is_control(i) or pieces.is_unknown(i))]
    vocab = {word: i for i, word in enumerate(["</s>", "<unk>", *words, "<pad>"])}
    with tempfile.TemporaryDirectory() as scratch:
        spm, table = Path(scratch, "source.spm"), Path(scratch, "vocab.json")
        spm.write_bytes(model.getvalue())
        table.write_text(json.dumps(vocab, ensure_ascii=False), encoding="utf-8")
        MarianTokenizer(
            source_spm=str(spm),
            target_spm=str(spm),
            vocab=str(table),
            source_lang="de",
            target_lang="en",
            model_max_length=LONGEST,
        ).save_pretrained(folder)


def _teacher_config(vocabulary: int, end: int, padding: int, settings: DemoSettings) -> MarianConfig:
    return MarianConfig(
        vocab_size=vocabulary,
        d_model=settings.d_model,
        encoder_layers=settings.encoder_layers,
        decoder_layers=settings.decoder_layers,
        encoder_ffn_dim=settings.ffn_dim,
        decoder_ffn_dim=settings.ffn_dim,
        encoder_attention_heads=settings.heads,
        decoder_attention_heads=settings.heads,
        max_position_embeddings=LONGEST,
        activation_function="swish",
        scale_embedding=True,
        static_position_embeddings=True,
        dropout=0.0,
        attention_dropout=0.0,
        init_std=settings.d_model**-0.5,
        bos_token_id=None,
        eos_token_id=end,
        forced_eos_token_id=None,
        pad_token_id=padding,
        decoder_start_token_id=padding,
    )
