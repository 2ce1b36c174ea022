"""Fully sharded training (FSDP2) of models whose token tables are tied."""

from __future__ import annotations

import torch
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers import PreTrainedModel, Trainer


def prepare_sharding(trainer: Trainer) -> None:
    """Make the model of an FSDP2 run ready for accelerate to shard; before `trainer.train()`, on every process.

    A parameter must not lie in two FSDP groups, and accelerate, which makes one of every layer and one of what is
    left, knows of a shared input and output table, but not of those that encoder and decoder have beside it. So the
    modules that share parameters become one group here; accelerate leaves alone what is sharded. Of the layer classes
    in `_no_split_modules` those are named to it that the model has. Without FSDP2 nothing is done.
    """
    if not trainer.accelerator.is_fsdp2:
        return
    plugin, model = trainer.accelerator.state.fsdp_plugin, trainer.model
    tables = {model.get_input_embeddings(), *getattr(model, "lm_head", torch.nn.Module()).modules()}
    classes = {type(module).__name__ for module in model.modules() if module not in tables}
    if plugin.transformer_cls_names_to_wrap is None:
        plugin.transformer_cls_names_to_wrap = sorted(classes & set(model._no_split_modules or ()))
    model.is_remote_code = lambda: False  # checkpoints would take torch's code of the sharded class for the model's
    owners: dict[torch.nn.Parameter, list[torch.nn.Module]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(parameter, []).append(module)
    tied = list(dict.fromkeys(module for modules in owners.values() if len(modules) > 1 for module in modules))
    inner = {part for module in tied for part in module.modules() if part is not module}
    if tied:
        group = [module for module in tied if module not in inner]
        fully_shard(
            group,
            reshard_after_forward=False,  # the output layer needs what the first embedding has gathered
            mp_policy=plugin.mixed_precision_policy or MixedPrecisionPolicy(),
            offload_policy=plugin.cpu_offload,
        )
        output = model.get_output_embeddings()  # in a low-rank output layer only a part of what is sharded
        whole = next((module for module in group if output in set(module.modules())), output)
        model.get_output_embeddings = lambda: whole


def gather_model(trainer: Trainer) -> PreTrainedModel | None:
    """The model of an FSDP2 run as it was before it was sharded, on the CPU of the process that saves; None on others.

    To be called by every process. Its `save_pretrained` stores tied tables once, with the architecture's own code;
    the checkpoints that `Trainer` writes meanwhile load as well, but hold every tied table under all of its names.
    """
    state = trainer.accelerator.get_state_dict(trainer.model)
    if not trainer.args.should_save:
        return None
    model_class = next(base for base in type(trainer.model).__mro__ if not issubclass(base, FSDPModule))
    model = model_class(trainer.model.config)
    model.load_state_dict(state)
    model.generation_config = trainer.model.generation_config
    return model
