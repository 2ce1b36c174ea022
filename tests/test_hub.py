"""Checkpoints on the Hub: a real client, a server on loopback, strangers without this package."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conversion.cards import evaluation_of
from hub_server import Hub
from huggingface_hub import HfApi, ModelCard, constants
from models.cases import every, make_model
from models.strangers import AUTO, BLOCKER, inputs_for
from safetensors.torch import load, load_file
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from lightformers_hf import convert, push_to_hub, translate
from lightformers_hf.hub import preview_push

FAMILIES = ("lightformer-private-norms", "subformer-sandwich", "partialformer-relative")
CASES = every(("ConditionalGeneration", "Model"), FAMILIES)  # models/test_remote_code.py loads all heads
CODE = {"modeling_lightformer.py", "configuration_lightformer.py", "low_rank.py", "layers.py", "heads.py"}

# Before it: the package cannot be imported. `tasks` is what to load.
STRANGERS_LOADING = """
import json
tasks = json.load(open("tasks.json"))
for task in tasks:
    place = {"revision": task["revision"], "token": task["token"], "trust_remote_code": True}
    try:
        model = getattr(transformers, task["auto"]).from_pretrained(task["name"], **place).eval()
    except OSError as error:
        torch.save({"error": str(error)}, task["result"])
        continue
    assert "lightformers_hf" not in sys.modules
    assert type(model).__module__.startswith("transformers_modules")
    inputs = torch.load(task["inputs"], weights_only=True)
    result = {"outputs": model(**inputs)[0].detach()}
    if model.can_generate():
        inputs.pop("decoder_input_ids", None)
        result["tokens"] = model.generate(**inputs, max_new_tokens=8, num_beams=2, no_repeat_ngram_size=1)
    torch.save(result, task["result"])
"""
STRANGERS_TRAINING = """
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, DataCollatorForSeq2Seq
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments

name, pairs = "alice/marian-light", json.load(open("pairs.json"))
tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=True)
model = AutoModelForSeq2SeqLM.from_pretrained(name, trust_remote_code=True)
data = [{**tokenizer(pair["de"]), "labels": tokenizer(text_target=pair["en"])["input_ids"]} for pair in pairs]
batch = tokenizer([pair["de"] for pair in pairs], padding=True, return_tensors="pt")
texts = tokenizer.batch_decode(model.generate(**batch), skip_special_tokens=True)
json.dump(texts, open("texts.json", "w"))
arguments = Seq2SeqTrainingArguments(
    "trained", max_steps=8, learning_rate=1e-3, per_device_train_batch_size=5, predict_with_generate=True,
    report_to="none", use_cpu=True, save_strategy="no", disable_tqdm=True,
)
trainer = Seq2SeqTrainer(
    model, arguments, train_dataset=data, eval_dataset=data, processing_class=tokenizer,
    data_collator=DataCollatorForSeq2Seq(tokenizer, model=model),
)
before = trainer.evaluate()["eval_loss"]
trainer.train()
assert trainer.evaluate()["eval_loss"] < before
trainer.save_model("trained")
again = AutoModelForSeq2SeqLM.from_pretrained("trained", trust_remote_code=True)
assert torch.equal(again.lm_head.output.weight, model.lm_head.output.weight)
assert "lightformers_hf" not in sys.modules
"""
COLLEAGUE = """
import json, sys
import lightformers_hf
from lightformers_hf import cli
from transformers import AutoModelForSeq2SeqLM

model = AutoModelForSeq2SeqLM.from_pretrained("alice/marian-light")
assert type(model) is lightformers_hf.LightFormerForConditionalGeneration
lightformers_hf.convert("alice/marian-light", "lighter", rank=2, method="paper", progress=False)
sys.argv = ["lightformers", "translate", "alice/marian-light", "sentences.de", "--output", "sentences.en"]
cli.main()
"""


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A Hub that this process's client speaks to, logged in as alice."""
    with Hub() as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.endpoint)
        files = f"{server.endpoint}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", files)
        monkeypatch.setattr("transformers.utils.hub._hf_api", None, raising=False)  # it keeps the first endpoint
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
        monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)  # before it tries again
        monkeypatch.setenv("HF_TOKEN", "hf_alice")
        yield server


