"""The base class of all methods: a frozen set of hyper-parameters with declared properties."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch

from gradwire.errors import HyperparameterError, IncompatibleError, shortened
from gradwire.exchange.fields import check_fields
from gradwire.exchange.fields import is_number as is_number
from gradwire.exchange.fields import is_whole as is_whole
from gradwire.exchange.fields import plain as plain
from gradwire.exchange.traits import Traits

if TYPE_CHECKING:
    from typing_extensions import Self

    from gradwire.exchange.codecs import Codec
    from gradwire.exchange.ops import Scope
    from gradwire.exchange.protocols.bucket_plan import BucketPlan, Operator, PlanSetting
    from gradwire.exchange.segments import Parameter, Segment
    from gradwire.kernels import Kernels


M = TypeVar("M", bound="Method")

MOST_BITS = 1024
"""Largest number of bits of a whole number in a spec or in a field."""

SEED_BITS = 1024
"""Largest number of bits of a seed, so that ranks can compare its digits."""


@dataclass(frozen=True, kw_only=True)
class Properties:
    """The properties of a method for all values of its fields; the shared tests check each of them.

    Properties that depend on the fields are in :class:`Traits`, :attr:`Method.omega` and :attr:`Method.delta`.

    Attributes:
        summary: One sentence.
        paper: Authors, title, venue, year.
        bit_stable: True if the result has the same bits for any bucket layout, number of lanes and chunk size, and in a
            simulation, because all arithmetic is the method's own; False if the backend's float sum is used.
        bits_per_element: Bits that the default sends for each element and direction with four workers and large
            parameters, on the scale where a float32 all-reduce has 32.
        state: State that is kept between steps.
        state_bytes_per_element: Bytes of that state on each rank for the default and large parameters. Memory holds
            twice as much: the current state, and the new one, which is committed if all of the round was finite.
        stream: The random streams drawn from, in words, such as "rank" or "shared, or rank"; "none" if there is none.
        paper_settings: The fields whose setting in the paper is not the default, by name.
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
    """Descriptor of the properties that a wrapper takes from the method in one of its fields.

    On the class itself its value is ``default``.
    """

    def __init__(self, field: str, default: Properties) -> None:
        self._field, self._default = field, default

    def __get__(self, instance: Method | None, owner: type[Method]) -> Properties:
        if instance is None:
            return self._default
        inner: Method = getattr(instance, self._field)
        return inner.properties


class InheritedBits(Inherited):
    """Descriptor of a wrapper's own properties, which are bit-stable only if those of the method in a field are."""

    def __get__(self, instance: Method | None, owner: type[Method]) -> Properties:
        inner = super().__get__(instance, owner)
        return replace(self._default, bit_stable=self._default.bit_stable and inner.bit_stable)


