"""Share a checkpoint: one commit on the Hub holds everything that users without this package need to load and train
it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING

from huggingface_hub import (
    CommitOperationAdd,
    CommitOperationDelete,
    HfApi,
    ModelCard,
    ModelInfo,
    constants,
    get_token,
)
from huggingface_hub.errors import HfHubHTTPError, HTTPError  # HTTPError: of the client's HTTP library
from huggingface_hub.utils import validate_repo_id
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel
from transformers import tokenization_utils_base as tokenization
from transformers.dynamic_module_utils import get_relative_import_files

from . import models
from .conversion.card import MARK, evaluation_results, model_card, read_results
from .conversion.report import ModelFacts, read_report
from .deprecated import renamed_arguments, warn_renamed
from .files import CARD_FILE, EXPORT_FILE, MANIFEST_FILE, PAGE_FILE, RECORD_FILE, REPORT_FILE, STATE_FILE, read_json
from .in_memory import AnyModel, on_disk
from .loading import CheckpointReader, load_pretrained, load_skeleton, stored_tensors
from .models.configuration_lightformer import FactorizedConfig
from .results import Result

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Files that belong to a model; other files of its folder (optimizer states, logs, data) are not sent.
MODEL_FILES = (
    *("config.json", "generation_config.json", "model.safetensors", "model.safetensors.index.json"),
    "model-{0}-of-{0}.safetensors".format("[0-9]" * 5),
)
# Files of every tokenizer class; a class lists further ones.
TOKENIZER_FILES = (
    tokenization.TOKENIZER_CONFIG_FILE,
    tokenization.FULL_TOKENIZER_FILE,
    tokenization.SPECIAL_TOKENS_MAP_FILE,
    tokenization.ADDED_TOKENS_FILE,
    "chat_template.jinja",
)
# Files that the classes of convertible models name; an earlier push may have uploaded them.
VOCABULARY_FILES = (
    *("vocab.json", "target_vocab.json", "source.spm", "target.spm", "spiece.model", "sentencepiece.bpe.model"),
    *("merges.txt", "vocab.txt", "tokenizer.model"),
)


@dataclass(frozen=True)
class Push(Result):
    """Result of a push."""

    name: str  # name of the repository, `user/model`
    url: str  # of its page
    commit: str  # its hash, which pins the model: `from_pretrained(name, revision=commit)`
    kind: str = "checkpoint"  # or `model` of another program, or `space`

    @property
    def oid(self) -> str:
        """The name of `commit` in version 0.1."""
        warn_renamed("oid", "commit")
        return self.commit

    def parts(self) -> list[str]:
        """Return where the model is, and how it is loaded."""
        if self.kind != "checkpoint":
            return [f"{self.url} at commit {self.commit}."]
        return [
            f"{self.url} at commit {self.commit}.",
            f'Load it: from_pretrained("{self.name}", revision="{self.commit}"), and with trust_remote_code=True, '
            "the tokenizer too, where lightformers_hf is not installed.",
        ]


@renamed_arguments(folder="model")
def push_to_hub(
    model: AnyModel,
    name: str,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    private: bool = False,
    revision: str | None = None,
    message: str | None = None,
    results: Sequence[str | Path] = (),
) -> Push:
    """Push a checkpoint of this package to the Hub: weights, configurations, tokenizer, code, report and model card.

    A folder that `export` wrote becomes a model repository with all its files, and a page that `lightformers web`
    wrote a static Space.

    One commit contains all files. It also removes files of an earlier push that the checkpoint does not contain. Other
    files of the repository stay. After an interruption the same call resumes: files that arrived are not sent again.
    The token is that of huggingface_hub (`hf auth login`, or HF_TOKEN).

    Args:
        model: the folder that `convert`, a training run, `export` or `lightformers web` wrote, or a loaded model of
            this package.
        name: `user/model`, or `model` in the namespace of the token. A missing repository is created.
        tokenizer: that of a loaded model.
        private: make the repository private. An existing public repository is refused.
        revision: the branch of the commit, created if it is missing. Default: `main`.
        message: message of the commit.
        results: files written by `lightformers evaluate --json`, for the card's tables and the Hub's.

    Only files with the names of a model's parts are sent, and no file by a link out of the folder (`preview_push`
    lists them). A `README.md` in the folder without the mark of a generated card is the user's card. It is pushed
    unchanged, with the results in its metadata.

    Raises:
        FileNotFoundError: there is no checkpoint in `folder`, or a part of it or a file of results is missing.
        ValueError: it is not a checkpoint of this package, its parts do not match, or an argument is out of range.
        PermissionError: no token, a token that the Hub refuses, or a token without write access.
        ConnectionError: the Hub was not reachable, or the connection broke.
        OSError: another error of the Hub.

    Example:
        >>> push_to_hub("recovered", "me/opus-mt-de-en-light", private=True)
    """
    if revision and re.fullmatch(r"[0-9a-f]{40}", revision):
        raise ValueError(f"revision {revision} is a commit, which nothing can be added to: give the name of a branch")
    with on_disk(tokenizer, model) as (place,):
        folder = Path(os.path.expanduser(place))
        kind, exported = _exported_files(folder, results)
        network, files, measured = (None, exported, []) if exported else _collect(folder, name, results)
        validate_repo_id(name)
        _check_token()
        repository = {"repo_type": "space" if kind == "space" else "model"}
        with _explain_errors(name):
            api, sdk = HfApi(library_name="lightformers_hf"), "static" if kind == "space" else None
            name = api.create_repo(name, private=private or None, exist_ok=True, space_sdk=sdk, **repository).repo_id
        with _explain_errors(name):
            there = _find_branch(api, name, revision, private, repository)
            operations: list = [CommitOperationAdd(path.relative_to(folder).as_posix(), path) for path in files]
            if network is not None:
                operations.append(CommitOperationAdd(CARD_FILE, _card(folder, network, name, measured).encode()))
                operations += _deletions(there, operations)
            commit = api.create_commit(
                name,
                operations,
                commit_message=message or f"Upload {network.config.model_type if network else kind}",
                revision=revision,
                parent_commit=there.sha,
                **repository,
            )
    return Push(commit.repo_url.repo_id, str(commit.repo_url), commit.oid, kind)


def check_push(name: str) -> None:
    """Raise `ValueError` for a name that no repository can have, and `PermissionError` without a token."""
    validate_repo_id(name)
    _check_token()


def push_folder(folder: Path, name: str, *, private: bool, results: Sequence[str | Path] = ()) -> Push:
    """Push a folder that was just written. An error states that the folder is complete, and how to repeat the push."""
    try:
        return push_to_hub(folder, name, private=private, results=results)
    except (OSError, ValueError) as error:
        again = f"lightformers push {folder} {name}" + " --private" * private
        again += "".join(f" --results {file}" for file in results)
        raise type(error)(f"{error}. {folder} is complete: repeat the push with `{again}`") from error


def preview_push(folder: str | Path, name: str, *, results: Sequence[str | Path] = ()) -> dict[str, int]:
    """{file: bytes} of all that `push_to_hub` would upload; the Hub is not asked. Args, Raises: see there."""
    folder = Path(os.path.expanduser(folder))
    if exported := _exported_files(folder, results)[1]:
        validate_repo_id(name)
        return {path.relative_to(folder).as_posix(): path.stat().st_size for path in exported}
    model, files, measured = _collect(folder, name, results)
    sizes = {path.name: path.stat().st_size for path in files}
    return sizes | {CARD_FILE: len(_card(folder, model, name, measured).encode())}


def _exported_files(folder: Path, results: Sequence[str | Path]) -> tuple[str, list[Path]]:
    """Return the kind of a folder on the Hub, and the files of an export or a page by its manifest."""
    kind = "space" if (folder / PAGE_FILE).is_file() else "model" if (folder / EXPORT_FILE).is_file() else "checkpoint"
    if kind == "checkpoint":
        return kind, []
    if results:
        raise ValueError(f"results belong to the card of a checkpoint, and {folder} is an export: omit --results")
    refuse_links(folder, paths := [folder / name for name in read_json(folder / MANIFEST_FILE).get("files", ())])
    if not paths or not all(path.exists() for path in paths):
        raise FileNotFoundError(f"{folder} is not complete: write it again with `lightformers export` or `web`")
    return kind, sorted(path for path in paths if path.is_file())


def _collect(folder: Path, name: str, results: Sequence[str | Path]) -> tuple[PreTrainedModel, list[Path], list[dict]]:
    """The model (without storage), the files to upload, and the results. All faults of the card are logged."""
    validate_repo_id(name)
    model = _check_model(folder)
    files = _files(folder, model.config)
    measured = [read_results(Path(file), model.num_parameters()) for file in results]
    _card(folder, model, name, measured)
    return model, files, measured


def _find_branch(api: HfApi, name: str, revision: str | None, private: bool, kind: dict) -> ModelInfo:
    """The branch to commit to, made if it is not there. Raises `ValueError` for a public one that must be private."""
    there = api.repo_info(name, **kind)
    if private and not there.private:
        raise ValueError(
            f"{name} exists and is public, so nothing was uploaded: make it private in its settings on the Hub, "
            "or give another name"
        )
    if revision:
        api.create_branch(name, branch=revision, exist_ok=True, **kind)
        there = api.repo_info(name, revision=revision, **kind)
    return there


def _deletions(there: ModelInfo, adds: list[CommitOperationAdd]) -> list[CommitOperationDelete]:
    """For files that an earlier push of this package put there, and that this one does not contain."""
    code = {file.name for file in Path(models.__file__).parent.glob("*.py")}
    patterns = (*MODEL_FILES, *TOKENIZER_FILES, *VOCABULARY_FILES, REPORT_FILE, *code)
    stale = {file.rfilename for file in there.siblings or ()} - {operation.path_in_repo for operation in adds}
    ours = (path for path in sorted(stale) if "/" not in path and any(fnmatch(path, one) for one in patterns))
    return [CommitOperationDelete(path) for path in ours]


def _check_model(folder: Path) -> PreTrainedModel:
    """The model that a folder holds, without storage, once it is sure that its weights are whole, and no pickle."""
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"{folder} holds no config.json: give a folder that convert or a training run wrote")
    config = load_pretrained(AutoConfig, folder)
    if not isinstance(config, FactorizedConfig):
        raise ValueError(
            f"{folder} holds a {config.model_type!r} model, which needs nothing of this package: upload it with "
            "`hf upload`, or convert it first"
        )
    if not any(folder.glob("model*.safetensors")):
        raise FileNotFoundError(f"{folder} holds no safetensors: load the model and save it with save_pretrained")
    model = load_skeleton(folder)
    reader, ties = CheckpointReader(folder), model.get_expanded_tied_weights_keys(all_submodels=True)
    expected = {name: tuple(tensor.shape) for name, tensor in stored_tensors(model).items()}
    found = {ties.get(name, name): shape for name, shape in reader.shapes().items()}
    if differing := sorted(name for name in expected | found if expected.get(name) != found.get(name)):
        name = differing[0]
        raise ValueError(
            f"the weights in {folder} are not those that its config.json describes: {name} should have the shape "
            f"{expected.get(name)} and has {found.get(name)}; save the model again"
        )
    return model


def _files(folder: Path, config: FactorizedConfig) -> list[Path]:
    """The files to upload, less the card: the model's, the tokenizer's, the report, the code that `auto_map` names."""
    names = [reference for reference in config.auto_map.values() if isinstance(reference, str)]
    code = {folder / f"{name.partition('.')[0]}.py" for name in names}
    try:
        code |= {Path(file) for first in sorted(code) for file in get_relative_import_files(first)}
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"{folder} lacks {Path(error.filename).name}, code that users without the package need: with "
            "lightformers_hf imported, load it and save it again with save_pretrained"
        ) from None
    patterns = (*MODEL_FILES, *_tokenizer_files(folder), REPORT_FILE)
    listed = {path for path in folder.iterdir() if path.is_file() and any(fnmatch(path.name, p) for p in patterns)}
    refuse_links(folder, [*listed, *code, folder / CARD_FILE])
    return sorted(listed | code)


def refuse_links(folder: Path, paths: list[Path]) -> None:
    """Raise `ValueError` for a path that is a link, or whose folder is one."""
    for path in paths:
        if path.resolve() != folder.resolve() / path.relative_to(folder):
            raise ValueError(
                f"{path} is a link to {path.resolve()}: only files of the folder itself are uploaded; put the "
                "file there, or remove the link"
            )


def _tokenizer_files(folder: Path) -> set[str]:
    """The names that files of the folder's tokenizer have: transformers' own, and those that its class lists."""
    if not (folder / tokenization.TOKENIZER_CONFIG_FILE).is_file():
        return {*TOKENIZER_FILES}
    try:
        tokenizer = load_pretrained(AutoTokenizer, folder)
    except (OSError, ValueError, ImportError) as error:
        raise ValueError(f"the tokenizer in {folder} cannot be loaded, so users could not load it: {error}") from error
    return {*TOKENIZER_FILES, *type(tokenizer).vocab_files_names.values()}


def _card(folder: Path, model: PreTrainedModel, name: str, results: Sequence[dict]) -> str:
    """The user's card, or a card generated from the folder's files and the results."""
    file = folder / CARD_FILE
    own = file.read_text(encoding="utf-8") if file.is_file() else MARK
    if MARK not in own:
        card = ModelCard(own)
        if results:
            card.data.model_name = name.rpartition("/")[2]
            card.data.eval_results = evaluation_results(results, card.data.pipeline_tag or "translation")
        return str(card) if results else own
    file, steps = folder / STATE_FILE, read_json(folder / STATE_FILE).get("global_step")
    result = read_json(folder / RECORD_FILE).get("result")
    if isinstance(result, dict):  # a recovery keeps the best, or none
        file, steps = folder / RECORD_FILE, result.get("best_step")
    if not isinstance(steps, int | None):
        raise ValueError(f"the number of steps in {file} is {steps!r}: expected a whole number")
    report = read_report(folder / REPORT_FILE)
    return model_card(ModelFacts.of(model), report, name=name, steps=steps, results=results)


def _check_token() -> None:
    """Raise `PermissionError` without a token, or with one whose characters would end up in an error's text."""
    token = get_token()
    if token is None:
        raise PermissionError("no token of the Hub: log in with `hf auth login`, or set HF_TOKEN")
    if not re.fullmatch(r"[!-~]+", token):
        raise PermissionError("the Hub's token has characters that no token has: log in again, or set HF_TOKEN again")


