"""Which entropy coder serves a method that leaves it open: the same on all ranks, by measured times."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, TypeAlias

import torch

from gradwire.errors import IncompatibleError
from gradwire.exchange.planning import Planner

__all__ = ["CODER_STATE", "CoderSelection"]

CODER_STATE = "coder"
"""Key of the settled coders in the part of a link's state that is the same on all ranks."""

Times: TypeAlias = Mapping[str, Mapping[str, float]]
"""Seconds by method (its spec) and coder."""


class CoderSelection:
    """Settles the coder of all planners whose methods leave it open.

    A coder takes as long as on the slowest rank, since all wait for that one; of these times the least decides, at
    equal ones the coder listed first. A choice once made is kept in checkpoints and not measured again.
    """

    def __init__(self) -> None:
        self._planners: dict[str, Planner] = {}
        self._records: dict[str, dict[str, Any]] = {}

    def watch(self, planner: Planner) -> Planner:
        """Take a planner into account; return it."""
        if planner.open_coders:
            self._planners[repr(planner.method)] = planner
        return planner

    def measure(self) -> dict[str, dict[str, float]]:
        """Return what this rank's coders take for each method."""
        return {spec: planner.measure_coders() for spec, planner in self._planners.items()}

    def agree(self, everyone: Sequence[Times]) -> None:
        """Settle on coders from what :meth:`measure` gave on each rank, by rank; the same on all of them."""
        for spec, planner in self._planners.items():
            slowest = {name: max(times[spec][name] for times in everyone) for name in planner.open_coders}
            planner.settle(min(slowest, key=lambda name: slowest[name]))
            ranks = f"on the slowest of {len(everyone)} ranks" if len(everyone) > 1 else "here"
            self._records[spec] = {
                "reason": f"the least time to encode and decode a payload {ranks}",
                "encode_decode_s": slowest,
            }

    def record(self, planner: Planner) -> dict[str, Any] | None:
        """Return what a planner's coder is and why, in plain values; None where it has none.

        ``encode_decode_s`` has each coder's time on the slowest rank where the choice was open, and ``variants`` which
        variant of each part of the chosen coder runs on this rank.
        """
        if planner.coder is None:
            return None
        found = self._records.get(repr(planner.method), {"reason": "named by the method", "encode_decode_s": {}})
        variants = planner.kernels.coder(planner.coder).variants
        return {"chosen": planner.coder, **found, "variants": {} if variants is None else asdict(variants)}

    def state(self) -> dict[str, torch.Tensor]:
        """Return the choice for a checkpoint, nothing where none was open.

        It is a JSON object of coders by their methods' specs, in UTF-8: uint8 ``[n]``.
        """
        if not self._planners:
            return {}
        chosen = {spec: planner.coder for spec, planner in self._planners.items()}
        return {CODER_STATE: torch.tensor(list(json.dumps(chosen).encode()), dtype=torch.uint8)}

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take the choice of a checkpoint; for methods that it does not hold, and without one, what was measured stays.

        Raises:
            IncompatibleError: it is no such choice, or names a coder that the method does not know.
        """
        if CODER_STATE not in state:
            return
        found = _read(state[CODER_STATE])
        for spec, planner in self._planners.items():
            if spec in found and found[spec] not in planner.open_coders:
                raise IncompatibleError(
                    f"the checkpoint's coder of {spec} is {found[spec]!r}: this version has "
                    f"{', '.join(planner.open_coders)}"
                )
        for spec, planner in self._planners.items():
            if spec in found:
                planner.settle(found[spec])
                self._records[spec] = {
                    **self._records[spec],
                    "chosen": found[spec],
                    "reason": "taken from a checkpoint",
                }


def _read(value: torch.Tensor) -> dict[str, str]:
    try:
        if value.dtype != torch.uint8 or value.dim() != 1:
            raise ValueError(f"{value.dtype} of shape {tuple(value.shape)}")
        found = json.loads(bytes(value.tolist()).decode())
        if not isinstance(found, dict) or not all(isinstance(name, str) for name in found.values()):
            raise ValueError(f"{found!r}")
    except (AttributeError, ValueError) as error:
        raise IncompatibleError(f"the state's {CODER_STATE!r} is no choice of coders: {error}") from None
    return found
