"""More than one process on CPUs (gloo): the losses of one, after SIGKILL too."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import run_translation as script
from training.scripts import losses

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("warm_python")]
TRAINING = Path(script.__file__).parent
RECIPE = """\
model:
  {model_type: subformer, d_model: 32, encoder_layers: 3, decoder_layers: 3, encoder_attention_heads: 4,
   decoder_attention_heads: 4, ffn_dim: 32, sandwich_dim: 40, sandwich_ffn_dim: 32, embedding_dim: 40,
   projection_dropout: 0.0, dropout: 0.0, max_position_embeddings: 64}
source_lang: de
target_lang: en
max_source_length: 60
max_target_length: 60
max_tokens: 100
learning_rate: 1e-3
label_smoothing_factor: 0.1
logging_steps: 1
use_cpu: true
disable_tqdm: true
report_to: none
"""
KILLED = """\
import os, signal
from lightformers_hf.recovery import RecoveryTrainer
step = RecoveryTrainer.training_step
def killed(trainer, *args, **kwargs):
    if trainer.state.global_step == 14:
        os.kill(os.getpid(), signal.SIGKILL)
    return step(trainer, *args, **kwargs)
RecoveryTrainer.training_step = killed
"""


@pytest.fixture
def launch(tmp_path, tiny_marian, parallel_sentences):
    """Run the script as the launcher does, with RECIPE and the options; returns what ended it. None: here."""
    rows = "".join(json.dumps({"translation": row}) + "\n" for row in parallel_sentences)
    (tmp_path / "train.jsonl").write_text(rows)
    (tmp_path / "recipe.yaml").write_text(RECIPE)

    def launch(*options, launcher=("torch.distributed.run", "--standalone", "--nproc-per-node", "2"), before=""):
        options = ["--config", "recipe.yaml", "--train-file", "train.jsonl", "--tokenizer-name", tiny_marian, *options]
        if launcher is None:
            with contextlib.chdir(tmp_path):
                return script.main([*map(str, options)])
        program = TRAINING / "run_translation.py"
        if before:
            program = tmp_path / "program.py"
            run = "from run_translation import main, run_script\nrun_script(main)\n"
            program.write_text(f"import sys\nsys.path.insert(0, {str(TRAINING)!r})\n{before}{run}")
        command = [sys.executable, "-m", *launcher, str(program), *map(str, options)]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(TRAINING.parent)}
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=900)

    return launch


@pytest.mark.parametrize("stream", [(), ("--stream",)])
def test_two_processes_have_the_losses_of_one_also_after_a_kill(launch, tmp_path, stream):
    """The same batches by the same steps: two at a time, or one after the other; also of shards that are streamed."""
    if stream:
        lines = (tmp_path / "train.jsonl").read_text().splitlines(keepends=True)
        for number in range(2):
            (tmp_path / f"train-{number}.jsonl").write_text("".join(lines[number::2]))
        stream += ("--train-file", "train-*.jsonl")
    fifty = [*stream, "--max-steps", 50, "--save-strategy", "steps", "--save-steps", 10, "--save-total-limit", 1]
    launch(*fifty, "--gradient-accumulation-steps", 2, "--output-dir", "one", launcher=None)
    # Its --cpu starts one process without MPI; --multi-gpu starts two anywhere.
    accelerate = ("accelerate.commands.launch", "--multi-gpu", "--num-processes", "2", "--num-machines", "1")
    accelerate += ("--mixed-precision", "no", "--dynamo-backend", "no", "--main-process-port", "0")
    two = launch(*fifty, "--output-dir", "two", launcher=accelerate)
    assert two.returncode == 0, two.stderr
    expected = losses(tmp_path / "one")
    assert len(expected) == 50
    assert expected[-1] < expected[0] - 0.5
    assert losses(tmp_path / "two") == pytest.approx(expected, abs=1e-4)

    cut = [*fifty, "--output-dir", "cut"]
    killed = launch(*cut, before=KILLED)
    assert re.search(rf"exitcode\s*: -{signal.SIGKILL:d}", killed.stderr)
    assert not (tmp_path / "cut" / "trainer_state.json").exists()
    resumed = launch(*cut, "--resume-from-checkpoint")
    assert resumed.returncode == 0, resumed.stderr
    assert losses(tmp_path / "cut") == losses(tmp_path / "two")
