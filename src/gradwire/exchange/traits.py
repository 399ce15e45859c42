"""What a method declares of itself for the values of its fields, in one record."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Traits:
    """How a method travels, what it needs and what holds of its outcome, for the values that its fields have.

    Attributes:
        collectives: The protocols that can carry the method, the default first; empty where it exchanges nothing
            itself.
        re_encoding: Whether owners of shares encode the mean once more where it travels by two-shot, so that another
            protocol gives another outcome.
        cut: Parameters are cut into chunks at multiples of this many elements: a group of the kernels, and whole units
            of every codec that declares nothing else.
        share_cut: The same where owners of shares encode the mean once more: no share ends within what is encoded
            together.
        whole_step: Whether the exchange begins only when all gradients of a step are there.
        joined: Whether all compressed parameters are one vector, in the order of ``named_parameters``; needs the whole
            step.
        direction: Whether the outcome is a direction to step in, not the mean, so that it needs a learning rate of its
            own.
        owns_momentum: Whether the outcome holds gradients of earlier steps, so that no optimizer's momentum belongs
            beside it.
        needs_loss_scale: Whether the loss scale of automatic mixed precision, which changes from time to time, has to
            be taken out, since gradients of several rounds are added up or a field has their unit.
        kernels: The families of kernels, and the entropy coder, that it calls. They are compiled before the first step.
        open_coders: Entropy coders of which one is to be settled, by :meth:`Method.with_coder`, before the method can
            exchange anything; empty where the method leaves nothing open. The outcome does not depend on the choice.
        on_device: Whether what it computes beside its kernels stays on the device that a vector lies on.
        remembers: The kinds of vectors and the names of values that it keeps in
            :class:`gradwire.exchange.protocols.Memory`.
        waiting: The kind of vector that holds what a rank has not sent yet, where the method keeps such a vector.
        min_numel: Parameters with fewer elements travel in float32, unless the user says otherwise.
        local_steps: Optimizer steps from one exchange to the next, of what they changed; 0: gradients are exchanged, at
            every synchronised backward.
        outcomes_differ: Whether each rank ends an exchange with an outcome of its own, so that no two ranks' parameters
            are the same; what ranks then have in common is the mean over them, which an exchange leaves as it is.
        sharded: Whether a rank keeps state for its own shard of a parameter only, which :meth:`Method.kept_as` names.
        needs_optimizer: Whether it also acts on the steps of an optimizer.
        needs_learning_rates: Whether it is told in every round the learning rates of the step that follows, as far as a
            link knows the optimizer: :attr:`gradwire.exchange.protocols.Context.learning_rates`.
        needs_link_cost: Whether its codecs must be told what a message costs on the link: :class:`gradwire.LinkCost`.
        gauges: Numbers that it reports of every round on every rank, as :meth:`gradwire.Link.gauges` returns them.
        tries: Specs of the methods that it tries, one after the other, to keep the fastest; empty for all others.
        quantises_blocks: Whether it rounds the values of a block to levels of the block's own scale.
        shares_scales: Whether all ranks use the same scales, which an exchange of their own agrees on.
        sends_parts: Whether a round sends a part of the vector, so that only several rounds send every element.
        same_elements: Whether all ranks send the same elements, of a shared draw.
        scatters: Whether the owner of a shard can be given the mean of that shard alone, by
            :func:`gradwire.exchange.protocols.reduce_scatter`: nothing that it remembers needs the mean of the rest.
        unbiased: Whether the outcome is the mean of the gradients, whatever they are, on average over draws.
        unbiased_note: The text to show in place of "yes" or "no" where ``unbiased`` alone does not say enough.
        omega_formula: ``omega`` for vectors, or blocks, of d elements as a formula to be shown, or a bound where it is
            too long.
        worst_step: Smallest known c with |C(x_i) - x_i| <= c M in every element of every worker i and for every draw,
            where M is the largest magnitude on any worker; None where none is known.
        worst_error: Smallest known c with |C(x_i) - x_i| <= c in every element of every worker i, whatever the vectors
            and the draw; None where none is known.
    """

    collectives: tuple[str, ...] = ()
    re_encoding: bool = False
    cut: int = 80
    share_cut: int = 80
    whole_step: bool = False
    joined: bool = False
    direction: bool = False
    owns_momentum: bool = False
    needs_loss_scale: bool = False
    kernels: tuple[str, ...] = ()
    open_coders: tuple[str, ...] = ()
    on_device: bool = False
    remembers: tuple[str, ...] = ()
    waiting: str = "residual"
    min_numel: int = 1024
    local_steps: int = 0
    outcomes_differ: bool = False
    sharded: bool = False
    needs_optimizer: bool = False
    needs_learning_rates: bool = False
    needs_link_cost: bool = False
    gauges: tuple[str, ...] = ()
    tries: tuple[str, ...] = ()
    quantises_blocks: bool = False
    shares_scales: bool = False
    sends_parts: bool = False
    same_elements: bool = False
    scatters: bool = False
    unbiased: bool = False
    unbiased_note: str | None = None
    omega_formula: str | None = None
    worst_step: float | None = None
    worst_error: float | None = None

    @property
    def bounds_residuals(self) -> bool:
        """Whether a residual of bounded vectors stays bounded in each element, whatever the variance."""
        return (self.worst_step is not None and self.worst_step < 1) or self.worst_error is not None