@pytest.fixture(scope="module")
def light(tmp_path_factory, tiny_marian):
    """The tiny Marian, compressed; its card named a licence."""
    folder = tmp_path_factory.mktemp("light")
    shutil.copytree(tiny_marian, folder / "opus-mt-de-en")
    card = "---\nlicense: cc-by-4.0\nlanguage:\n- de\n- en\n---\n# Ours\n"
    (folder / "opus-mt-de-en" / "README.md").write_text(card)
    convert(folder / "opus-mt-de-en", folder / "light", rank=12, method="paper", progress=False)
    return folder / "light"


@pytest.fixture
def copy(light, tmp_path):
    """A copy of it to spoil."""
    return Path(shutil.copytree(light, tmp_path / "copy"))


@pytest.fixture
def results(light, tmp_path):
    """What `lightformers evaluate --json` writes about it."""
    parameters = AutoModelForSeq2SeqLM.from_pretrained(light).num_parameters()
    evaluation = evaluation_of("light", parameters, teacher="opus-mt-de-en")
    (tmp_path / "results.json").write_text(json.dumps(evaluation.to_dict()))
    return tmp_path / "results.json"


def environment(hub, home, **variables):
    """What a process needs to have this Hub for its own, and nothing of this machine's."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "PYTHONPATH"))}
    return kept | {
        "HF_ENDPOINT": hub.endpoint,
        "HF_HOME": str(home / "home"),
        "HF_HUB_DISABLE_XET": "1",
        "OMP_NUM_THREADS": "1",
        **variables,
    }


def python(program, hub, folder, **variables):
    run = subprocess.run(
        [sys.executable, "-c", program],
        env=environment(hub, folder, **variables),
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return run


def weights(repository, commit=None):
    files = repository.commits[commit] if commit else repository.files
    return load(files["model.safetensors"])


def test_strangers_load_run_and_train_what_was_pushed(hub, light, parallel_sentences, tmp_path):
    """Two heads of every architecture; a private one; one pinned by its commit, whose code has changed since."""
    tasks, models = [], {}

    def task(name, head, model, *, revision="main", token=None):
        place = tmp_path / f"{len(tasks)}"
        torch.save(inputs_for(model), f"{place}.inputs")
        models[f"{place}.result"] = model
        described = {"name": name, "auto": AUTO[head], "revision": revision, "token": token}
        tasks.append(described | {"inputs": f"{place}.inputs", "result": f"{place}.result"})

    for head, variant in CASES.args[1]:
        model, folder = make_model(head, variant), tmp_path / "models" / f"{variant}-{head}"
        model.save_pretrained(folder)
        push_to_hub(folder, f"alice/{folder.name}")
        task(f"alice/{folder.name}", head, model)

    model, folder = make_model("ConditionalGeneration", "lightformer"), tmp_path / "models" / "changing"
    model.save_pretrained(folder)
    pinned = push_to_hub(folder, "changing").oid
    task("alice/changing", "ConditionalGeneration", model, revision=pinned)
    (folder / "heads.py").write_text("raise RuntimeError('the code of a later commit')\n")
    assert push_to_hub(folder, "changing").oid != pinned

    push_to_hub(folder.parent / "lightformer-private-norms-Model", "secret", private=True)
    secret = make_model("Model", "lightformer-private-norms")
    task("alice/secret", "Model", secret, token="hf_bob")  # before the other, whose copy stays in the cache
    task("alice/secret", "Model", secret, token="hf_alice")

    own = make_model("ConditionalGeneration", "partialformer")
    own.push_to_hub("alice/own")  # transformers' method
    task("alice/own", "ConditionalGeneration", own)

    push_to_hub(light, "marian-light")
    (tmp_path / "tasks.json").write_text(json.dumps(tasks))
    (tmp_path / "pairs.json").write_text(json.dumps(parallel_sentences))
    run = python(BLOCKER + STRANGERS_LOADING + STRANGERS_TRAINING, hub, tmp_path)
    assert "Do you wish to run the custom code" not in run.stdout + run.stderr

    refused = [described for described in tasks if described["token"] == "hf_bob"]
    for described in tasks:
        model, result = models[described["result"]], torch.load(described["result"], weights_only=True)
        if described in refused:
            assert "alice/secret" in result["error"]
            continue
        inputs = inputs_for(model)
        torch.testing.assert_close(result["outputs"], model(**inputs)[0])
        if model.can_generate():
            inputs.pop("decoder_input_ids", None)
            tokens = model.generate(**inputs, max_new_tokens=8, num_beams=2, no_repeat_ngram_size=1)
            assert torch.equal(result["tokens"], tokens)
    assert len(tasks) == 10
    tokenizer = AutoTokenizer.from_pretrained(light)
    german = [pair["de"] for pair in parallel_sentences]
    expected = translate(german, AutoModelForSeq2SeqLM.from_pretrained(light), tokenizer)
    texts = json.loads((tmp_path / "texts.json").read_text())
    assert [text.strip() for text in texts] == [text.strip() for text in expected]
    assert len(set(texts)) > 1


def test_with_the_package_no_code_is_fetched(hub, light, parallel_sentences, tmp_path):
    push_to_hub(light, "marian-light", private=True)
    hub.requests.clear()
    sentences = [pair["de"] for pair in parallel_sentences[:3]]
    (tmp_path / "sentences.de").write_text("\n".join(sentences) + "\n")
    python(COLLEAGUE, hub, tmp_path, HF_TOKEN="hf_alice")
    assert not [path for method, path in hub.requests if method == "GET" and path.endswith(".py")]
    assert len((tmp_path / "sentences.en").read_text().splitlines()) == 3
    card = ModelCard.load(tmp_path / "lighter" / "README.md").data
    assert (card.base_model, card.license, card.language) == ("alice/marian-light", "cc-by-4.0", ["de", "en"])


def test_what_lies_in_the_repository(hub, copy):
    """The model and nothing else of the folder."""
    for name in ("training_args.bin", "optimizer.pt", "secrets.py", "notes.txt", "all_results.json", ".env"):
        (copy / name).write_text("private")
    (copy / "trainer_state.json").write_text('{"global_step": 1500}')
    (copy / "checkpoint-1").mkdir()
    commit = push_to_hub(copy, "light", message="First")
    repository = hub.repositories["alice/light"]
    assert repository.messages == ["initial commit", "First"]
    assert commit.oid == repository.branches["main"]
    assert not repository.private
    files = repository.files
    names = {name for name in files if not name.endswith(".py")} - {".gitattributes"}
    tokenizer = {"source.spm", "target.spm", "tokenizer_config.json", "vocab.json"}
    assert names == tokenizer | {
        "README.md",
        "compression.json",
        "config.json",
        "generation_config.json",
        "model.safetensors",
    }
    code = {name for name in files if name.endswith(".py")}
    assert CODE < code == {path.name for path in copy.glob("*.py")} - {"secrets.py"}
    assert all(files[name] == (copy / name).read_bytes() for name in names - {"README.md"} | code)
    card = ModelCard(files["README.md"].decode())
    assert card.data.license == "cc-by-4.0"
    assert 'from_pretrained("alice/light", trust_remote_code=True)' in card.text
    assert "trained for 1,500 steps" in card.text


@pytest.mark.parametrize(("best", "said"), [(11, "trained for 11 steps"), (0, "fine-tune it before use")])
def test_the_steps_of_a_recovery_are_those_of_the_model_that_was_kept(hub, copy, best, said):
    (copy / "trainer_state.json").write_text('{"global_step": 22}')
    (copy / "recovery.json").write_text(json.dumps({"result": {"steps": 22, "best_step": best}}))
    push_to_hub(copy, "light")
    card = hub.repositories["alice/light"].files["README.md"].decode()
    assert said in card
    assert "22 steps" not in card


def test_a_push_replaces_the_last_one(hub, copy, light):
    """Its leftovers go, what somebody else put there stays, and nothing new makes no commit."""
    first = push_to_hub(copy, "light")
    model = AutoModelForSeq2SeqLM.from_pretrained(light)
    (copy / "model.safetensors").unlink()
    model.save_pretrained(copy, max_shard_size="20KB")
    repository = hub.repositories["alice/light"]
    repository.files.update({"LICENSE": b"ours", "handler.py": b"ours", "data/vocab.json": b"ours"})
    second = push_to_hub(copy, "light")
    assert "model.safetensors" not in repository.files
    shards = [name for name in repository.files if name.startswith("model-")]
    assert len(shards) > 2
    assert {"LICENSE", "handler.py", "data/vocab.json", "model.safetensors.index.json"} < repository.files.keys()
    third = push_to_hub(light, "light")
    assert not any(name.startswith("model-") or name.endswith(".index.json") for name in repository.files)
    assert weights(repository).keys() == load_file(light / "model.safetensors").keys()
    uploads = len(hub.uploads)
    assert push_to_hub(light, "light").oid == third.oid
    assert len(hub.uploads) == uploads
    assert list(repository.commits)[1:] == [first.oid, second.oid, third.oid]


def test_a_branch(hub, copy, light):
    main = push_to_hub(light, "light").oid
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"dropout": 0.5}))
    for _ in range(2):
        commit = push_to_hub(copy, "light", revision="trials/dropout")
    repository = hub.repositories["alice/light"]
    assert repository.branches == {"main": main, "trials/dropout": commit.oid}
    assert json.loads(repository.commits[commit.oid]["config.json"])["dropout"] == 0.5
    with pytest.raises(ValueError, match="give the name of a branch"):
        push_to_hub(copy, "light", revision=main)


@pytest.mark.parametrize(
    ("token", "name", "message"),
    [
        (None, "light", "no token of the Hub: log in with `hf auth login`, or set HF_TOKEN"),
        ("hf_wrong", "light", "does not accept the token .401: Invalid username or password"),
        ("hf_wrong\tone", "light", "characters that no token has"),
        ("hf_wröng", "light", "characters that no token has"),
        ("hf_reader", "light", "may not write to light .403: You don't have the rights"),
        ("hf_alice", "bob/light", "may not write to bob/light .403"),
        ("hf_alice", "bob/light/v2", "bob/light/v2"),
    ],
)
def test_tokens(hub, light, monkeypatch, lightformers, token, name, message):
    """One line says what is wrong; no token is ever printed, nothing is made on the Hub."""
    monkeypatch.delenv("HF_TOKEN")
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    code, out, err = lightformers("push", light, name)
    assert code == 1
    lines = [line for line in err.splitlines() if line.startswith("error:")]
    assert len(lines) == 1
    assert re.search(message, lines[0])
    assert not token or token not in out + err
    assert not hub.repositories


def test_an_export_becomes_a_model_and_a_page_a_static_space(hub, light, tmp_path, monkeypatch):
    pytest.importorskip("onnxruntime")
    from lightformers_hf.export import export, web

    monkeypatch.setattr(web, "vendor", lambda _: dict.fromkeys(web.VENDORED, "1.0"))
    export(light, tmp_path / "out", to="onnx", quantization="int8")
    web.export_web(light, tmp_path / "page")
    (tmp_path / "out" / "notes.txt").write_text("of the user")
    sizes = preview_push(tmp_path / "out", "out")
    assert push_to_hub(tmp_path / "out", "out").name == "alice/out"
    assert str(push_to_hub(tmp_path / "page", "page")).startswith(f"{hub.endpoint}/spaces/alice/page at commit")
    model, space = (hub.repositories[f"alice/{name}"] for name in ("out", "page"))
    assert (model.kind, space.kind, space.sdk) == ("model", "space", "static")
    assert sizes.keys() == model.files.keys() - {".gitattributes"}
    assert {"config.json", "tokenizer.json", "export.json", "onnx/decoder_model_merged_quantized.onnx"} <= sizes.keys()
    assert "notes.txt" not in sizes
    card = ModelCard(model.files["README.md"].decode()).data
    assert (card.library_name, "transformers.js" in card.tags) == ("transformers.js", True)
    assert {"index.html", "page.json", "model/onnx/encoder_model_quantized.onnx"} <= space.files.keys()
    assert ModelCard(space.files["README.md"].decode()).data.sdk == "static"
    with pytest.raises(ValueError, match="results belong to the card of a checkpoint"):
        push_to_hub(tmp_path / "out", "out", results=["results.json"])
    (tmp_path / "page" / "page.json").unlink()
    (tmp_path / "page" / "page.json").symlink_to(tmp_path / "out" / "notes.txt")
    with pytest.raises(ValueError, match=r"page\.json is a link"):
        push_to_hub(tmp_path / "page", "page")


def test_private_stays_private(hub, light):
    push_to_hub(light, "light")
    uploads, commits = list(hub.uploads), list(hub.repositories["alice/light"].commits)
    with pytest.raises(ValueError, match="alice/light exists and is public, so nothing was uploaded"):
        push_to_hub(light, "light", private=True, revision="secret")
    assert (hub.uploads, list(hub.repositories["alice/light"].commits)) == (uploads, commits)
    assert "secret" not in hub.repositories["alice/light"].branches
    push_to_hub(light, "secret", private=True)
    assert hub.repositories["alice/secret"].private


def test_a_network_cut_in_the_middle_of_an_upload(hub, copy, light):
    """Nobody sees a part of it; the second try sends only what is missing."""
    push_to_hub(light, "light")
    repository = hub.repositories["alice/light"]
    before = dict(repository.files)
    model = AutoModelForSeq2SeqLM.from_pretrained(light)
    torch.nn.init.normal_(model.lm_head.output.weight)
    (copy / "model.safetensors").unlink()
    model.save_pretrained(copy, max_shard_size="20KB")
    hub.uploads.clear()
    hub.cut_uploads_after = 2
    with pytest.raises(ConnectionError, match=r"connection to .* broke .*: run the same command again"):
        push_to_hub(copy, "light")
    assert len(set(hub.uploads)) == 2
    assert repository.files == before
    hub.cut_uploads_after = None
    push_to_hub(copy, "light")
    shards = list(copy.glob("model-*.safetensors"))
    assert len(shards) > 3
    assert len(hub.uploads) == len(set(hub.uploads)) == len(shards)
    assert all(repository.files[shard.name] == shard.read_bytes() for shard in shards)


def test_a_hub_without_xet(hub, light, monkeypatch):
    """The client uploads by Xet where hf_xet is installed; a Hub of one's own may not know it."""
    pytest.importorskip("hf_xet")
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", False)
    with pytest.raises(ConnectionError, match=r"does not speak Xet.*HF_HUB_DISABLE_XET=1"):
        push_to_hub(light, "light")
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    assert push_to_hub(light, "light").oid == hub.repositories["alice/light"].branches["main"]


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_network_cut_at_the_commit(hub, light, when):
    hub.cut_commit = when
    with pytest.raises(ConnectionError, match="run the same command again"):
        push_to_hub(light, "light")
    repository, sent = hub.repositories["alice/light"], list(hub.uploads)
    assert len(repository.commits) == (1 if when == "before" else 2)
    hub.cut_commit = None
    assert push_to_hub(light, "light").oid == repository.branches["main"]
    assert len(repository.commits) == 2
    assert hub.uploads == sent


