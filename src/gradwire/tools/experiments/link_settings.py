"""What the command line says about the exchange of gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["LinkSettings"]


@dataclass(frozen=True, kw_only=True)
class LinkSettings:
    """The method, and the options of its link.

    Attributes:
        method: spec of the method.
        exclude, min_numel, warmup_steps, collective, fallback, fallback_limit: as in ``gradwire.attach``.
        check_every: as in ``gradwire.attach``; None: as whoever uses the settings has it, by default never.
        seed: of the method's draws.
    """

    method: str = "fp32"
    exclude: tuple[str, ...] = ()
    min_numel: int | None = None
    warmup_steps: int = 0
    collective: str = "auto"
    fallback: str | None = None
    fallback_limit: float | None = None
    check_every: int | None = None
    seed: int = 0

    def link_options(self) -> dict[str, Any]:
        """Return the options of ``gradwire.attach``."""
        return {
            "exclude": self.exclude,
            "min_numel": self.min_numel,
            "warmup_steps": self.warmup_steps,
            "collective": self.collective,
            "fallback": self.fallback,
            "fallback_limit": self.fallback_limit,
            "check_every": self.check_every or 0,
            "seed": self.seed,
        }
