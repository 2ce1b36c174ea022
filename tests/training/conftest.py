"""The scripts import their siblings, as they do when Python runs them from their folder."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "training"))