def test_no_hub_and_somebody_elses_commit(hub, light, monkeypatch):
    push_to_hub(light, "light")
    repository = hub.repositories["alice/light"]
    validate = HfApi._validate_yaml

    def meanwhile(*arguments, **options):
        repository.commit("main", dict(repository.files) | {"config.json": b"{}"}, "Meanwhile")
        return validate(*arguments, **options)

    monkeypatch.setattr(HfApi, "_validate_yaml", meanwhile)
    with pytest.raises(OSError, match="somebody else changed alice/light in the meantime"):
        push_to_hub(light, "light")
    assert repository.files["config.json"] == b"{}"
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ConnectionError, match=r"connection to http://127\.0\.0\.1:9 broke"):
        push_to_hub(light, "light")


def test_what_is_no_checkpoint_to_share(hub, copy, tiny_marian, tmp_path):
    def refused(error, message, folder=copy, **options):
        with pytest.raises(error, match=message):
            push_to_hub(folder, "light", **options)

    refused(FileNotFoundError, "nowhere holds no config.json", tmp_path / "nowhere")
    refused(FileNotFoundError, "no config.json", tmp_path)
    refused(ValueError, "'marian' model.*hf upload", tiny_marian)
    refused(FileNotFoundError, "results.json is not there", results=[tmp_path / "results.json"])
    refused(ValueError, "holds no results", results=[copy / "config.json"])
    (copy / "low_rank.py").rename(copy / "low_rank.txt")
    refused(FileNotFoundError, "lacks low_rank.py")
    (copy / "low_rank.txt").rename(copy / "low_rank.py")
    (copy / "compression.json").write_text("{")
    refused(ValueError, "compression.json")
    (copy / "model.safetensors").write_bytes((copy / "model.safetensors").read_bytes()[:-10])
    refused(ValueError, "model.safetensors is damaged")
    assert not hub.repositories


