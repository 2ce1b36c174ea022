#!/usr/bin/env python
"""Compress Whisper's encoder by principal components of outputs: LiteASR (Kamahori et al. 2025, arXiv 2502.20583).

    python training/pca_encoder.py whisper-base compressed --calibration speech --ratio 2 --json report.json

The output y = x·W + b of each linear layer is replaced by m + (y − m)·V·Vᵀ, with m its mean on the calibration sound
and V its k first principal components: the factors are W·V and Vᵀ, and the bias is m + (b − m)·V·Vᵀ. As in the
paper, k is the least number with the share θ of the variance; θ is one for all layers, here the largest that meets
the ratio of the encoder's linear weights. Where factors would be no smaller, a layer stays. The result is stored
expanded to full matrices, which does not change its outputs.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import soundfile
import torch
from common import run_script
from transformers import AutoModelForSpeechSeq2Seq, AutoProcessor

from lightformers_hf.loading import load_pretrained


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("model", help="a Whisper checkpoint")
    parser.add_argument("output", help="the folder to write")
    parser.add_argument("--calibration", required=True, help="a folder of .flac files of 16 kHz, at most 30 seconds")
    parser.add_argument("--ratio", type=float, default=2.0, help="of the encoder's linear weights")
    parser.add_argument("--json", help="file for the number of weights before and after")
    return parser.parse_args()


def measure(model: torch.nn.Module, layers: dict[str, torch.nn.Linear], features: list[torch.Tensor]) -> dict:
    """Return {layer: (mean, covariance) of its outputs} over all positions, as in the paper."""
    sums = {name: [0.0, 0.0, 0] for name in layers}

    def watch(name: str):
        def see(module, arguments, output):
            rows = output.flatten(0, -2).double()
            for index, value in enumerate((rows.sum(0), rows.T @ rows, len(rows))):
                sums[name][index] += value

        return see

    hooks = [layer.register_forward_hook(watch(name)) for name, layer in layers.items()]
    with torch.inference_mode():
        for each in features:
            model.get_encoder()(each)
    for hook in hooks:
        hook.remove()
    means = {name: total / count for name, (total, _, count) in sums.items()}
    return {
        name: (means[name], sums[name][1] / sums[name][2] - torch.outer(means[name], means[name])) for name in sums
    }


def main() -> None:
    arguments = parse_arguments()
    model = load_pretrained(AutoModelForSpeechSeq2Seq, arguments.model, dtype=torch.float32).eval()
    processor = load_pretrained(AutoProcessor, arguments.model)
    waves = (soundfile.read(file) for file in sorted(Path(arguments.calibration).glob("*.flac")))
    extractor = processor.feature_extractor
    features = [extractor(wave, sampling_rate=rate, return_tensors="pt").input_features for wave, rate in waves]
    modules = model.get_encoder().named_modules()
    layers = {name: module for name, module in modules if isinstance(module, torch.nn.Linear)}
    spectra = {}
    for name, (mean, covariance) in measure(model, layers, features).items():
        values, vectors = torch.linalg.eigh(covariance)
        spectra[name] = mean, values.flip(0).clamp(min=0), vectors.flip(1)

    def count(name: str, rank: int) -> int:
        n, m = layers[name].weight.shape
        return min(rank * (m + n), m * n)

    def find_rank(name: str, share: float) -> int:
        held = spectra[name][1].cumsum(0)
        return int((held < share * held[-1]).sum()) + 1

    whole = sum(layer.weight.numel() for layer in layers.values())
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        fits = sum(count(name, find_rank(name, middle)) for name in layers) <= whole / arguments.ratio
        low, high = (middle, high) if fits else (low, middle)
    after = 0
    with torch.no_grad():
        for name, layer in layers.items():
            rank = find_rank(name, low)
            after += count(name, rank)
            if count(name, rank) == layer.weight.numel():
                continue
            mean, _, vectors = spectra[name]
            project = vectors[:, :rank] @ vectors[:, :rank].T
            bias = torch.zeros_like(mean) if layer.bias is None else layer.bias.double()
            layer.weight.copy_(project @ layer.weight.double())
            shifted = mean + (bias - mean) @ project
            layer.bias = torch.nn.Parameter(shifted.to(layer.weight.dtype))  # keys had none
    report = {"weights_before": whole, "weights_after": after, "share_of_variance": low}
    # Whisper's keys have no bias: a constant in all keys changes no attention.
    for layer in model.get_encoder().layers:
        layer.self_attn.k_proj.bias = None
    model.save_pretrained(arguments.output)
    processor.save_pretrained(arguments.output)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(report), encoding="utf-8")
    print(json.dumps(report))


if __name__ == "__main__":
    run_script(main)
