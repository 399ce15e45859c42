"""Which operators keep what error feedback remembers bounded."""

from __future__ import annotations

from gradwire.exchange.compressor import Compressor
from gradwire.exchange.method import Method, require
from gradwire.methods.casts.cast import Cast
from gradwire.methods.levels.multi_scale import MultiScale
from gradwire.methods.rotations.rotated import Rotated
from gradwire.methods.sparse.rand_k import RandK
from gradwire.methods.wrappers.l_greco import LGreCo


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
    require(
        not (isinstance(inner, RandK) and inner.rescale),
        owner,
        f"{inner!r} multiplies what it keeps by d/k, and with it the residual's error: it diverges; use rescale=False",
    )
    require(
        isinstance(inner, Compressor | MultiScale | RandK | Rotated | LGreCo),
        owner,
        f"compressor is an operator on one vector, such as QSGDinf(block_size=256), not {inner!r}"
        + (f": the backend sums in sixteen bits, and {unseen} sees what that loses" * isinstance(inner, Cast)),
    )
    c, q = inner.worst_step, inner.omega
    reason = "no bound on its error is known" if q is None else f"its squared error may be {q:.3g} times the signal"
    bounded = (c is not None and c < 1) or inner.worst_error is not None or bool(inner.delta)
    require(
        bounded or (decays and inner.delta == 0),
        owner,
        f"{inner!r} is no contraction ({reason}), {consequence}; use smaller blocks, more levels, or the method "
        f"without {owner}",
    )
