"""How long each entropy coder takes for the digits of a method, on this machine."""

from __future__ import annotations

from functools import cache

import torch

from gradwire.exchange.drivers import Meter, simulate_ranks
from gradwire.exchange.method import Method
from gradwire.exchange.protocols import Context
from gradwire.exchange.protocols.bucket_plan import PlanSetting
from gradwire.exchange.segments import Parameter, lay_out
from gradwire.kernels import Kernels, get_kernels, time_coders

__all__ = ["measure_coders"]

SAMPLE_NUMEL = 1 << 18
"""Elements whose digits are coded for a time: fewer than a bucket's, so that a payload stays in the caches as there."""

REFERENCE_NUMEL = 1 << 13
"""As many for the reference, which is there to be read."""


@cache
def measure_coders(method: Method, backend: str) -> dict[str, float]:
    """Return the seconds that each of a method's open coders takes to encode and decode one payload.

    The payload holds the digits that the method makes of ``2^18`` standard normal numbers. Coders take turns; the
    least time of several turns counts. Measured once a process: some milliseconds, beside what is compiled first.

    Args:
        method: With ``open_coders``.
        backend: Of the kernels, by name.
    """
    kernels = get_kernels(backend)
    payload = _payload(method, kernels)
    repeats = 1 if kernels.name == "reference" else 9
    return time_coders({name: kernels.coder(name) for name in method.open_coders}, payload, repeats)


class _Copying:
    """A coder that leaves bytes as they are, and keeps those that it saw."""

    name = backend = "none"
    variants = None

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []

    def bound(self, symbols: int) -> int:
        return symbols

    def encode(self, symbols: torch.Tensor, out: torch.Tensor) -> int:
        self.seen.append(symbols.clone())
        out[: len(symbols)] = symbols
        return len(symbols)

    def decode(self, data: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(data)

    def warm_up(self) -> float:
        return 0.0


def _payload(method: Method, kernels: Kernels) -> torch.Tensor:
    """Return the bytes that a coder would be given first in a round of one worker alone."""
    numel = REFERENCE_NUMEL if kernels.name == "reference" else SAMPLE_NUMEL
    flat = torch.randn(numel, generator=torch.Generator().manual_seed(0))
    coder = _Copying()
    segments = lay_out([Parameter("sample", (numel,), (1,))])
    plan = method.plan(PlanSetting(segments, kernels, 1, method.collectives[0], 0, numel, coder))
    simulate_ranks([plan.whole(Context(0, 1, 0), flat)], [Meter()])
    return coder.seen[0]