def test_a_card_of_ones_own_is_kept(hub, copy, results):
    """What the user wrote is pushed; only the results enter its metadata."""
    own = "---\nlicense: mit\npipeline_tag: translation\n---\n# Mine\n\nAll *mine*.\n"
    (copy / "README.md").write_text(own)
    push_to_hub(copy, "light")
    files = hub.repositories["alice/light"].files
    assert files["README.md"].decode() == own
    push_to_hub(copy, "light", results=[results])
    card = ModelCard(hub.repositories["alice/light"].files["README.md"].decode())
    assert card.text == ModelCard(own).text
    assert card.data.license == "mit"
    assert [(result.metric_type, result.metric_value) for result in card.data.eval_results] == [
        ("bleu", 41.25),
        ("chrf", 62.5),
    ]


def test_the_command(hub, light, results, lightformers):
    arguments = ["--private", "--branch", "v2", "-m", "Second", "--results", results]
    code, out, _ = lightformers("push", light, "light", *arguments)
    assert code == 0
    repository = hub.repositories["alice/light"]
    assert repository.private
    assert repository.messages[1:] == ["Second"]
    commit = repository.branches["v2"]
    assert f"{hub.endpoint}/alice/light at commit {commit}" in out
    assert f'from_pretrained("alice/light", revision="{commit}")' in out
    card = ModelCard(repository.commits[commit]["README.md"].decode())
    assert card.data.model_name == "light"
    assert card.data.eval_results[0].metric_value == 41.25


