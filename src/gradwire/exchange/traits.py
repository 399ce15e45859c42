"""The record of a method's traits."""

from __future__ import annotations

from dataclasses import dataclass, fields

from gradwire.errors import HyperparameterError
from gradwire.exchange.fields import is_whole


@dataclass(frozen=True, kw_only=True)
class Traits:
    """Protocols, requirements and guarantees of a method, for the values of its fields.

    Attributes:
        collectives: The protocols that can exchange the method's payloads, the default first; empty if it exchanges
            nothing itself.
        re_encoding: True if under two-shot the owner of a share encodes its mean again, so that the outcome depends on
            the protocol.
        cut: Parameters are cut into chunks at multiples of this many elements: a group of the kernels, and whole units
            of every codec that declares nothing else.
        share_cut: The same for the shares whose owners encode the mean again, which must not end within elements that
            are encoded together.
        whole_step: True if the exchange can begin only when all gradients of a step are ready.
        joined: True if all compressed parameters form one vector, in the order of ``named_parameters``; needs the whole
            step.
        needs_every_round: True if every parameter must be exchanged in every round, because the method goes by the
            number of the round: it sends one of several parts in turn, or learns from some rounds what it uses for all
            parameters. Rounds that exchange a part of the model in turn would make it repeat the same turn.
        period: Number of rounds after which its messages have the same sizes again, if they alternate: 2 for a method
            that sends left and right factors in turn. The root of a broadcast does not change with the round then.
        clips_gradient: True if it scales each worker's gradient by the norm of the whole gradient, so that no rank may
            exchange a part of it alone.
        rounds_sums: True if the backend adds up what ranks send in sixteen bits, so that no rank knows what the sum
            loses.
        direction: True if the outcome is a direction and not the mean, so that it needs a learning rate of its own.
        owns_momentum: True if the outcome contains gradients of earlier steps, so that the optimizer must have no
            momentum.
        needs_loss_scale: True if the loss scale of automatic mixed precision must be removed, because gradients of
            several rounds are added up, or because a field has their unit.
        kernels: The families of kernels, and the entropy coder, that it calls. They are compiled before the first step.
        open_coders: Entropy coders of which :meth:`Method.with_coder` must choose one before the first exchange; empty
            if there is no choice. The outcome does not depend on the choice.
        on_device: True if its computations outside kernels stay on the device of a vector.
        remembers: The kinds of vectors and the names of values that it keeps as state in
            :class:`gradwire.exchange.protocols.Memory`.
        own: Those of ``remembers`` that each rank keeps for itself; all others are the same on all ranks.
        of_ranks: Those of ``remembers`` that are right only for the ranks that made them, such as the mean of what each
            has sent before. They begin anew when the ranks change.
        of_parameters: Those of ``remembers`` that follow the parameters of the ranks by what they exchange. They begin
            anew when a link sets these otherwise, as ``synchronise()`` does.
        of_first: Those of ``remembers`` that rank 0 alone holds until it has sent them to all.
        sent_by_first: The one of ``of_first`` that all ranks hold from then on, and none before.
        waiting: The kind of vector that holds the part not sent yet, if the method keeps one.
        subtracts_mean: True if a rank subtracts the common mean from what waits, and not what it has sent itself: only
            all ranks' vectors together are then what was not sent. Without one of them the others' are wrong, and begin
            anew.
        sends_differences: True if a rank sends the difference to what it has sent before, so that the next one holds
            what was left out of this one, and nothing is lost.
        min_numel: Parameters with fewer elements are sent in float32, unless the user sets another limit.
        local_steps: Number of optimizer steps between two exchanges of their changes; 0: gradients are exchanged at
            every synchronised backward.
        at_own_pace: True if workers push to a server without waiting for each other's steps. In a link, whose workers
            step together, the method exchanges as the one inside it.
        outcomes_differ: True if each rank has its own outcome of an exchange, so that parameters differ between ranks.
            Their mean over ranks does not change in an exchange.
        sharded: True if a rank keeps state for its own shard of a parameter only, as :meth:`Method.kept_as` returns it.
        needs_optimizer: True if it also acts on the steps of an optimizer.
        needs_learning_rates: True if it uses the learning rates of the following step in every round, if the link has
            an optimizer: :attr:`gradwire.exchange.protocols.Context.learning_rates`.
        needs_link_cost: True if its codecs use the cost of a message on the network: :class:`gradwire.LinkCost`.
        gauges: Names of the numbers that it reports for every round on every rank, see :meth:`gradwire.Link.gauges`.
        tries: Specs of the methods that it tries in order to keep the fastest; empty for all other methods.
        spared: Those of ``tries`` that a link leaves out if an option, or its optimizer, does not allow them; see
            :meth:`Method.unsuited`.
        quantises_blocks: True if it rounds the values of a block to levels of the block's own scale.
        shares_scales: True if all ranks use the same scales, on which they agree by an exchange of its own.
        parts: How many parts a vector has if a round sends one of them and as many rounds send every element; None for
            methods that send elements without such a cycle.
        same_elements: True if all ranks send the same elements, chosen by a shared draw.
        scatters: True if the owner of a shard can receive the mean of that shard alone, by
            :func:`gradwire.exchange.protocols.reduce_scatter`: no state depends on the mean of the rest.
        unbiased: True if the expectation of the outcome over draws is the mean of the gradients, for all gradients.
        unbiased_note: Text to show instead of "yes" or "no" if ``unbiased`` alone is not precise enough.
        omega_formula: Formula, to show, of ``omega`` for vectors or blocks of d elements, or of a bound if it is too
            long.
        worst_step: Smallest known c with |C(x_i) - x_i| <= c M in every element of every worker i and for every draw,
            where M is the largest magnitude on any worker; None if none is known.
        worst_error: Smallest known c with |C(x_i) - x_i| <= c in every element of every worker i, for all vectors and
            draws; None if none is known.
    """

    collectives: tuple[str, ...] = ()
    re_encoding: bool = False
    cut: int = 80
    share_cut: int = 80
    whole_step: bool = False
    joined: bool = False
    needs_every_round: bool = False
    period: int = 1
    clips_gradient: bool = False
    rounds_sums: bool = False
    direction: bool = False
    owns_momentum: bool = False
    needs_loss_scale: bool = False
    kernels: tuple[str, ...] = ()
    open_coders: tuple[str, ...] = ()
    on_device: bool = False
    remembers: tuple[str, ...] = ()
    own: tuple[str, ...] = ()
    of_ranks: tuple[str, ...] = ()
    of_parameters: tuple[str, ...] = ()
    of_first: tuple[str, ...] = ()
    sent_by_first: str = ""
    waiting: str = "residual"
    subtracts_mean: bool = False
    sends_differences: bool = False
    min_numel: int = 1024
    local_steps: int = 0
    at_own_pace: bool = False
    outcomes_differ: bool = False
    sharded: bool = False
    needs_optimizer: bool = False
    needs_learning_rates: bool = False
    needs_link_cost: bool = False
    gauges: tuple[str, ...] = ()
    tries: tuple[str, ...] = ()
    spared: tuple[str, ...] = ()
    quantises_blocks: bool = False
    shares_scales: bool = False
    parts: int | None = None
    same_elements: bool = False
    scatters: bool = False
    unbiased: bool = False
    unbiased_note: str | None = None
    omega_formula: str | None = None
    worst_step: float | None = None
    worst_error: float | None = None

    def __post_init__(self) -> None:
        """Check the types of lists, switches and counts, which are read long after they were declared.

        Raises:
            HyperparameterError: one is of another type.
        """
        for name, usual in _USUAL.items():
            value = getattr(self, name)
            if isinstance(usual, tuple):
                fits = isinstance(value, tuple) and all(isinstance(each, str) for each in value)
                need = "a tuple of names, such as ('all_gather',)" if name == "collectives" else "a tuple of names"
            elif isinstance(usual, bool):
                fits, need = isinstance(value, bool), "True or False"
            else:
                least = 1 if name in ("cut", "share_cut", "period") else 0
                fits, need = is_whole(value, least), f"a whole number of at least {least}"
            if not fits:
                raise HyperparameterError(f"trait {name!r} is {need}, not {value!r}")

    @property
    def bounds_residuals(self) -> bool:
        """True if a residual of bounded vectors stays bounded in each element, for any variance."""
        return (self.worst_step is not None and self.worst_step < 1) or self.worst_error is not None


_USUAL = {each.name: each.default for each in fields(Traits) if isinstance(each.default, tuple | bool | int)}
"""The traits that are lists, switches or counts, with their defaults."""
