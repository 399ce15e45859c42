"""Methods with one sender: receivers have its outcomes, without its vectors and its own state."""

from __future__ import annotations

import pytest
import torch

import gradwire as gw
from gradwire.kernels import get_kernels
from gradwire.methods.gossip.sender_rounds import SenderRounds, check_single_sender, follows_state

SHAPE = (24, 40)


def vector(seed: int) -> torch.Tensor:
    return torch.randn(SHAPE[0] * SHAPE[1], generator=torch.Generator().manual_seed(seed))


def rounds(method: gw.Method) -> SenderRounds:
    return SenderRounds(method, get_kernels("auto"), "x", SHAPE, 7)


def followed() -> list[str]:
    """Return the names of all methods that can have one sender."""
    found = []
    for name in gw.methods():
        method = settled(name)
        try:
            check_single_sender("test", method)
        except gw.IncompatibleError:
            continue
        found.append(name)
    return found


def settled(name: str) -> gw.Method:
    method = gw.method(name)
    return method.with_coder(method.traits.open_coders[0]) if method.traits.open_coders else method


FOLLOWED = followed()


def test_most_methods_can_be_followed() -> None:
    assert {"terngrad", "diana", "ef21", "powersgd", "acp_sgd", "natural", "clt_k", "onebit", "coded"} <= {*FOLLOWED}
    assert not {"signsgd", "dgc", "alq", "diloco", "dpsgd", "sketched_sgd", "async_server"} & {*FOLLOWED}
    assert [name for name in FOLLOWED if follows_state(settled(name))] == ["ef21", "diana", "powersgd", "acp_sgd"]


@pytest.mark.parametrize("name", FOLLOWED)
def test_a_receiver_has_the_outcomes_of_the_sender(name: str) -> None:
    method = settled(name)
    sender, receiver = rounds(method), rounds(method)
    for number in range(3):
        x = vector(number)
        data, outcome = sender.encode(x)
        assert torch.equal(x, vector(number))
        sender.commit()
        # Looking at a round changes nothing.
        assert torch.equal(receiver.decode(data), outcome)
        receiver.discard()
        assert torch.equal(receiver.decode(data), outcome)
        receiver.commit()
        assert bool(outcome.any())


def test_what_was_not_sent_is_not_kept() -> None:
    """The caller's next vector has it already: with error feedback, rounds are those of the operator inside."""
    sender = rounds(gw.method("ErrorFeedback(compressor=TopK(density=0.05))"))
    for number in range(3):
        x = vector(number)
        outcome = sender.encode(x)[1]
        sender.commit()
        kept = outcome != 0
        assert int(kept.sum()) == 48
        assert torch.equal(outcome[kept], x[kept])


def test_rounds_that_are_cut_short_are_refused() -> None:
    for name in ("terngrad", "diana", "powersgd", "topk"):
        sender, receiver = rounds(settled(name)), rounds(settled(name))
        data = sender.encode(vector(0))[0]
        for size in (0, 3, 4, 5, len(data) // 2, len(data) - 1):
            with pytest.raises(gw.PayloadError):
                receiver.decode(data[:size])
            receiver.discard()
        with pytest.raises(gw.PayloadError, match="behind its last reply"):
            receiver.decode(torch.cat([data, data[:1]]))
        receiver.discard()
    short = rounds(settled("terngrad")).encode(vector(0))[0]
    # The scale, which all ranks share, has four bytes.
    damaged = torch.cat([torch.zeros(4, dtype=torch.uint8), short[8:]])
    with pytest.raises(gw.PayloadError, match="a reply has 0 bytes where a Reduce has 4"):
        rounds(settled("terngrad")).decode(damaged)
