"""Say how much memory you have; get the fastest fine-tune that fits, kept inside it, and ship the result."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from snugtune.api import doctor, evaluate, plan, train
    from snugtune.inspecting import inspect
    from snugtune.merging import merge
    from snugtune.recipe import Recipe

__all__ = ["Recipe", "doctor", "evaluate", "inspect", "merge", "plan", "train"]

_HOMES = {"Recipe": "snugtune.recipe", "inspect": "snugtune.inspecting", "merge": "snugtune.merging"} | dict.fromkeys(
    ("doctor", "evaluate", "plan", "train"), "snugtune.api"
)


def __getattr__(name: str) -> Any:
    # On first use, so that `import snugtune` costs nothing and brings no torch.
    if name not in _HOMES:
        raise AttributeError(f"module 'snugtune' has no attribute '{name}'")
    return getattr(importlib.import_module(_HOMES[name]), name)
