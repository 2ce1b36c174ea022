"""Options of a script as it gets them, and what its run has left."""

import json


def command(base, **changes):
    """The command line of the options `base`, changed; `None` leaves one out."""
    options = {name: value for name, value in (base | changes).items() if value is not None}
    return [text for name, value in options.items() for text in (_spelled(name), str(value))]


def _spelled(name):
    """An option, with dashes; a field of the model keeps its name."""
    return f"--{name if '.' in name else name.replace('_', '-')}"


def losses(folder):
    """The training losses of a run, in order."""
    history = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    return [entry["loss"] for entry in history if "loss" in entry]
