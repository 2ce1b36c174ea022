"""`import lightformers_hf` costs nothing, and the Auto classes know the architectures whoever was imported first.

Every case is a Python of its own, since this one has imported everything.
"""

import shutil
import subprocess
import sys

import pytest

import lightformers_hf
from lightformers_hf import convert, engines

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


def test_names_of_commands_options_engines_and_metrics_need_no_libraries():
    program = """
import sys
from lightformers_hf.cli import main
answers = {"--help": 0, "convert --help": 0, "--version": 0}
answers |= {"convert a b --no-such-option": 2, "convert a b --ratio 1": 1}
for words, code in answers.items():
    sys.argv = ["lightformers", *words.split()]
    try:
        main()
    except SystemExit as end:
        assert (end.code or 0) == code, (words, end.code)
from lightformers_hf.conversion.options import CompressionOptions
from lightformers_hf.engines import deployment_names
assert CompressionOptions(ratio=2, pattern={"ffn": "4x", "fc1": None}).policy
assert deployment_names()
assert not {"torch", "transformers", "numpy", "datasets", "ctranslate2", "onnx", "onnxruntime"} & {*sys.modules}
from lightformers_hf.evaluation import quality
assert not {"torch", "evaluate"} & {*sys.modules}
from lightformers_hf.engines import Engine
assert "lightformers_hf.engines.write" not in sys.modules
"""
    run(program)


def test_public_names_are_there():
    for name in lightformers_hf.__all__:
        assert getattr(lightformers_hf, name).__name__ == name
    assert set(engines.__all__) <= set(dir(engines))
    for name in engines.__all__:
        assert getattr(engines, name).__name__ == name
    with pytest.raises(AttributeError, match=r"'lightformers_hf\.engines' has no attribute 'Exporter'"):
        _ = engines.Exporter


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
    """Also where the package is imported. `models/test_remote_code.py` loads without it."""
    shutil.copytree(light, tmp_path / "moved")
    program = """
import sys
import lightformers_hf
from transformers import AutoModelForSeq2SeqLM
print(type(AutoModelForSeq2SeqLM.from_pretrained(sys.argv[1], trust_remote_code=True)).__name__)
"""
    assert run(program, tmp_path / "moved").strip() == "LightFormerForConditionalGeneration"


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