SECRETS = [
    *("tokenizer_secret.txt", "my_private_vocab.json", "secrets.model", "tokenizer.json.bak", "private.spm"),
    *("chat_template_secret.txt", "tokenizer_config.json.orig", "model-secret-of-mine.safetensors", "vocab.txt"),
]


def test_a_secret_beside_a_model_stays_there(hub, copy):
    before = preview_push(copy, "alice/light")
    for name in SECRETS:
        (copy / name).write_text("secret")
    (copy / "tokenizer").mkdir()
    assert preview_push(copy, "alice/light") == before
    push_to_hub(copy, "light")
    pushed = hub.repositories["alice/light"].files
    assert pushed.keys() - {".gitattributes"} == before.keys()
    assert {name: len(pushed[name]) for name in before} == before
    assert {"source.spm", "vocab.json", "tokenizer_config.json", "README.md"} <= before.keys()


@pytest.mark.parametrize("name", ["source.spm", "chat_template.jinja", "compression.json", "README.md", "low_rank.py"])
def test_a_link_out_of_the_folder(hub, copy, tmp_path, name):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / name).write_bytes((copy / name).read_bytes() if (copy / name).exists() else b"secret")
    (copy / name).unlink(missing_ok=True)
    (copy / name).symlink_to(outside / name)
    with pytest.raises(ValueError, match=f"{name} is a link to .*outside"):
        push_to_hub(copy, "light")
    assert not hub.repositories


