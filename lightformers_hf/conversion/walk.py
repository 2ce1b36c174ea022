"""The states of sample text on their way through a stack, layer by layer, and what modules get and give there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from threading import Lock, get_ident

from torch import Tensor, nn
from transformers import PreTrainedModel

from .statistics.calibration import stream_of, token_mask
from .statistics.shelf import ROOM, Shelf
from .workers import cast_weights, fast_passes, map_in_order

ENCODED = object()  # in place of the encoder's states, which the shelf has


class _StopError(Exception):
    """Ends a forward pass where nothing that follows is wanted."""


class Walk:
    """The hidden states of all batches on their way through one stack of one model, several batches at a time.

    Args:
        who: student or teacher.
        name: of the stack, `encoder` or `decoder`.
        shelf: has the states, and behind a decoder's those that its encoder gave.
    """

    def __init__(
        self, who: str, name: str, model: PreTrainedModel, batches: Sequence[dict[str, Tensor]], shelf: Shelf
    ):
        self.who, self.name, self.stack, self.device = who, name, getattr(model.model, name), model.device
        self.batches, self.shelf = batches, shelf
        self.recorded: set[str] = set()  # of modules within a layer
        self._kept: dict[int, tuple[list, dict]] = {}  # masks, and what else layers are called with
        self._room, self._lock = ROOM, Lock()
        self._passed = 0  # sublayers of the layer that the states are within
        self._each_batch(self._enter)

    def _each_batch(self, work: Callable[[int], None]) -> None:
        """Do work on every batch."""
        for _ in map_in_order(work, range(len(self.batches)), self.device):
            pass

    def _enter(self, index: int) -> None:
        """Put a batch's states in front of the first layer, and keep what layers get besides while there is room."""
        encoded = self._encoded(index)
        (self.shelf[self.who, self.name, index], *args), kwargs = self._find_arguments(index, encoded)
        tensors = [one for one in (*args, *kwargs.values()) if isinstance(one, Tensor) and one is not encoded]
        size = sum(tensor.nbytes for tensor in tensors)
        with self._lock:
            if size > self._room:
                return
            self._room -= size
        self._kept[index] = [ENCODED if one is encoded else one for one in args], kwargs

    def _arguments(self, index: int) -> tuple[list, dict]:
        """What layers are called with for a batch, behind the states: kept, or found anew."""
        encoded = self._encoded(index)
        if index not in self._kept:
            (_, *args), kwargs = self._find_arguments(index, encoded)
            return args, kwargs
        args, kwargs = self._kept[index]
        return [encoded if one is ENCODED else one for one in args], kwargs

    def _encoded(self, index: int) -> Tensor | None:
        """The encoder's states of a batch, for a decoder."""
        return self.shelf[self.who, "encoder", index] if self.name == "decoder" else None

    def _find_arguments(self, index: int, encoded: Tensor | None) -> tuple[tuple, dict]:
        """What the first layer is called with for a batch."""
        batch = {name: tensor.to(self.device) for name, tensor in self.batches[index].items()}
        found: list[tuple] = []

        def see(module: nn.Module, args: tuple, kwargs: dict) -> None:
            found.append((args, kwargs))
            raise _StopError

        hook = self.stack.layers[0].register_forward_pre_hook(_here(see), with_kwargs=True)
        try:
            if self.name == "decoder":
                memory = {"encoder_hidden_states": encoded, "encoder_attention_mask": batch["attention_mask"]}
                self.stack(batch["decoder_input_ids"], None, use_cache=False, **memory)
            else:
                self.stack(batch["input_ids"], batch["attention_mask"])
        except _StopError:
            pass
        finally:
            hook.remove()
        return found[0]

    def call(self, depth: int, index: int, end: int | None = None) -> Tensor:
        """What the layer's sublayers, those up to `end`, make of the states of a batch where they are."""
        args, kwargs = self._arguments(index)
        states = self.shelf[self.who, self.name, index]
        with fast_passes(self.device):
            for sublayer in _sublayers(self.stack.layers[depth], *args, **kwargs)[self._passed : end]:
                states = sublayer(states)
        return states

    def advance(self, depth: int, end: int | None = None) -> None:
        """Put the states behind the layer, or in front of its sublayer `end`."""

        def pass_batch(index: int) -> None:
            self.shelf[self.who, self.name, index] = self.call(depth, index, end)

        with cast_weights(self.stack.layers[depth]):
            self._each_batch(pass_batch)
        self._passed = end or 0

    def reach(self, name: str, depth: int) -> None:
        """Put the states in front of the sublayer that has a module: what is before it is as it is to be."""
        kind = _within_layer(name).partition("_")[0]
        place = {"self": 0, "encoder": 1}.get(kind, 2 if self.name == "decoder" else 1)
        if place > self._passed:
            self.advance(depth, place)

    def result(self, index: int) -> Tensor:
        """What the stack gives of a batch, once the last layer is passed."""
        return self.stack.layer_norm(self.shelf[self.who, self.name, index])

    def finish(self) -> None:
        """Put the states behind the stack, and forget what modules gave, and behind a decoder the encoder's states."""
        for index in range(len(self.batches)):
            self.shelf[self.who, self.name, index] = self.result(index)
            for key in [(self.who, name, index) for name in self.recorded]:
                if key in self.shelf:
                    del self.shelf[key]
            if self.name == "decoder":
                del self.shelf[self.who, "encoder", index]

    def added_to(self, name: str) -> str | None:
        """The module whose input is what the output of the module `name` is added to; `None` where nothing is."""
        path, _, part = name.rpartition(".")
        before = self.stack.layers[0].normalize_before
        if part == "fc2":
            return f"{path}.final_layer_norm" if before else f"{path}.fc1"
        if part == "out_proj":
            return f"{path}_layer_norm" if before else path
        return None

    def inputs(self, depth: int, batch: int, names: list[str]) -> dict[str, Tensor]:
        """What goes into the modules `names` of a layer, in the order of their calls.

        What follows the last of them is not computed.
        """
        seen: dict[str, Tensor] = {}

        def see(module: nn.Module, arguments: tuple, *, name: str) -> None:
            seen[name] = arguments[0]
            if len(seen) == len(names):
                raise _StopError

        hooks = [self.module(name, depth).register_forward_pre_hook(_here(see, name=name)) for name in names]
        try:
            self.call(depth, batch)
        except _StopError:
            pass
        finally:
            for hook in hooks:
                hook.remove()
        return seen

    def record(self, depth: int, names: list[str], share: float) -> None:
        """Put the states behind the layer, and aside what comes out of its modules, where there are tokens that count.

        Args:
            names: of those modules, or of the same ones in a model with other depths.
            share: of the states that an output is added to, so much is put aside with it.
        """
        places = {name: place for name in names if (place := self.added_to(name)) is not None}

        def pass_batch(index: int) -> None:
            added: dict[str, Tensor] = {}
            masks = {stream: self.mask(stream, index) for stream in ("source", "target")}

            def see_input(module: nn.Module, arguments: tuple, *, name: str) -> None:
                added[name] = arguments[0]

            def see(module: nn.Module, arguments: tuple, output: Tensor, *, name: str) -> None:
                output = output + share * added.pop(name) if name in added else output
                self.shelf[self._key(name, index)] = output[masks[stream_of(name)]]

            hooks = [self.module(name, depth).register_forward_hook(_here(see, name=name)) for name in names]
            for name, place in places.items():
                hooks.append(self.module(place, depth).register_forward_pre_hook(_here(see_input, name=name)))
            try:
                self.shelf[self.who, self.name, index] = self.call(depth, index)
            finally:
                for hook in hooks:
                    hook.remove()

        with cast_weights(self.stack.layers[depth]):
            self._each_batch(pass_batch)
        self.recorded.update(map(_within_layer, names))

    def output(self, name: str, index: int) -> Tensor:
        """Of a module of the layer that was recorded last, tokens×n."""
        return self.shelf[self._key(name, index)]

    def module(self, name: str, depth: int) -> nn.Module:
        """Of a name within the model, at whatever depth, that of this one."""
        return self.stack.layers[depth].get_submodule(_within_layer(name))

    def mask(self, stream: str, index: int) -> Tensor:
        """Where a batch has tokens, where the model is."""
        return token_mask(self.batches[index], stream).to(self.device)

    def _key(self, name: str, index: int) -> tuple[str, str, int]:
        """The same for all layers, so that one takes the room of the one before."""
        return self.who, _within_layer(name), index


