"""Options of a link, and their checks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal, TypedDict, get_args

from gradwire.errors import HyperparameterError, IncompatibleError, did_you_mean, unknown
from gradwire.exchange.method import Method, check_seed, is_number, is_whole, require
from gradwire.exchange.network_cost import LinkCost
from gradwire.exchange.protocols import PROTOCOLS, REDUCE_SCATTER, SHARED_OUT

Collective = Literal["auto", "all_reduce", "all_gather", "two_shot", "tree", "two_shot_merged"]
Fallback = Literal["bf16", "fp32"]
KernelBackend = Literal["auto", "cpu", "cpu-plain", "reference", "triton"]
TransportName = Literal["auto", "gloo", "nccl", "staged"]

BACKENDS, FALLBACKS, TRANSPORTS = get_args(KernelBackend), get_args(Fallback), get_args(TransportName)

CHUNK_NUMEL = 1 << 23
"""Default number of elements in a chunk; the result does not depend on it."""


class RareOptions(TypedDict, total=False):
    """Rarely used options of a link, for type checkers; see :class:`Options`."""

    chunk_numel: int
    link_cost: LinkCost | None


class LinkOptions(RareOptions, total=False):
    """All options of a link, for type checkers; see :class:`Options`."""

    collective: Collective
    exclude: str | Iterable[str]
    min_numel: int | None
    warmup_steps: int
    seed: int
    backend: KernelBackend
    check: bool
    check_every: int
    fallback: Fallback | None
    fallback_limit: float | None
    transport: TransportName


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of a link, the same on every rank.

    Attributes:
        collective: Name of a protocol, or "auto": the method's usual one if the outcome depends on the protocol, else
            for each bucket the one that sends the fewest bytes.
        exclude: Patterns (``fnmatch``) of the names of parameters that are sent in float32.
        min_numel: Parameters with fewer elements are sent in float32; None: the method's default, which is 1024, but 0
            for casts, SignSGD, Signum and DPSGD.
        warmup_steps: Number of rounds at the start in which everything is sent in float32.
        seed: Seed of all random numbers.
        backend: Kernels: "auto", "cpu", "cpu-plain", "reference" or "triton". On CUDA devices, all but "auto" and
            "triton" exchange copies of the gradients in main memory; "auto" uses Triton's kernels if they exist for
            everything that the method computes, else those of the CPU.
        chunk_numel: Largest number of elements in a chunk.
        check: Verify after every bucket that all ranks have the same bits.
        check_every: Number of rounds between two comparisons of all ranks' parameters by digests; 0: never. It has no
            effect on simulated workers, which share their parameters.
        fallback: "bf16" or "fp32": the method to which all ranks return when the error of any rank exceeds
            ``fallback_limit``; None: they never do.
        fallback_limit: Limit of the relative error: |sent - gradient| of a rank over all parameters, divided by the
            root mean square of |gradient| over ranks.
        transport: "gloo", "nccl" or "staged"; "auto": Gloo for parameters in main memory; on CUDA devices NCCL if the
            group has it and payloads are made there, else staged.
        link_cost: Cost of a message on the network, for methods that use it (``CAT(fixed_bytes=None)``); None: measured
            when a link with such a method is made.
    """

    collective: str = "auto"
    exclude: Sequence[str] = field(default=())
    min_numel: int | None = None
    warmup_steps: int = 0
    seed: int = 0
    backend: str = "auto"
    chunk_numel: int = CHUNK_NUMEL
    check: bool = False
    check_every: int = 0
    fallback: str | None = None
    fallback_limit: float | None = None
    transport: str = "auto"
    link_cost: LinkCost | None = None

    def __post_init__(self) -> None:
        given = (self.exclude,) if isinstance(self.exclude, str) else self.exclude
        require(isinstance(given, Iterable), "exclude", f"patterns of parameter names are needed, not {given!r}")
        # A generator can be read once only.
        patterns = tuple(given)
        listed = all(isinstance(pattern, str) for pattern in patterns)
        require(listed, "exclude", f"patterns of parameter names are needed, not {patterns!r}")
        object.__setattr__(self, "exclude", patterns)
        for name, least in (("min_numel", 0), ("warmup_steps", 0), ("chunk_numel", 1), ("check_every", 0)):
            value = getattr(self, name)
            if value is None and name == "min_numel":
                continue
            require(is_whole(value, least), name, f"a whole number of at least {least} is needed, not {value!r}")
        check_seed(self.seed)
        # Casts need no kernels, and would take any name. Dry runs take "meta".
        if self.backend not in (*BACKENDS, "meta"):
            raise HyperparameterError(unknown("kernel backend", str(self.backend), BACKENDS))
        known = self.transport in TRANSPORTS
        require(known, "transport", f"one of {', '.join(TRANSPORTS)} is needed, not {self.transport!r}")
        stated = self.link_cost is None or isinstance(self.link_cost, LinkCost)
        require(stated, "link_cost", f"a LinkCost is needed, or None, not {self.link_cost!r}")
        self._check_fallback()

    def _check_fallback(self) -> None:
        known = self.fallback is None or self.fallback in FALLBACKS
        require(known, "fallback", f"one of {', '.join(FALLBACKS)} is needed, or None, not {self.fallback!r}")
        limit = self.fallback_limit
        if self.fallback is None:
            require(limit is None, "fallback_limit", f"{limit!r} without fallback= has no meaning: add fallback='bf16'")
            return
        require(
            is_number(limit, above=0),
            "fallback_limit",
            f"a relative error above 0 is needed beside fallback=, not {limit!r}; link.diagnostics() tells usual ones",
        )

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Options:
        """Build options from names and values.

        Raises:
            HyperparameterError: a name is unknown (the message has the nearest known one), or a value is wrong.
        """
        known = list(cls.__dataclass_fields__)
        for name in given:
            if name not in known:
                raise HyperparameterError(unknown("option", name, known))
        return cls(**given)

    def _scattered(self, method: Method) -> tuple[str, ...]:
        if not method.traits.scatters:
            raise IncompatibleError(
                f"{method!r} cannot travel by a reduce-scatter, after which each rank has the mean of its own shard "
                "alone: shard over a mesh of two dimensions, such as ('replicate', 'shard'), where replicas exchange "
                "their shards, or use an operator on one vector, such as EDEN(bits=4) or errorfeedback"
            )
        if self.check:
            raise IncompatibleError(
                "check=True compares the bits of all ranks' outcomes, and after a reduce-scatter each rank has a shard "
                "of its own: leave it out"
            )
        if self.check_every:
            raise IncompatibleError(
                f"check_every={self.check_every} compares the parameters of replicas, and by a reduce-scatter each "
                "rank has a shard of its own: leave it out"
            )
        return (REDUCE_SCATTER,)

    def has_replicas(self, method: Method) -> bool:
        """Return whether all ranks of a link have equal parameters; under local steps, after each exchange."""
        return not method.traits.outcomes_differ and self.collective != REDUCE_SCATTER

    def collectives(self, method: Method) -> tuple[str, ...]:
        """Return the protocols to choose from.

        Raises:
            IncompatibleError: the method cannot use the given collective, or its outcomes cannot be checked.
            HyperparameterError: the collective is unknown.
        """
        if self.check and method.traits.outcomes_differ:
            raise IncompatibleError(
                f"check=True compares the bits of all ranks' outcomes, and under {method!r} each rank has its own: "
                "leave it out"
            )
        if self.check_every and method.traits.outcomes_differ:
            raise IncompatibleError(
                f"check_every={self.check_every} compares the parameters of all ranks, and under {method!r} each rank "
                "has its own: leave it out"
            )
        if self.collective == REDUCE_SCATTER:
            return self._scattered(method)
        if self.collective == "auto":
            return tuple(method.traits.collectives)
        known = tuple(dict.fromkeys(("auto", "all_reduce", *PROTOCOLS, *SHARED_OUT)))
        if self.collective not in known:
            raise HyperparameterError(unknown("collective", self.collective, known))
        if self.collective not in method.traits.collectives:
            raise IncompatibleError(
                f"{method!r} cannot travel by {self.collective}"
                + (f": {reason}" if (reason := method.refusal_of_collective(self.collective)) else "")
                + "; use collective='auto'"
                + "".join(f" or {c!r}" for c in method.traits.collectives)
            )
        return (self.collective,)


def refuse_scatter(collective: str, who: str) -> None:
    """Raise if the collective is the one that gives each rank only its shard of the mean.

    Raises:
        IncompatibleError: it is.
    """
    if collective == REDUCE_SCATTER:
        raise IncompatibleError(
            f"collective={REDUCE_SCATTER!r} leaves each rank with the mean of its own shard, and {who} needs all of "
            "it: it is for modules of FSDP2, where attach asks for it; leave collective out"
        )


def dense_names(sizes: dict[str, int], options: Options, method: Method) -> frozenset[str]:
    """Return the names of the parameters that are sent in float32.

    Raises:
        HyperparameterError: a pattern matches no parameter.
    """
    least = method.traits.min_numel if options.min_numel is None else options.min_numel
    dense = {name for name, numel in sizes.items() if numel < least}
    for pattern in options.exclude:
        found = {name for name in sizes if fnmatchcase(name, pattern)}
        if not found:
            hint = did_you_mean(pattern, sizes, cutoff=0.4)  # stars are in no name
            raise HyperparameterError(f"exclude pattern {pattern!r} matches no parameter{hint}")
        dense |= found
    return frozenset(dense)
