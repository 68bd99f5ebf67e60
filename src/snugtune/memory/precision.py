"""Loss scaling for fp16: gradients too small for half precision are carried at `scale` times their size.

Trainable weights are float32 whatever the base is; only the forward and the flow of gradients are in half. The scale is
plain data and lives outside of the step, since it follows what the gradients turned out to be.

Micikevicius et al., arXiv 1710.03740.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class LossScale:
    """Halved when a gradient overflows (that step is skipped), doubled after `growth_interval` good steps in a row."""

    scale: float = 2.0**16
    growth_interval: int = 2000
    good_steps: int = 0

    def update(self, *, finite: bool) -> None:
        """Take note of one step's gradients."""
        if not finite:
            self.scale = max(self.scale / 2, 1.0)
            self.good_steps = 0
            return
        self.good_steps += 1
        if self.good_steps >= self.growth_interval:
            self.scale *= 2
            self.good_steps = 0
