"""The laboratory, for recovery tests."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

from laboratory import isolated_spec, lab, lab_on, same, shared, text_data, undisturbed

__all__ = ["isolated_spec", "lab", "lab_on", "same", "shared", "text_data", "undisturbed"]
