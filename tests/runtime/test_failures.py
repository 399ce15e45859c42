"""A rank that breaks: the others end in time and name it."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import weakref
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import gradwire as gw
from oracle import layers, square_loss
from ranks import fresh_ranks

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(120)]


def run_until(what: str) -> tuple[str, str]:
    """Train; at step 3 rank 1 does something bad. Give the error's kind and sentence."""
    import torch.distributed as dist

    from gradwire.codecs import TernaryCodec

    rank = dist.get_rank()
    ddp = DistributedDataParallel(layers(6), bucket_cap_mb=0.0163)
    link = gw.attach(ddp, "terngrad")
    for step in range(6):
        loss = square_loss(ddp, rank, step)
        if step == 3 and rank == 1:
            if what == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            elif what == "stopped":
                os.kill(os.getpid(), signal.SIGSTOP)
            elif what == "kernel fails":

                def boom(self: Any, *arguments: Any) -> None:
                    raise KeyError("boom")

                TernaryCodec.encode = boom  # type: ignore[method-assign]
        try:
            loss.backward()
        except (RuntimeError, gw.GradwireError):
            again = ""
            try:
                square_loss(ddp, rank, step).backward()
            except (RuntimeError, gw.GradwireError) as error:
                again = str(error)
            sentence = f"{link.error} | again: {bool(again)}"
            return type(link.error).__name__, sentence
    return "none", ""


@pytest.mark.parametrize("what", ["killed", "stopped"])
def test_a_rank_that_vanishes_is_named_with_the_bucket(what: str) -> None:
    with fresh_ranks(3, group_timeout_s=10) as ranks:
        ranks.start(run_until, what)
        if what == "stopped":
            # A stopped rank never answers: wait for the others alone, then let it go.
            found = [ranks.pipes[r].recv() for r in (0, 2)]
            os.kill(int(ranks.processes[1].pid or 0), signal.SIGKILL)
        else:
            answers = ranks.collect(40)
            assert answers[1] == ("gone", -signal.SIGKILL)
            found = [answers[0], answers[2]]
    for kind, value in found:
        assert kind == "ok", value
        error, sentence = value
        assert error == "ExchangeError"
        assert "rank 1 ended or hangs without a report" in sentence
        assert "bucket" in sentence
        assert "round 3" in sentence
        # Once broken, the link refuses at once instead of hanging in half a step.
        assert "again: True" in sentence


def test_a_rank_that_fails_tells_the_others_what_and_where() -> None:
    with fresh_ranks(3, group_timeout_s=600) as ranks:
        ranks.start(run_until, "kernel fails")
        # Long before the group's timeout, although rank 1 lives on.
        answers = ranks.collect(60)
    for rank, (kind, value) in enumerate(answers):
        assert kind == "ok", value
        error, sentence = value
        assert error == "ExchangeError"
        assert "rank 1 failed at bucket" in sentence
        assert "KeyError: 'boom'" in sentence
        assert sentence.startswith("rank 1 failed" if rank == 1 else f"rank {rank} could not go on at bucket")


def broken(where: str) -> tuple[weakref.ref[Any], Exception | None]:
    """Break a link in the hook itself, or in a lane; give its module, and what it keeps."""
    rank = torch.distributed.get_rank()
    ddp = DistributedDataParallel(layers(6))
    link = gw.attach(ddp, "terngrad")
    # A rank that breaks its link while the other still connects would end the other's attach instead.
    torch.distributed.barrier()

    def fail(*arguments: Any, **more: Any) -> None:
        try:
            raise ValueError("first")
        except ValueError as error:
            raise KeyError("boom") from error

    if where == "hook":
        link._selection.begin = fail  # type: ignore[method-assign]
    else:
        link._runtime.diagnostics.measure = fail  # type: ignore[method-assign]
    for step in range(2):
        with contextlib.suppress(RuntimeError, gw.GradwireError):
            square_loss(ddp, rank, step).backward()
    link.close()
    return weakref.ref(ddp), link.error


def let_go_of(where: str) -> tuple[bool, str, str]:
    """Return whether the module of a broken link is freed while somebody holds its error, and what that says."""
    module, kept = broken(where)
    gc.collect()
    return module() is None, str(kept), repr(kept.__cause__ if kept else None)


@pytest.mark.parametrize("where", ["hook", "lane"])
def test_a_broken_link_keeps_its_error_but_not_the_program_that_it_broke(where: str) -> None:
    with fresh_ranks(2) as ranks:
        for freed, sentence, cause in ranks(let_go_of, where):
            assert freed
            assert "round 0" in sentence
            assert "KeyError" in sentence
            assert cause == "KeyError('boom')"
