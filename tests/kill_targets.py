"""Of `kills.py`: pushes to a Hub and trainings, killed at random moments as writers of folders are."""

import os
import shutil
from contextlib import suppress
from pathlib import Path

from hub_server import Hub
from kills import VERSIONS, Killer, digest, start


def finish(work) -> bool:
    """Whether work that nobody kills, in a process of its own, ends well."""
    return os.waitstatus_to_exitcode(os.waitpid(start(work), 0)[1]) == 0


class PushKiller(Killer):
    """Pushes a model to a Hub that holds nothing, an older model, or another's file beside one."""

    def prepare(self, place: Path) -> None:
        """Two versions of a model, a Hub, and a client that knows it."""
        from huggingface_hub import constants
        from huggingface_hub.utils import disable_progress_bars
        from kills import compress_model, prepare_model

        import lightformers_hf.hub  # noqa: F401, once, before there are processes

        prepare_model(place)
        (place / "work").mkdir()
        for version in VERSIONS:
            compress_model(place / "work" / version, version)
        self.folder, self.hub = place / "work" / "new", Hub().__enter__()
        constants.ENDPOINT, constants.HF_HUB_DISABLE_XET = self.hub.endpoint, True
        constants.HUGGINGFACE_CO_URL_TEMPLATE = f"{self.hub.endpoint}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        os.environ["HF_TOKEN"] = "hf_alice"
        disable_progress_bars()
        self.folder_digest = digest(self.folder)
        self.versions = {}
        for version in VERSIONS:
            self.push(version)
            self.versions[version] = self.content()
            self.hub.repositories.clear()

    def push(self, version: str) -> None:
        """Push a version."""
        from lightformers_hf import push_to_hub

        push_to_hub(self.folder.with_name(version), "alice/model")

    def content(self) -> dict[str, bytes] | None:
        """What the branch holds."""
        repository = self.hub.repositories.get("alice/model")
        return repository and repository.files

    def work(self) -> None:
        """What is killed."""
        self.push("new")

    def begin(self) -> dict[str, bytes] | None:
        """The Hub as it is, empty, or with the older version."""
        if self.random.random() < 0.5:
            self.hub.repositories.clear()
            self.hub.store.clear()
        elif not finish(lambda: self.push("old")):
            self.counts["harmed"] += 1
        return self.content()

    def judge(self, before: dict[str, bytes] | None) -> None:
        """The branch holds what it held, the repository's first commit or all of the new; the next push ends well."""
        found = self.content()
        fresh = before is None and (found is None or set(found) == {".gitattributes"})
        if not (fresh or found in (before, self.versions["new"])):
            self.counts["partial"] += 1
        if (
            digest(self.folder) != self.folder_digest
            or not finish(self.work)
            or self.content() != self.versions["new"]
        ):
            self.counts["harmed"] += 1


class TrainingKiller(Killer):
    """Trains a tiny model for some steps with a checkpoint at each; goes on after the kill, which may hit again."""

    STEPS = 4

    def prepare(self, place: Path) -> None:
        """A model, and the weights of a training that nobody killed."""
        import torch
        from kills import prepare_model
        from transformers import MarianMTModel

        prepare_model(place)
        self.output = place / "work" / "run"
        self.output.parent.mkdir()
        generator = torch.Generator().manual_seed(0)
        rows = torch.randint(1, 50, (8, 6), generator=generator).tolist()
        self.data = [{"input_ids": row, "attention_mask": [1] * len(row), "labels": row[::-1]} for row in rows]
        self.model = MarianMTModel.from_pretrained(place / "teacher")
        if not finish(self.work):
            raise RuntimeError("the training fails by itself")
        self.expected = digest_of_weights(self.output)

    def work(self) -> None:
        """Train from the last whole checkpoint, or from the beginning."""
        from transformers import PrinterCallback, Seq2SeqTrainingArguments

        from lightformers_hf.recovery import RecoveryTrainer, find_last_checkpoint

        arguments = Seq2SeqTrainingArguments(
            str(self.output), max_steps=self.STEPS, save_steps=1, save_total_limit=2, per_device_train_batch_size=2,
            use_cpu=True, disable_tqdm=True, report_to="none", logging_steps=1, seed=1,
        )  # fmt: skip
        trainer = RecoveryTrainer(self.model, arguments, train_dataset=self.data)
        trainer.remove_callback(PrinterCallback)
        trainer.train(resume_from_checkpoint=find_last_checkpoint(self.output))
        trainer.save_model()

    def begin(self) -> None:
        """Nothing, or what the kill before left."""
        if self.random.random() < 0.7 or digest_of_weights(self.output) == self.expected:
            shutil.rmtree(self.output, ignore_errors=True)

    def judge(self, before: None) -> None:
        """Gone on with, the training ends with the weights of one that was not killed."""
        if self.random.random() < 0.3:  # the next kill hits what this one left
            return
        if not finish(self.work) or digest_of_weights(self.output) != self.expected:
            self.counts["harmed"] += 1


def digest_of_weights(folder: Path) -> bytes | None:
    """The weights that a training left at its end."""
    with suppress(FileNotFoundError):
        return (folder / "model.safetensors").read_bytes()
    return None
