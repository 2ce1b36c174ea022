"""Record what transformers 4.57 gives for the calls of `calls.py`, in `expected.json`.

    python tests/pipelines/record.py PYTHON

`PYTHON` is the interpreter of an environment with transformers 4.57, torch, sentencepiece and sacremoses. This
process, in the package's environment, makes the tiny checkpoints. The other one runs the calls.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
sys.path += [str(HERE), str(HERE.parent)]
EXPECTED = HERE / "expected.json"


def make_checkpoints(root: Path) -> Path:
    """Write the checkpoints of the calls to folders of `root`, and return it."""
    from calls import NAMES, prepare
    from conversion.vocabulary.checkpoints import make_checkpoint

    for name in NAMES:
        model = make_checkpoint(name, root / name, positions=160)
        for part, tensor in model.named_parameters():
            if "encoder_attn.out_proj.weight" in part or "EncDecAttention.o.weight" in part:
                tensor.data *= 4  # outputs depend on the source
        model.save_pretrained(root / name)
        prepare(root / name)
    return root


def translate_for_version_4(folder: Path) -> None:
    """Give the list of a tokenizer's special tokens the name that version 4 reads."""
    file = folder / "tokenizer_config.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    if tokens := content.pop("extra_special_tokens", None):
        content["additional_special_tokens"] = tokens
    file.write_text(json.dumps(content), encoding="utf-8")


def run_calls(root: Path) -> None:
    """Write the results of all calls under this interpreter."""
    import transformers
    from calls import CALLS, run

    if not transformers.__version__.startswith("4.57."):
        raise SystemExit(f"transformers is {transformers.__version__}: expected 4.57")
    lines = [json.dumps(run(root, call), ensure_ascii=False) for call in CALLS]
    EXPECTED.write_text("[\n" + ",\n".join(lines) + "\n]\n", encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1] == "run":
        run_calls(Path(sys.argv[2]))
    else:
        with tempfile.TemporaryDirectory() as root:
            for folder in make_checkpoints(Path(root)).iterdir():
                if not folder.name.endswith("-parts"):
                    translate_for_version_4(folder)
            subprocess.run([sys.argv[1], __file__, "run", root], check=True)