def test_a_dry_run_lists_and_sends_nothing(hub, light, monkeypatch, lightformers):
    monkeypatch.delenv("HF_TOKEN")
    code, out, _ = lightformers("push", light, "alice/light", "--dry-run")
    assert code == 0
    for name, size in preview_push(light, "alice/light").items():
        assert f"{size:,}  {name}\n" in out
    assert not hub.repositories
    assert not hub.requests


def test_what_is_converted_is_pushed_at_once(hub, tiny_marian, tmp_path, monkeypatch, lightformers):
    options = {"rank": 8, "method": "paper", "progress": False}
    convert(tiny_marian, tmp_path / "light", push_to_hub="alice/at-once", private=True, **options)
    repository = hub.repositories["alice/at-once"]
    assert (len(repository.commits), repository.private) == (2, True)  # that of a new repository, and ours
    assert {"config.json", "model.safetensors", "compression.json", "README.md"} <= {*repository.files}
    command = ["convert", tiny_marian, tmp_path / "again", "--rank", 8, "--method", "paper", "--overwrite", "-q"]
    for endpoint, code in ((hub.endpoint, 0), ("http://127.0.0.1:9", 1)):
        monkeypatch.setattr(constants, "ENDPOINT", endpoint)
        found, _, error = lightformers(*command, "--push-to-hub", "alice/again")
        assert found == code
        assert (tmp_path / "again" / "model.safetensors").is_file()
    assert f"again is complete: repeat the push with `lightformers push {tmp_path}/again" in error
    monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint)
    hub.datasets.add("alice/corpus")
    taken = r"alice/corpus is no repository of this type .*data set or a Space.*give another name.*kept is complete"
    with pytest.raises(OSError, match=taken):
        convert(tiny_marian, tmp_path / "kept", push_to_hub="alice/corpus", **options)
    assert (tmp_path / "kept" / "model.safetensors").is_file()
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(PermissionError, match="log in"):  # before the conversion
        convert(tiny_marian, tmp_path / "none", push_to_hub="alice/none", **options)
    assert not (tmp_path / "none").exists()
