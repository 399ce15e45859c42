"""What a link came to do, for people: what ``auto`` chose, a return to the fallback."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["choice_details", "choice_text", "coder_text", "fallback_reason", "fallback_text", "link_texts"]


def choice_text(chosen: str | None, reason: str | None) -> str | None:
    """Describe in one line what was chosen; None where there was nothing to choose.

    Example:
        >>> choice_text("bf16", "the fastest of 3 in 4 turns of 3 steps")
        'auto took bf16 (the fastest of 3 in 4 turns of 3 steps)'
    """
    if chosen is not None:
        return f"auto took {chosen} ({reason})"
    return None if reason is None else "auto had not chosen yet: its trial takes more steps than these"


def choice_details(choice: Mapping[str, Any]) -> str:
    """Describe what was chosen, what each candidate's step took, and what was not tried, in one line."""
    parts = [choice_text(choice.get("chosen"), choice.get("reason")) or "nothing was chosen"]
    steps = [f"{spec} {step_s * 1e3:.3g} ms" for spec, step_s in (choice.get("step_s") or {}).items()]
    if steps:
        parts.append(f"a step took {', '.join(steps)}")
    parts += [f"{spec} was {why}" for spec, why in (choice.get("left_out") or {}).items()]
    return "; ".join(parts)


def coder_text(coder: Mapping[str, Any]) -> str:
    """Describe in one line which entropy coder ran, why, and what each took, from a link's record.

    Example:
        >>> times = {"rans": 0.002, "huffman": 0.001}
        >>> coder_text({"chosen": "huffman", "reason": "the least time here", "encode_decode_s": times})
        'huffman (the least time here): rans 2 ms, huffman 1 ms'
    """
    times = [f"{name} {seconds * 1e3:.3g} ms" for name, seconds in (coder.get("encode_decode_s") or {}).items()]
    return f"{coder['chosen']} ({coder['reason']})" + (f": {', '.join(times)}" if times else "")


def fallback_reason(returned: Mapping[str, Any]) -> str:
    """Describe when and why ranks returned to the fallback, from a link's record."""
    return (
        f"from round {returned['since_round']} on: what rank {returned['rank']} sent was off by "
        f"{returned['relative_error']:.3g} times the gradient's norm"
    )


def fallback_text(method: str | None, reason: str | None) -> str | None:
    """Describe in one line what ranks returned to; None where they did not.

    Example:
        >>> fallback_text("BF16()", "from round 2 on")
        'returned to BF16() (from round 2 on)'
    """
    return None if method is None else f"returned to {method} ({reason})"


def link_texts(row: Mapping[str, Any]) -> list[str]:
    """Describe what a run's link came to do, from the run's flat numbers."""
    texts = (
        choice_text(row["chosen_method"], row["choice_reason"]),
        fallback_text(row["fallback_method"], row["fallback_reason"]),
    )
    return [text for text in texts if text is not None]
