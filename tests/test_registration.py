"""`import lightformers_hf` costs nothing, and the Auto classes know the architectures whoever was imported first.

Every case is a Python of its own, since this one has imported everything.
"""

import shutil
import subprocess
import sys

import pytest

import lightformers_hf
from lightformers_hf import convert

HEAVY = "{'torch', 'transformers', 'numpy', 'datasets', 'rich'}"


def run(program, *arguments):
    done = subprocess.run([sys.executable, "-c", program, *map(str, arguments)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def light(tmp_path_factory, tiny_marian):
    folder = tmp_path_factory.mktemp("registration") / "light"
    convert(tiny_marian, folder, rank=8, method="paper", progress=False)
    return folder


def test_nothing_is_imported_before_it_is_used():
    program = f"""
import sys, lightformers_hf
from lightformers_hf import CompressionOptions
from lightformers_hf.cli import main
assert not {HEAVY} & {{*sys.modules}}, {HEAVY} & {{*sys.modules}}
assert set(lightformers_hf.__all__) <= set(dir(lightformers_hf))
try:
    lightformers_hf.nothing
except AttributeError as error:
    assert "has no attribute 'nothing'" in str(error)
"""
    run(program)


@pytest.mark.parametrize(
    "words", ["--help", "convert --help", "--version", "convert a b --no-such-option", "convert a b --ratio 1"]
)
def test_the_command_answers_at_once(words):
    program = f"""
import sys
sys.argv = ["lightformers", *{words.split()}]
from lightformers_hf.cli import main
try:
    main()
except SystemExit as end:
    assert end.code in (0, 2) or "--ratio" in sys.argv, end.code
assert not {HEAVY} - {{"rich"}} & {{*sys.modules}}
"""
    run(program)


def test_public_names_are_there():
    for name in lightformers_hf.__all__:
        # `export` is the package of that name, which can be called.
        assert getattr(lightformers_hf, name).__name__.rpartition(".")[2] == name


@pytest.mark.parametrize(
    "imports",
    [
        "import lightformers_hf\nfrom transformers import AutoModelForSeq2SeqLM, AutoTokenizer",
        "from transformers import AutoModelForSeq2SeqLM, AutoTokenizer\nimport lightformers_hf",
        "import lightformers_hf\nimport transformers.modeling_utils\n"
        "from transformers import AutoModelForSeq2SeqLM, AutoTokenizer",
        "from lightformers_hf.models.configuration_lightformer import LightFormerConfig\n"
        "from transformers import AutoModelForSeq2SeqLM, AutoTokenizer",
    ],
)
def test_auto_classes_know_the_architectures(light, imports):
    program = f"""
import sys
{imports}
model = AutoModelForSeq2SeqLM.from_pretrained(sys.argv[1])
assert type(model).__module__ == "lightformers_hf.models.modeling_lightformer", type(model)
assert len(AutoTokenizer.from_pretrained(sys.argv[1])("Ein Hund")["input_ids"]) > 1
assert [type(finder).__name__ for finder in sys.meta_path].count("AfterTransformers") == 0
"""
    run(program, light)


def test_a_folder_brings_its_own_code(light, tmp_path):
    """With the package imported and without it, `trust_remote_code` loads what lies beside the weights."""
    shutil.copytree(light, tmp_path / "moved")
    program = """
import sys
if sys.argv[2] == "with":
    import lightformers_hf
from transformers import AutoModelForSeq2SeqLM
print(type(AutoModelForSeq2SeqLM.from_pretrained(sys.argv[1], trust_remote_code=True)).__name__)
"""
    for how in ("with", "without"):
        assert run(program, tmp_path / "moved", how).strip() == "LightFormerForConditionalGeneration"


def test_models_go_to_other_processes(light):
    """A process that was spawned has imported nothing, and gets what the first one pickled."""
    program = """
import sys, multiprocessing, lightformers_hf




if __name__ == "__main__":
    from transformers import AutoModelForSeq2SeqLM
    model = AutoModelForSeq2SeqLM.from_pretrained(sys.argv[1])

    from concurrent.futures import ProcessPoolExecutor
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        assert pool.submit(lightformers_hf.LightFormerForConditionalGeneration.num_parameters, model).result() > 0
"""
    run(program, light)
