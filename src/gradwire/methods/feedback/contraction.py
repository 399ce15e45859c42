"""Check for operators with which residuals of error feedback stay bounded."""

from __future__ import annotations

from gradwire.exchange.method import Method, no_operator, require


def check_contraction(owner: str, inner: Method, consequence: str, unseen: str, *, decays: bool = False) -> None:
    """Check that a method is an operator on one vector and a contraction by one of three bounds.

    The worst squared error is below the square of the input, or the error of every element is below the largest
    magnitude on any worker, or it is below a fixed magnitude.

    Args:
        consequence: Consequence if it is not a contraction, for the message.
        unseen: State that does not include the rounding of a sum in sixteen bits, for the message.
        decays: True if the residual decays from round to round. Then delta = 0 suffices: the operator's error is never
            longer than its input.

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
