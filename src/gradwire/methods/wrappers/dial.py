"""Base of wrappers that use several values of a method's dial, a numeric field."""

from __future__ import annotations

import dataclasses
import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from gradwire.exchange.method import Method, is_number, require
from gradwire.exchange.segments import Parameter
from gradwire.exchange.traits import Traits
from gradwire.methods.wrappers.wrapper import Wrapper

ALIKE = (
    "collectives",
    "re_encoding",
    "cut",
    "share_cut",
    "whole_step",
    "joined",
    "direction",
    "owns_momentum",
    "needs_loss_scale",
    "needs_optimizer",
    "needs_learning_rates",
    "remembers",
    "min_numel",
)
"""Traits that a link reads once, for all rounds and parameters."""

PROBE = Parameter("(probe)", (1 << 12, 1 << 12), (1 << 12, 1))
"""Size of a matrix that is larger than any dial."""


class Dialled(Wrapper):
    """Base of wrappers whose dial takes several values. Declared traits hold for all of them.

    The dial is the outermost field named ``field`` of the method or of one that it wraps. Not a dataclass, so that each
    method's own fields keep their order in its spec.
    """

    field: str

    def declare(self) -> Traits:
        return replace(
            super().declare(),
            kernels=tuple(dict.fromkeys(family for method in self.variants for family in method.traits.kernels)),
            # Unbiased if the method is with all values of the dial.
            unbiased=all(method.traits.unbiased for method in self.variants),
            # The method's formula, if all variants have an omega.
            omega_formula=None if self.omega is None else _of_worst(self.compressor.traits.omega_formula),
            # The largest of all variants, if all have one.
            worst_step=self._worst([method.traits.worst_step for method in self.variants], max),
            # The largest of all variants, if all have one.
            worst_error=self._worst([method.traits.worst_error for method in self.variants], max),
        )

    @property
    @abstractmethod
    def variants(self) -> Sequence[Method]:
        """Variants of the method, one for each value of the dial."""

    @property
    def dial(self) -> float:
        """Value of the dial in the wrapped method.

        Raises:
            HyperparameterError: there is no such field, or its value is not a number.
        """
        owner = type(self).__name__
        require(isinstance(self.field, str), owner, f"field is the name of a field, not {self.field!r}")
        value = self.dial_of(self.compressor)
        inner = self.compressor
        require(is_number(value), owner, f"{self.field}={value!r} of {inner!r} is no number to begin with")
        return value  # type: ignore[no-any-return]

    def dial_of(self, method: Method) -> Any:
        """Return the dial's value in a variant."""
        return getattr(self._holder(method), self.field)

    def turned(self, value: float) -> Method:
        """Return the method with another value of its dial, rounded if the dial is an integer.

        It is an integer if the field accepts only integers, or accepts both and has one, such as the bits of EDEN.

        Raises:
            HyperparameterError: the field does not accept that value.
        """
        kinds = _fields(self._holder(self.compressor))[self.field].split(" | ")
        whole = "float" not in kinds or ("int" in kinds and isinstance(self.dial, int))
        return self._turned(self.compressor, math.floor(value + 0.5) if whole else value)

    def check_variants(self) -> None:
        """Check that a link can change from any value of the dial to any other.

        Raises:
            HyperparameterError: with some value the method has other protocols or other state than with its own.
        """
        owner, own = type(self).__name__, self.compressor
        for method in self.variants:
            at = f"with {self.field}={self.dial_of(method)!r}, {own!r}"
            for name in ALIKE:
                ours, theirs = getattr(method.traits, name), getattr(own.traits, name)
                require(ours == theirs, owner, f"{at} has {name}={ours!r}, and not {theirs!r} as with its own value")
            for kind in own.traits.remembers:
                sizes = [m.remembered_numel(kind, PROBE) for m in (method, own)]
                require(
                    sizes[0] == sizes[1],
                    owner,
                    f"{at} keeps a {kind} of another size than with its own value, so that it could not go on from one "
                    f"to the other; take another field than {self.field!r}",
                )

    @property
    def delta_formula(self) -> str | None:
        """The method's formula, if all variants have a delta."""
        return None if self.delta is None else _of_worst(self.compressor.delta_formula)

    def omega_of(self, numel: int | None = None) -> float | None:
        return self._worst([method.omega_of(numel) for method in self.variants], max)

    def delta_of(self, numel: int | None = None) -> float | None:
        return self._worst([method.delta_of(numel) for method in self.variants], min)

    def usual_delta_of(self, numel: int | None = None) -> float | None:
        return self._worst([method.usual_delta_of(numel) for method in self.variants], min)

    def typical_delta_of(self, numel: int | None = None) -> float | None:
        return self._worst([method.typical_delta_of(numel) for method in self.variants], min)

    def wait_of(self, numel: int | None = None) -> float | None:
        return self._worst([method.wait_of(numel) for method in self.variants], max)

    def caution(self, optimizer: Any, parameters: Mapping[str, torch.Tensor]) -> str | None:
        told = (method.caution(optimizer, parameters) for method in reversed(self.variants))
        return next((sentence for sentence in told if sentence is not None), None)

    def _holder(self, method: Method) -> Method:
        inner: object = method
        while isinstance(inner, Method):
            if self.field in _fields(inner):
                return inner
            inner = getattr(inner, "compressor", None)
        require(False, type(self).__name__, f"{method!r} has no field {self.field!r}")
        return method

    def _turned(self, method: Method, value: float) -> Method:
        if self.field in _fields(method):
            return replace(method, **{self.field: value})
        inner: Method = method.compressor  # type: ignore[attr-defined]
        return replace(method, compressor=self._turned(inner, value))  # type: ignore[call-arg]

    @staticmethod
    def _worst(found: Sequence[float | None], worst: Any) -> float | None:
        return None if None in found else worst(found)


def _fields(method: Method) -> dict[str, str]:
    """Map the names of a method's fields to the source text of their types."""
    return {f.name: str(f.type) for f in dataclasses.fields(method)}


def _of_worst(formula: str | None) -> str | None:
    return None if formula is None else f"{formula}, of the worst value"
