"""Run a script in this process, as a shell would."""

import sys

import pytest


@pytest.fixture
def run_script(monkeypatch, capfd):
    """Run the `main` of a script's module with words; gives exit code, stdout and stderr."""
    import common

    def run(script, *words):
        monkeypatch.setattr(sys, "argv", [script.__file__, *map(str, words)])
        capfd.readouterr()
        try:
            common.run_script(script.main)
        except SystemExit as end:
            return end.code or 0, *capfd.readouterr()
        return 0, *capfd.readouterr()

    return run