@contextmanager
def _explain_errors(name: str) -> Iterator[None]:
    """Describe a failed request to the Hub in one sentence, with the remedy."""
    try:
        yield
    except (HTTPError, OSError, RuntimeError) as error:
        cause = error
        while isinstance(cause, RuntimeError) and cause.__cause__ is not None:  # the client wraps errors of an upload
            cause = cause.__cause__
        raise _explain(cause, name) from error


def _explain(error: BaseException, name: str) -> OSError:
    if isinstance(error, OSError) and not isinstance(error, (HTTPError, ConnectionError, TimeoutError)):
        return error  # an error of this machine, not of the Hub
    again = "run the same command again: complete files are not sent twice, and nobody sees a part of the upload"
    if "xet-write-token" in str(error) and "404" in str(error):  # request of the client before it uploads large files
        return ConnectionError(
            f"{constants.ENDPOINT} does not speak Xet, which hf_xet uploads by: set HF_HUB_DISABLE_XET=1 and {again}"
        )
    if not isinstance(error, HfHubHTTPError):
        reason = str(error).partition("\n")[0] or type(error).__name__
        return ConnectionError(f"the connection to {constants.ENDPOINT} broke ({reason}): {again}")
    status = error.response.status_code
    said = f"({status}: {' '.join((error.server_message or error.response.reason_phrase).split())})"
    message = {
        401: f"the Hub does not accept the token {said}: `hf auth login`, or another HF_TOKEN",
        403: f"the token may not write to {name} {said}: take one with write access, or a repository of its owner",
        404: f"{name} is no repository of this type {said}: the name may be that of a model, a data set or a Space, "
        "or of a repository that was moved; give another name",
        412: f"somebody else changed {name} in the meantime {said}: {again}",
    }.get(status, f"the Hub refused {name} {said}" + (f": {again}" if status >= 500 else ""))
    return (PermissionError if status in (401, 403) else OSError)(message)
