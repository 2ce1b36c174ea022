"""Few texts: what is random is drawn, tokenized and translated in no time."""

import pytest


@pytest.fixture
def few_random_texts(monkeypatch):
    """So many are drawn where there is no text."""
    monkeypatch.setattr("lightformers_hf.workflows.run.RANDOM_TEXTS", 200)