@dataclass(frozen=True, kw_only=True)
class Method:
    """Base of every method. Subclasses are final, and their fields are their hyper-parameters.

    ``repr(method)`` is its spec: :func:`gradwire.method` reads it back.
    """

    name: ClassVar[str]
    """The lower-case name, which as a spec stands for the defaults."""

    properties: ClassVar[Properties]

    def __init_subclass__(cls, **keywords: Any) -> None:
        """Raise if a class attribute has the name of a trait, since nothing would read it."""
        super().__init_subclass__(**keywords)
        lost = {field.name for field in fields(Traits)}.intersection(vars(cls))
        require(not lost, cls.__name__, f"{', '.join(sorted(lost))} is a trait: return it from declare()")

    if not TYPE_CHECKING:
        # Type checkers read the constructor of each dataclass, which is more precise.
        def __new__(cls, *operands: object, **given: object) -> Any:
            """Check the names of fields, so that a wrong one raises the same error as in a spec."""
            check_fields(cls, len(operands), given)
            for name, value in given.items():
                # Error messages print the value, which Python refuses for thousands of digits.
                huge = isinstance(value, int) and value.bit_length() > MOST_BITS
                require(not huge, cls.__name__, f"{name} has more than {MOST_BITS} bits")
            return super().__new__(cls)

    def declare(self) -> Traits:
        """Return the method's traits: those of the base class with replacements."""
        return Traits()

    @cached_property
    def traits(self) -> Traits:
        """Protocols, requirements and guarantees of the method."""
        return self._declared()

    def _declared(self) -> Traits:
        found: object = self.declare()
        if not isinstance(found, Traits):
            fix = "return replace(super().declare(), ...)"
            raise HyperparameterError(f"{type(self).__name__}: declare() returned {found!r}, not a gw.Traits: {fix}")
        return found

    @classmethod
    def paper(cls: type[M], **fields: Any) -> M:
        """Return the method with the settings of its paper.

        Papers report the fewest bits that suffice for a training of many epochs. Some defaults send more, so that a
        training of a few hundred steps keeps its accuracy.

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
        """Return the length of the state of a kind in :attr:`Traits.remembers` for a parameter; by default its numel.

        For a kind that is kept for each of several other ranks, it is the length for one of them; see
        :func:`gradwire.exchange.protocols.memory.kind_of_peer`.
        """
        return parameter.numel

    def kept_as(self, parameter: Parameter) -> Sequence[Parameter]:
        """Return the units of a parameter for which the method keeps state: itself by default, else parts of it."""
        return (parameter,)

    def scopes(self, world_size: int) -> Sequence[Scope]:
        """Return the divisions of ranks into groups that its exchanges use beside all ranks.

        Raises:
            IncompatibleError: this number of ranks cannot be divided as the method requires.
        """
        return ()

    def omega_of(self, numel: int | None = None) -> float | None:
        """Return the variance constant for parameters of ``numel`` elements, or of any number of them.

        Returns:
            The smallest known omega with E|Q(x) - x|^2 <= omega |x|^2 for every vector x; None if none is known, for
            biased operators, and for methods whose outcome depends on earlier rounds.
        """
        return None

    def delta_of(self, numel: int | None = None) -> float | None:
        """Return the contraction constant for parameters of ``numel`` elements, or of any number of them.

        Returns:
            The largest known delta > 0 with E|C(x) - x|^2 <= (1 - delta) |x|^2 for every vector x; None if none is
            known. For an unbiased operator with omega < 1 it is 1 - omega.
        """
        omega = self.omega_of(numel)
        return None if omega is None or omega >= 1 else 1 - omega

    def usual_delta_of(self, numel: int | None = None) -> float | None:
        """Return the contraction constant that warnings use, which may ignore vectors that do not occur in practice.

        By default it is the constant for all vectors, :meth:`delta_of`.
        """
        return self.delta_of(numel)

    def typical_delta_of(self, numel: int | None = None) -> float | None:
        """Return the share of a long Gaussian vector's squared norm that is sent on average, ``<C(x), x> / |x|^2``.

        It is 1 for an unbiased operator; None if it is not known. :meth:`wait_of` derives from it how long a residual's
        parts wait.
        """
        return 1.0 if self.traits.unbiased else None

    def wait_of(self, numel: int | None = None) -> float | None:
        """Return how many rounds a part of a gradient waits on average in the residual before it is sent.

        None if there is no residual, if the wait is not known, or if what waits cancels in the mean over workers, as
        with low-rank methods. ``gradwire/methods/feedback/waiting.py`` derives it.

        Args:
            numel: Number of elements of the longest parameter, or None for any.
        """
        return None

    @property
    def omega(self) -> float | None:
        """The variance constant for parameters of any size, see :meth:`omega_of`."""
        return self.omega_of()

    @property
    def delta(self) -> float | None:
        """The contraction constant for parameters of any size, see :meth:`delta_of`."""
        return self.delta_of()

    @property
    def delta_formula(self) -> str | None:
        """``delta`` as a formula to show."""
        return None if self.omega is None or self.delta is None else "1 - omega"

    @property
    def as_operator(self) -> Operator | None:
        """The method as an operator on one vector, which needs no other rank; None if it is not one."""
        return None

    @property
    def cast_dtype(self) -> torch.dtype | None:
        """The dtype that values are cast to, if the method only casts; else None."""
        return None

    def refusal_of_feedback(self, unseen: str) -> str | None:
        """Return the reason why a rank cannot keep the part of a vector that the method does not send, or None.

        Args:
            unseen: The state that would miss that part, for the message.
        """
        return no_operator(self)

    def check_between_two(self, owner: str) -> None:
        """Raise unless one worker can encode a vector and another decode it without a third.

        Raises:
            IncompatibleError: they cannot; the message names ``owner`` and says what to use.
        """
        raise IncompatibleError(
            f"{owner}: rows are encoded by an operator on one vector, such as FP32(), QSGDinf() or TopK(), not {self!r}"
        )

    def codec_between_two(self, kernels: Kernels, segments: Sequence[Segment], seed: int) -> Codec:
        """Return the codec of vectors that one worker encodes and another decodes.

        Raises:
            TypeError: :meth:`check_between_two` raises for the method.
        """
        raise TypeError(f"{self!r} is no operator on one vector")

    def with_files(self, world_size: int) -> Self:
        """Return the method with the content of the files that it names, as they are now.

        A link reads them once, before ranks compare them, and makes all its plans of what it has read: a file that is
        written again, or removed, changes nothing on some ranks alone.

        Raises:
            IncompatibleError: a file cannot be read, or does not suit this number of ranks.
        """
        return self

    def terms(self, world_size: int) -> Mapping[str, object]:
        """Return further fields in which ranks must agree before an exchange, such as the digest of a file.

        Raises:
            IncompatibleError: the method does not work with this number of ranks.
        """
        return {}

    def check_optimizer(self, optimizer: Any, parameters: Mapping[str, torch.Tensor]) -> None:
        """Raise if :meth:`bind` does not support an optimizer.

        Raises:
            IncompatibleError: the method needs an optimizer and has none, or does not work with this one.
        """

    def usual_collective(self, world_size: int) -> str | None:
        """Return the default protocol if the outcome depends on the protocol, else None.

        In this class the outcome depends on it if owners of shares encode the mean again. Then at most two workers
        gather, which sends no more bytes, and more workers use the first protocol.
        """
        if not self.traits.re_encoding or len(self.traits.collectives) < 2:
            return None
        return "all_gather" if world_size <= 2 else self.traits.collectives[0]

    def refusal_of_collective(self, collective: str) -> str | None:
        """Return why the method cannot use one of the known protocols, as the end of a sentence; None: no more is said.

        It is called for protocols that are not among its :attr:`Traits.collectives`.
        """
        return None

    def plan(self, setting: PlanSetting) -> BucketPlan:
        """Plan the exchange of one bucket.

        Raises:
            IncompatibleError: the method does not support that collective, or exchanges nothing itself.
        """
        raise IncompatibleError(f"{self!r} is not a method that this version can run")

    def dense_plan(self, setting: PlanSetting) -> BucketPlan:
        """Plan the exchange of one bucket in a warm-up round, in which everything is sent in float32.

        By default the state does not change, since nothing is left unsent.
        """
        return setting.float32_plan()

    def with_coder(self, coder: str) -> Method:
        """Return the method with one of its :attr:`Traits.open_coders` chosen."""
        return self

    def caution(self, optimizer: Any, parameters: Mapping[str, torch.Tensor]) -> str | None:
        """Return a warning about the method with an optimizer, for the user, or None.

        Args:
            optimizer: The optimizer that was given, for which :meth:`check_optimizer` did not raise; None if none was.
            parameters: The parameters that are compressed, by name.
        """
        return None

    def unsuited(self, optimizer: Any, parameters: Mapping[str, torch.Tensor]) -> dict[str, str]:
        """Return the reason for each of ``traits.spared`` that is not tried beside an optimizer.

        Args:
            optimizer: The optimizer that was given to the link; None if none was.
            parameters: The parameters that are exchanged, by name.
        """
        return {}

    def bind(self, optimizer: Any, parameters: Mapping[str, torch.Tensor]) -> Callable[[], None] | None:
        """Hook the method's further work into the steps of an optimizer that was checked.

        Returns:
            A function that removes the hook; None if there is no hook.
        """
        return None


def operator_of(value: object) -> Operator | None:
    """Return a method as an operator on one vector; None for other methods and other objects."""
    return value.as_operator if isinstance(value, Method) else None


def cast_of(value: object) -> torch.dtype | None:
    """Return the dtype that a method casts to; None for other methods and other objects."""
    return value.cast_dtype if isinstance(value, Method) else None


def no_operator(value: object) -> str:
    """Return the error message for a value that is not an operator on one vector."""
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
