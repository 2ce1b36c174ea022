"""Surroundings of a command: what is printed and where, closed streams, signals and proxies."""

from __future__ import annotations

import logging
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from typing import Any

LIBRARIES = ("transformers", "datasets", "huggingface_hub")  # each has separate levels and handlers
PROXY = re.compile(r"(http|https|all)_proxy", re.IGNORECASE)  # variables of the environment
GRACE = 5.0  # seconds from SIGTERM to the end of a process; a container's runtime waits for ten
CLOSED = set[str]()  # standard streams that were closed when the process began


@contextmanager
def loudness(quiet: bool, verbose: bool, *, chatter: Any, hush: bool) -> Iterator[None]:
    """Inside, print as much as was asked for; what is printed goes to `chatter`, nowhere where it is to hush."""
    with ExitStack() as stack:
        if verbose and not quiet:
            root, handler = logging.getLogger(), logging.StreamHandler()
            handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
            for logger in (root, *map(logging.getLogger, LIBRARIES)):
                stack.callback(_direct, logger, logger.level, logger.propagate, logger.handlers)
                _direct(logger, logging.INFO, True, [handler] if logger is root else [])
        if quiet:
            nowhere = stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
            stack.enter_context(redirect_stderr(nowhere))
            stack.callback(logging.disable, logging.root.manager.disable)
            logging.disable(logging.WARNING)
            chatter = nowhere if hush else chatter
        if chatter:
            stack.enter_context(redirect_stdout(chatter))
        yield


def _direct(logger: logging.Logger, level: int, propagate: bool, handlers: list[logging.Handler]) -> None:
    logger.setLevel(level)
    logger.propagate, logger.handlers = propagate, handlers


def open_streams() -> None:
    """Open null devices for standard streams that are closed, as by `2>&-`: other files would take their numbers."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            CLOSED.add(name)
            nowhere = os.open(os.devnull, os.O_RDWR)  # which takes the lowest free number
            if nowhere != number:
                os.dup2(nowhere, number)
                os.close(nowhere)
            mode = "r" if name == "stdin" else "w"
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115, for good


def check_open(name: str, remedy: str) -> None:
    """Raise `ValueError` where a standard stream is closed that is needed."""
    if name in CLOSED:
        raise ValueError(f"standard {'input' if name == 'stdin' else 'output'} is closed: {remedy}")


def end_on_sigterm() -> None:
    """Make SIGTERM an error like Ctrl-C, so that partial output is removed and worker processes end.

    Python handles a signal only between two of its instructions. If a library computes or waits for longer than
    `GRACE`, the process ends without that.
    """
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    if not hasattr(os, "register_at_fork"):  # Windows, which sends no SIGTERM
        return
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)  # gets the number of a signal when it arrives
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))

    def watch() -> None:
        while os.read(woken, 1) != bytes([signal.SIGTERM]):
            pass
        time.sleep(GRACE)
        os._exit(128 + signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


@contextmanager
def without_proxies() -> Iterator[None]:
    """Inside, no connection goes through a proxy, as those of a page that is served and read on this machine."""
    found = {name: os.environ.pop(name) for name in [*os.environ] if PROXY.fullmatch(name)}
    try:
        yield
    finally:
        os.environ.update(found)
