"""What every method is: a frozen set of hyper-parameters with declared properties."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from gradwire.errors import HyperparameterError

__all__ = ["Inherited", "Method", "Properties", "require"]


@dataclass(frozen=True, kw_only=True)
class Properties:
    """What a method promises; the shared tests hold it to each line.

    Attributes:
        summary: One sentence.
        paper: Authors, title, venue, year.
        unbiased: The mean over draws equals the mean of the gradients (of the clipped ones where the method clips).
        unbiased_note: What ``unbiased`` alone would not say, such as "for the clipped gradient".
        omega: Variance constant, E|Q(g) - g|^2 <= omega |g|^2, as a formula; None where none is known.
        delta: Contraction constant of a biased operator, likewise.
        state: What is remembered between steps.
        bit_stable: The result is the same bits for any bucket layout, number of lanes and chunk size, and from the
            simulation, since all arithmetic is the method's own; False where the backend's float sum takes part.
        bits_per_element: Bits sent for each element and direction with four workers and large parameters, on the
            scale where a float32 all-reduce has 32.
        stream: The random stream drawn from: "rank", "shared", "owner" or "none".
    """

    summary: str
    paper: str
    unbiased: bool
    bit_stable: bool
    bits_per_element: float
    unbiased_note: str | None = None
    omega: str | None = None
    delta: str | None = None
    state: str = "none"
    stream: str = "none"


class Inherited:
    """What a wrapper has of the method in one of its fields, under the same name; the class itself has ``default``."""

    def __init__(self, field: str, default: object = None) -> None:
        self._field, self._default = field, default

    def __set_name__(self, owner: type[Method], name: str) -> None:
        self._name = name

    def __get__(self, instance: Method | None, owner: type[Method]) -> Any:
        return self._default if instance is None else getattr(getattr(instance, self._field), self._name)


@dataclass(frozen=True, kw_only=True)
class Method:
    """Base of every method. Subclasses are final, and their fields are their hyper-parameters.

    ``repr(method)`` is its spec: :func:`gradwire.method` reads it back.
    """

    name: ClassVar[str]
    """The lower-case name that stands for the paper's defaults."""

    properties: ClassVar[Properties]

    collectives: ClassVar[tuple[str, ...]]
    """The protocols that can carry the method, the default first."""

    worst_error: ClassVar[float | None] = None
    """Smallest known q with E|C(x) - x|^2 <= q |x|^2 for every vector x; None where none is known."""

    worst_step: ClassVar[float | None] = None
    """Smallest known c with |C(x_i) - x_i| <= c M in every element of every worker i and for every draw, where M is the
    largest magnitude on any worker; None where none is known."""

    whole_step: ClassVar[bool] = False
    """Whether the exchange begins only when all gradients of a step are there."""

    joined: ClassVar[bool] = False
    """Whether all compressed parameters are one vector, in the order of ``named_parameters``; needs the whole step."""

    direction: ClassVar[bool] = False
    """Whether the outcome is a direction to step in, with entries -1 and 1, rather than the mean."""

    owns_momentum: ClassVar[bool] = False
    """Whether the outcome holds gradients of earlier steps, so that no optimizer's momentum belongs beside it."""

    needs_loss_scale: ClassVar[bool] = False
    """Whether gradients of several rounds are added up, or units are the method's own, so that the scale of automatic
    mixed precision, which changes from time to time, has to be taken out."""

    kernels: ClassVar[tuple[str, ...]]
    """The families of kernels, and the entropy coder, that it calls: these are compiled before the first step."""

    remembers: ClassVar[tuple[str, ...]] = ()
    """Kinds of vectors and names of values that it keeps in :class:`gradwire.protocols.Memory`."""

    min_numel: ClassVar[int] = 1024
    """Parameters with fewer elements travel in float32, unless the user says otherwise."""

    needs_optimizer: ClassVar[bool] = False
    """Whether it acts on the steps of an optimizer, too."""

    @property
    def unbiased(self) -> bool:
        """Whether the outcome is the mean of the gradients, whatever they are, on average over draws."""
        return self.properties.unbiased

    def check_optimizer(self, optimizer: Any, parameters: Mapping[str, torch.Tensor]) -> None:
        """Refuse an optimizer that :meth:`bind` could not hook into.

        Raises:
            IncompatibleError: the method needs an optimizer and has none, or cannot work with this one.
        """

    def caution(self, optimizer: Any, parameters: Mapping[str, torch.Tensor]) -> str | None:
        """Return a sentence to warn the user with when the method is attached beside an optimizer; None for none.

        Args:
            optimizer: The one that was given, which :meth:`check_optimizer` did not refuse; None if none was.
            parameters: By name, those that are compressed.
        """
        return None

    def bind(self, optimizer: Any, parameters: Mapping[str, torch.Tensor]) -> Callable[[], None] | None:
        """Hook whatever the method does beside the exchange into the steps of an optimizer that was checked.

        Returns:
            What takes the hook away again; None where there is none.
        """
        return None


def require(condition: bool, owner: str, sentence: str) -> None:
    """Raise :class:`HyperparameterError` naming the owner unless the condition holds."""
    if not condition:
        raise HyperparameterError(f"{owner}: {sentence}")
