"""Two models side by side on a local web page: type a sentence, see both translations, their tokens and their time.

`lightformers compare TEACHER LIGHT` serves it. This file is also, as it is, the `app.py` of a Space on the Hub (SDK:
gradio) whose `requirements.txt` names this package with its extra `app`, and whose variables `TEACHER` and `LIGHT` are
names of models on the Hub.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import gradio as gr
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from lightformers_hf.evaluation.translate import longest_input
from lightformers_hf.export import Engine, load_engine
from lightformers_hf.export.engines import CHECKPOINTS
from lightformers_hf.export.engines.transformers import TransformersModel
from lightformers_hf.loading import load_pretrained, unique_parameters

# Nothing leaves the machine: no analytics, no tunnel, and fonts that the reader has.
FONTS = {"font": ["system-ui", "sans-serif"], "font_mono": ["ui-monospace", "monospace"]}
QUIET = {"share": False, "ssr_mode": False, "quiet": True, "show_error": True, "footer_links": []}


@dataclass(frozen=True)
class Translator:
    """A loaded model, of this package, of transformers or exported, and what the page calls it."""

    label: str
    engine: Engine
    tokenizer: PreTrainedTokenizerBase

    @classmethod
    def load(cls, role: str, name: str) -> Translator:
        """Load a folder or Hub name; the first sentence, which is slower than all others, is over when it is there."""
        engine = load_engine(name, threads=torch.get_num_threads())
        size = engine.name
        if engine.name == CHECKPOINTS and isinstance(engine.model, TransformersModel):
            size = f"{unique_parameters(engine.model.network) / 1e6:,.1f}M parameters"
        short = Path(name).name if Path(name).is_dir() else name
        translator = cls(f"{role}: {short}, {size}", engine, load_pretrained(AutoTokenizer, name))
        translator("1")
        return translator

    def __call__(self, text: str, **generation: int) -> tuple[str, int, float]:
        """Every line translated by itself; the tokens generated, end tokens included; and the seconds it took."""
        lines = text.splitlines()
        filled = [i for i, line in enumerate(lines) if line.strip()]
        outputs, tokens, start = [""] * len(lines), 0, time.perf_counter()
        limit = longest_input(self.engine, self.tokenizer)
        for i in filled:
            ids = self.tokenizer(lines[i], verbose=False)["input_ids"]
            if len(ids) > limit:
                gr.Warning(f"Line {i + 1} has {len(ids)} tokens and was cut: {self.label} reads {limit}.")
                ids = self.tokenizer(lines[i], truncation=True, max_length=limit)["input_ids"]
            (generated,) = self.engine.generate([ids], **generation)
            outputs[i] = self.tokenizer.decode(generated, skip_special_tokens=True)
            tokens += len(generated)
        return "\n".join(outputs), tokens, time.perf_counter() - start


def build(teacher: str, light: str, *, num_beams: int | None = None, max_new_tokens: int | None = None) -> gr.Blocks:
    """The page, to be served with `serve`, or with `launch()` of its own.

    Args:
        teacher, light: folders or Hub names of sequence-to-sequence checkpoints, or what `lightformers export` wrote.
            Both compute on the CPU.
        num_beams: of both; by default the light model's own.
        max_new_tokens: longest output; by default each model's own.

    Raises:
        FileNotFoundError, ValueError: a model that is not there or does not translate.
    """
    models = [Translator.load("teacher", teacher), Translator.load("light", light)]
    generation = {"num_beams": num_beams or models[1].engine.search.num_beams}
    generation |= {"max_new_tokens": max_new_tokens} if max_new_tokens else {}

    def both(text: str) -> Iterator[list[str]]:
        """Output and figures of the teacher, then also of the light model, each when it is there."""
        shown, speeds = [""] * 4, []
        yield shown
        for place, model in enumerate(models):
            output, tokens, seconds = model(text, **generation)
            figures = f"{tokens} tokens in {seconds:.3f} s" if tokens else ""
            speeds.append(tokens / seconds)
            if place and all(speeds):
                figures += f", {speeds[1] / speeds[0]:.1f}x the tokens/s"
            shown = [*shown[: 2 * place], output, figures, *shown[2 * place + 2 :]]
            yield shown

    with gr.Blocks(title="Teacher and light model", analytics_enabled=False) as page:
        gr.Markdown("# Teacher and light model, side by side")
        text = gr.Textbox(
            label="Text, one sentence a line",
            lines=3,
            autofocus=True,
            elem_id="text",
            info=f"Shift+Enter translates. Both search with {generation['num_beams']} beams, one sentence at a time.",
        )
        button = gr.Button("Translate", variant="primary", elem_id="translate")
        boxes = []
        with gr.Row():
            for role, model in zip(("teacher", "light"), models, strict=True):
                with gr.Column():
                    boxes.append(gr.Textbox(label=model.label, lines=3, interactive=False, elem_id=role))
                    boxes.append(gr.Textbox(label="tokens and time", interactive=False, elem_id=f"{role}-figures"))
        # One at a time: times would not be a sentence's own otherwise.
        gr.on([button.click, text.submit], both, text, boxes, concurrency_limit=1, api_name="translate")
    return page


def serve(page: gr.Blocks, *, host: str | None = None, port: int | None = None, browser: bool = False) -> str:
    """Serve the page in threads of this process, and return its address.

    Args:
        host: whom it listens to; by default Gradio's own choice, this machine alone.
        port: by default the first free one from 7860.
        browser: open the page there.

    Raises:
        OSError: the port is taken.
    """
    options = {**QUIET, "theme": gr.themes.Default(**FONTS), "inbrowser": browser, "prevent_thread_lock": True}
    return page.launch(server_name=host, server_port=port, **options)[1]


if __name__ == "__main__":
    space = build(os.environ["TEACHER"], os.environ["LIGHT"])
    serve(space)
    space.block_thread()