def _here(hook: Callable, **options: object) -> Callable:
    """A hook that looks at the passes of this thread alone, with such options."""
    thread = get_ident()

    def look(*arguments: object) -> object:
        return hook(*arguments, **options) if get_ident() == thread else None

    return look


def _sublayers(
    layer: nn.Module,
    mask: Tensor | None,
    memory: Tensor | None = None,
    memory_mask: Tensor | None = None,
    distances: Tensor | None = None,
    private: nn.Module | None = None,
    **kwargs: object,
) -> list[Callable[[Tensor], Tensor]]:
    """The sublayers of a `TransformerLayer`, as its `forward` calls them: hidden states → hidden states."""
    norms = layer if private is None else private
    mask = mask if distances is None else layer.relative_positions(distances, mask)
    calls = [partial(layer.attend, norm=norms.self_attn_layer_norm, attention=layer.self_attn, attention_mask=mask)]
    if memory is not None:
        cross = {"norm": norms.encoder_attn_layer_norm, "attention": layer.encoder_attn}
        calls.append(partial(layer.attend, **cross, key_value_states=memory, attention_mask=memory_mask))
    return [*calls, partial(layer.feed_forward, norm=norms.final_layer_norm, network=layer)]


def _within_layer(name: str) -> str:
    """`model.decoder.layers.3.self_attn.q_proj` → `self_attn.q_proj`."""
    return name.split(".", 4)[4]
