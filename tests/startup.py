"""Processor time of commands beside plain programs, as ratios: `python tests/startup.py MODEL [RUNS]`.

User and system time of whole processes, which run in turn, hardly depend on what else the machine does.
"""

import os
import resource
import subprocess
import sys
from statistics import median

COMMAND = "import sys; sys.argv[0] = 'lightformers'; from lightformers_hf.cli import main; main()"
IMPORT = ("-c", "import transformers")
MARIAN = ("-c", "from transformers import MarianMTModel")
TAB = {"_LIGHTFORMERS_COMPLETE": "bash_complete", "COMP_WORDS": "lightformers convert --enc", "COMP_CWORD": "2"}
# What a user of transformers alone would write to translate a line.
TRANSLATE = """\
import sys
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer
model, tokenizer = (auto.from_pretrained(sys.argv[1]) for auto in (AutoModelForSeq2SeqLM, AutoTokenizer))
batch = tokenizer([line.strip() for line in sys.stdin], return_tensors="pt", padding=True)
print(*tokenizer.batch_decode(model.generate(**batch, max_new_tokens=8), skip_special_tokens=True), sep="\\n")
"""
AUTO = "import lightformers_hf; from transformers import AutoModelForSeq2SeqLM"


def measure_seconds(words, variables, code=0):
    """User and system time of a Python process that gets one sentence on stdin and must end with `code`."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **variables}
    sentence = "Ein Hund läuft durch den Schnee.\n".encode()
    done = subprocess.run([sys.executable, *words], env=environment, input=sentence, capture_output=True)
    assert done.returncode == code, done.stderr.decode()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main(model, runs=5):
    """Print the ratio of medians of every command to its plain program, and the ratio aimed at."""
    typed = ["--help", "convert --help", "--version", "convert a b --no-such-option"]
    cases = [(words, ("-c", COMMAND, *words.split()), {}, 2 * ("such" in words), IMPORT, 0.3) for words in typed]
    cases.append(("TAB", ("-c", COMMAND), TAB, 0, IMPORT, 0.3))
    cases += [(code, ("-c", code), {}, 0, MARIAN, 1.05) for code in ("import lightformers_hf", AUTO)]
    words = ("-c", COMMAND, "translate", model, "--max-new-tokens", "8")
    cases.append(("translate", words, {}, 0, ("-c", TRANSLATE, model), 1.2))
    for name, words, variables, code, plain, aim in cases:
        pairs = [(measure_seconds(words, variables, code), measure_seconds(plain, {})) for _ in range(int(runs))]
        ours, theirs = (median(column) for column in zip(*pairs, strict=True))
        print(f"{ours / theirs:5.2f}x, aim {aim}x: {name}")


if __name__ == "__main__":
    main(*sys.argv[1:])
