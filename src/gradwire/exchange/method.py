"""The base class of all methods: a frozen set of hyper-parameters with declared properties."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch

from gradwire.errors import HyperparameterError, IncompatibleError
from gradwire.exchange.fields import check_fields, shortened
from gradwire.exchange.fields import is_number as is_number
from gradwire.exchange.fields import is_whole as is_whole
from gradwire.exchange.traits import Traits

if TYPE_CHECKING:
    from gradwire.exchange.codecs import Codec
    from gradwire.exchange.ops import Scope
    from gradwire.exchange.protocols.bucket_plan import BucketPlan, Operator, PlanSetting
    from gradwire.exchange.segments import Parameter, Segment
    from gradwire.kernels import Kernels


M = TypeVar("M", bound="Method")

MOST_BITS = 1024
"""Bits of a whole number in a spec, or in a field, at most."""

SEED_BITS = 1024
"""Bits of a seed at most, so that ranks can compare it in any number of digits."""


@dataclass(frozen=True, kw_only=True)
class Properties:
    """The properties that a method declares for all values of its fields; the shared tests check each of them.

    What depends on the fields is declared by :class:`Traits`, and by :attr:`Method.omega` and :attr:`Method.delta`.

    Attributes:
        summary: One sentence.
        paper: Authors, title, venue, year.
        bit_stable: The result is the same bits for any bucket layout, number of lanes and chunk size, and from the
            simulation, since all arithmetic is the method's own; False where the backend's float sum takes part.
        bits_per_element: Bits that the default sends for each element and direction with four workers and large
            parameters, on the scale where a float32 all-reduce has 32.
        state: What is remembered between steps.
        state_bytes_per_element: How much that is on each rank, by default and for large parameters. In memory it is
            twice as much: what holds, and what the round makes of it, which counts if all of the round was finite.
        stream: The random stream drawn from: "rank", "shared", "owner" or "none".
        paper_settings: The fields in which the paper's setting is not the default, by name.
    """

    summary: str
    paper: str
    bit_stable: bool
    bits_per_element: float
    state: str = "none"
    state_bytes_per_element: float = 0.0
    stream: str = "none"
    paper_settings: Mapping[str, Any] = field(default_factory=dict)


class Inherited:
    """The properties that a wrapper takes from the method in one of its fields.

    On the class itself they are ``default``.
    """

    def __init__(self, field: str, default: Properties) -> None:
        self._field, self._default = field, default

    def __get__(self, instance: Method | None, owner: type[Method]) -> Properties:
        if instance is None:
            return self._default
        inner: Method = getattr(instance, self._field)
        return inner.properties


@dataclass(frozen=True, kw_only=True)
class Method:
    """Base of every method. Subclasses are final, and their fields are their hyper-parameters.

    ``repr(method)`` is its spec: :func:`gradwire.method` reads it back.
    """

    name: ClassVar[str]
    """The lower-case name that stands for the defaults."""

    properties: ClassVar[Properties]

    def __init_subclass__(cls, **keywords: Any) -> None:
        """Refuse what would be a trait and is not declared as one, since nothing would read it."""
        super().__init_subclass__(**keywords)
        lost = {field.name for field in fields(Traits)}.intersection(vars(cls))
        require(not lost, cls.__name__, f"{', '.join(sorted(lost))} is a trait: return it from declare()")

    if not TYPE_CHECKING:
        # Type checkers read the constructor of each dataclass, which says more.
        def __new__(cls, *operands: object, **given: object) -> Any:
            """Check the names of fields, so that a wrong one is told as in a spec."""
            check_fields(cls, len(operands), given)
            for name, value in given.items():
                # Sentences about a value print it, which Python refuses for thousands of digits.
                huge = isinstance(value, int) and value.bit_length() > MOST_BITS
                require(not huge, cls.__name__, f"{name} has more than {MOST_BITS} bits")
            return super().__new__(cls)

    def declare(self) -> Traits:
        """Return the method's traits: those of the base class, with what differs replaced."""
        return Traits()

    @cached_property
    def traits(self) -> Traits:
        """How the method travels, what it needs and what holds of its outcome."""
        return self.declare()

    @classmethod
    def paper(cls: type[M], **fields: Any) -> M:
        """Return the method with the settings of its paper where these are not the defaults.

        Papers report the fewest bits that a training of many epochs bears. Some defaults send more, so that a training
        of a few hundred steps keeps its accuracy.

        Args:
            fields: Fields to set instead.

        Raises:
            HyperparameterError: a field is out of range.

        Example:
            >>> import gradwire as gw
            >>> gw.DGC().density, gw.DGC.paper().density, gw.TernGrad.paper() == gw.TernGrad()
            (0.05, 0.001, True)
        """
        return cls(**{**cls.properties.paper_settings, **fields})

    def remembered_numel(self, kind: str, parameter: Parameter) -> int:
        """Return how many numbers of a kind in :attr:`remembers` it keeps of a parameter: by default one an element.

        Of a kind that is kept for each of several other ranks, those for one of them; see
        :func:`gradwire.exchange.protocols.memory.kind_of_peer`.
        """
        return parameter.numel

    def kept_as(self, parameter: Parameter) -> Sequence[Parameter]:
        """Return what a parameter is to what the method remembers: by default itself, else the parts it is cut into."""
        return (parameter,)

    def scopes(self, world_size: int) -> Sequence[Scope]:
        """Return the divisions of so many ranks into groups that its exchanges name beside all ranks.

        Raises:
            IncompatibleError: so many ranks cannot be divided as the method asks.
        """
        return ()

    def omega_of(self, numel: int | None = None) -> float | None:
        """Return the variance constant for parameters of ``numel`` elements, or of any number of them.

        Returns:
            The smallest known omega with E|Q(x) - x|^2 <= omega |x|^2 for every vector x; None where none is known, and
            for biased operators and methods whose outcome depends on earlier rounds.
        """
        return None

    def delta_of(self, numel: int | None = None) -> float | None:
        """Return the contraction constant for parameters of ``numel`` elements, or of any number of them.

        Returns:
            The largest known delta > 0 with E|C(x) - x|^2 <= (1 - delta) |x|^2 for every vector x; None where none is
            known. For an unbiased operator with omega < 1 it is 1 - omega.
        """
        omega = self.omega_of(numel)
        return None if omega is None or omega >= 1 else 1 - omega

    def usual_delta_of(self, numel: int | None = None) -> float | None:
        """Return the constant that cautions go by, which may leave out vectors that are not met in practice.

        By default it is that of all vectors, see :meth:`delta_of`.
        """
        return self.delta_of(numel)

    @property
    def omega(self) -> float | None:
        """The variance constant whatever the size of a parameter, see :meth:`omega_of`."""
        return self.omega_of()

    @property
    def delta(self) -> float | None:
        """The contraction constant whatever the size of a parameter, see :meth:`delta_of`."""
        return self.delta_of()

    @property
    def delta_formula(self) -> str | None:
        """``delta`` as a formula to be shown."""
        return None if self.omega is None or self.delta is None else "1 - omega"

    @property
    def as_operator(self) -> Operator | None:
        """The method as an operator on one vector, which needs no other rank; None where it is none."""
        return None

    @property
    def cast_dtype(self) -> torch.dtype | None:
        """The type that values are cast to, where that is all that the method does."""
        return None

    def refusal_of_feedback(self, unseen: str) -> str | None:
        """Explain why what the method leaves out of a vector cannot be kept by a rank; None where it can.

        Args:
            unseen: The memory that would not see it, for the message.
        """
        return no_operator(self)

    def check_between_two(self, owner: str) -> None:
        """Check that one worker can encode a vector, and another decode it, without a third.

        Raises:
            IncompatibleError: they cannot; the message names ``owner`` and says what to use.
        """
        raise IncompatibleError(
            f"{owner}: rows are encoded by an operator on one vector, such as FP32(), QSGDinf() or TopK(), not {self!r}"
        )

    def codec_between_two(self, kernels: Kernels, segments: Sequence[Segment], seed: int) -> Codec:
        """Return the codec of vectors that one worker encodes and another decodes.

        Raises:
            TypeError: :meth:`check_between_two` refuses the method.
        """
        raise TypeError(f"{self!r} is no operator on one vector")

    def terms(self, world_size: int) -> Mapping[str, object]:
        """Return what ranks compare beside the spec before they exchange anything, such as what a file holds.

        Raises:
            IncompatibleError: it cannot be, with so many ranks.
        """
        return {}

    def check_optimizer(self, optimizer: Any, parameters: Mapping[str, torch.Tensor]) -> None:
        """Refuse an optimizer that :meth:`bind` could not hook into.

        Raises:
            IncompatibleError: the method needs an optimizer and has none, or cannot work with this one.
        """

    def usual_collective(self, world_size: int) -> str | None:
        """Return the protocol that is taken by default where another gives another outcome; None where none does.

        By default the outcome depends on it where owners of shares encode a mean once more: two workers or fewer then
        gather, which sends no more, and others take the first protocol.
        """
        if not self.traits.re_encoding or len(self.traits.collectives) < 2:
            return None
        return "all_gather" if world_size <= 2 else self.traits.collectives[0]

    def plan(self, setting: PlanSetting) -> BucketPlan:
        """Plan the exchange of one bucket.

        Raises:
            IncompatibleError: the method cannot travel by that collective, or exchanges nothing itself.
        """
        raise IncompatibleError(f"{self!r} is not a method that this version can run")

    def dense_plan(self, setting: PlanSetting) -> BucketPlan:
        """Plan the exchange of one bucket in a round of warm-up, where everything travels in float32.

        By default it leaves the memory as it is: what travels whole leaves nothing to remember.
        """
        return setting.float32_plan()

    def with_coder(self, coder: str) -> Method:
        """Return the method with one of its :attr:`open_coders` settled."""
        return self

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


def operator_of(value: object) -> Operator | None:
    """Return a method as an operator on one vector; None for other methods, and for what is no method."""
    return value.as_operator if isinstance(value, Method) else None


def cast_of(value: object) -> torch.dtype | None:
    """Return the type that a method casts to; None for other methods, and for what is no method."""
    return value.cast_dtype if isinstance(value, Method) else None


def no_operator(value: object) -> str:
    """Return the sentence that refuses what is no operator on one vector."""
    return f"compressor is an operator on one vector, such as QSGDinf(block_size=256), not {value!r}"


def require(condition: bool, owner: str, sentence: str) -> None:
    """Raise :class:`HyperparameterError` naming the owner unless the condition holds."""
    if not condition:
        raise HyperparameterError(f"{owner}: {shortened(sentence)}")


def check_seed(seed: object) -> None:
    """Check the seed of random numbers.

    Raises:
        HyperparameterError: it is not a whole number of at most 1024 bits.
    """
    require(is_whole(seed), "seed", f"a whole number is needed, not {seed!r}")
    require(int(seed).bit_length() <= SEED_BITS, "seed", f"at most {SEED_BITS} bits are used")  # type: ignore[call-overload]
