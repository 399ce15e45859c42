"""Which operators keep what error feedback remembers bounded."""

from __future__ import annotations

from gradwire.exchange.method import Method, no_operator, require


def check_contraction(owner: str, inner: Method, consequence: str, unseen: str, *, decays: bool = False) -> None:
    """Check that a method is an operator on one vector, and a contraction by one of three bounds.

    Its worst squared error is below the square of its input, or no element errs by as much as the largest magnitude on
    any worker, or none by more than a fixed magnitude.

    Args:
        consequence: What follows where it is no contraction, for the message.
        unseen: What does not see the loss of a sum in sixteen bits.
        decays: Whether what is left out shrinks by itself from round to round: then it suffices that the operator's
            error is never longer than its input, delta = 0.

    Raises:
        HyperparameterError: it is not.
    """
    refusal = inner.refusal_of_feedback(unseen) if isinstance(inner, Method) else no_operator(inner)
    require(refusal is None, owner, refusal or "")
    q = inner.omega
    reason = "no bound on its error is known" if q is None else f"its squared error may be {q:.3g} times the signal"
    bounded = inner.traits.bounds_residuals or bool(inner.delta)
    require(
        bounded or (decays and inner.delta == 0),
        owner,
        f"{inner!r} is no contraction ({reason}), {consequence}; use smaller blocks, more levels, or the method "
        f"without {owner}",
    )
