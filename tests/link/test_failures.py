"""A rank that breaks: the others end in time and name it."""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import re
import signal
import sys
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import gradwire as gw
from gradwire.link.failures import Failures
from gradwire.link.peers import circle
from gradwire.link.peers.watch import Watch
from oracle import layers, square_loss
from ranks import fresh_ranks, unused_port, wait_until_watched

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(120)]


def run_until(what: str) -> tuple[str, str]:
    """Train; at step 3 rank 1 does something bad. Give the error's kind and sentence."""
    import torch.distributed as dist

    from gradwire.methods.ternary.ternary_codec import TernaryCodec

    rank = dist.get_rank()
    ddp = DistributedDataParallel(layers(6), bucket_cap_mb=0.0163)
    link = gw.attach(ddp, "terngrad")
    wait_until_watched()
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
    with fresh_ranks(3, group_timeout_s=6) as ranks:
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
        assert "rank 1 " + ("ended without a word" if what == "killed" else "hangs") in sentence
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


def break_between() -> str:
    """Train; rank 1 breaks between two exchanges, and makes no other. Give the error, of rank 1 before it asks."""
    import torch.distributed as dist

    rank = dist.get_rank()
    module = layers(6)
    link = gw.Link(module.named_parameters(), "terngrad", min_numel=1)
    wait_until_watched()

    def broken() -> None:
        raise KeyError("prepared")

    for step in range(3):
        if step == 1 and rank == 1:
            for lane in link._runtime.lanes:
                for transport in (lane._transports or {}).values():
                    transport.end_job = broken  # type: ignore[method-assign]
        if step == 2 and rank == 1:
            # As where the program waits in a collective of its own for the others, which wait for this rank.
            for _ in range(600):
                if link.error is not None:
                    return str(link.error)
                time.sleep(0.1)
            return "never told"
        square_loss(module, rank, step).backward()
        try:
            link.reduce_()
        except gw.GradwireError as error:
            return str(error)
    return "no error"


def test_what_breaks_between_two_exchanges_is_told_to_the_others_at_once() -> None:
    """A program that makes no other exchange, since it waits for the others elsewhere, must not keep them waiting."""
    with fresh_ranks(3, group_timeout_s=600) as ranks:
        ranks.start(break_between)
        answers = ranks.collect(60)
    for rank, (kind, value) in enumerate(answers):
        assert kind == "ok", value
        assert "rank 1 failed at the preparation of its next exchange: KeyError: 'prepared'" in value
        assert value.startswith("rank 1 failed" if rank == 1 else f"rank {rank} could not go on at bucket")


class Stub:
    """A circle, or a lane, that takes every call and keeps what it was told."""

    rank, ranks = 1, (0, 1)

    def __init__(self) -> None:
        self.told: list[str] = []
        self.busy = False

    def failed(self, text: str) -> None:
        self.told.append(text)

    def nothing(self, *_: object) -> None:
        """Do nothing."""

    break_by = on_failure = hang_up = nothing


def test_a_lane_that_a_link_has_left_breaks_nothing_when_it_ends() -> None:
    """Members go on over other lanes, while those of the epoch before may still end."""
    left, own, circle = Stub(), Stub(), Stub()
    failures: Any = Failures(circle, [left])  # type: ignore[arg-type, list-item]
    failures.forget()
    failures._failed_between(left, KeyError("prepared"))
    failures.connect(circle, [own])
    failures._failed_between(left, KeyError("prepared"))
    assert failures.error is None
    assert not circle.told
    failures._failed_between(own, KeyError("prepared"))
    assert "the preparation of its next exchange: KeyError: 'prepared'" in str(failures.error)
    assert circle.told


def end(how: str) -> None:
    """End this process as a script of its own would end."""
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how in ("raises", "out of memory"):
        sys.last_value = KeyError("boom") if how == "raises" else MemoryError("no room")
    atexit._run_exitfuncs()
    os._exit(0 if how == "leaves" else 1)


def hosted_by_rank_0(port: int) -> None:
    """Join a group whose store is in the process of rank 0, as in a script that init_process_group starts alone."""
    import torch.distributed as dist

    rank, world_size = dist.get_rank(), dist.get_world_size()
    # A rank is connected before the others know that they are, and takes their connections away if it ends its group.
    dist.barrier()
    dist.destroy_process_group()
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "USE_LIBUV": "1"}
    dist.init_process_group("gloo", rank=rank, world_size=world_size)


def train_until(spec: str, victim: int, how: str, port: int, part: Sequence[int] = ()) -> tuple[str, str, float]:
    """Train until a rank ends between two exchanges; give this one's error, and how long after the end it came."""
    import torch.distributed as dist

    if port:
        hosted_by_rank_0(port)
    rank = dist.get_rank()
    group = dist.new_group(list(part)) if part else None
    if part and rank not in part:
        return "", "", 0.0
    module = layers(6)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    link = gw.Link(module.named_parameters(), spec, group=group, optimizer=optimizer, min_numel=1)
    wait_until_watched(group)
    ended_s = 0.0
    try:
        for step in range(8):
            if step == 3:
                if rank == victim:
                    end(how)
                ended_s = time.monotonic()
            square_loss(module, rank, step).backward()
            link.reduce_()
            optimizer.step()
    except gw.GradwireError as error:
        after_s = time.monotonic() - ended_s
        # As a script that does not catch it: it ends, and the others see its end.
        atexit._run_exitfuncs()
        return str(error), str(link.error), after_s
    return "no error", "", 0.0


KILLED = "ended without a word (killed, or out of memory?)"
UNCAUGHT = "failed with KeyError: 'boom', which nobody caught"


@pytest.mark.parametrize(
    ("spec", "victim", "how", "hosted", "said"),
    [
        # Ranks 0 and 2 exchange nothing with each other, and rank 1 and 3 neither.
        ("DPSGD(graph='ring')", 1, "killed", False, KILLED),
        ("gtopk", 3, "killed", False, KILLED),
        ("Hierarchical(QSGDinf(), node_size=2)", 2, "killed", True, KILLED),
        # The store ends with rank 0, and nobody can be asked any more.
        ("DPSGD(graph='ring')", 0, "killed", True, KILLED),
        ("terngrad", 0, "raises", True, UNCAUGHT),
        ("DPSGD(graph='ring')", 2, "raises", False, UNCAUGHT),
        ("gtopk", 1, "out of memory", False, "failed with MemoryError: no room, which nobody caught"),
        ("fp16", 3, "leaves", True, "ended by itself: its program came to its end, or called sys.exit"),
    ],
)
def test_every_survivor_names_the_rank_that_ended(spec: str, victim: int, how: str, hosted: bool, said: str) -> None:
    with fresh_ranks(4, group_timeout_s=600) as ranks:
        ranks.start(train_until, spec, victim, how, unused_port() if hosted else 0)
        answers = ranks.collect(60)
    assert answers.pop(victim)[0] == "gone"
    for kind, value in answers:
        assert kind == "ok", value
        error, kept, after_s = value
        assert error == kept
        assert f": rank {victim} {said} [" in error
        # Nobody waits for what will not come; the rest is the machine's own time.
        assert after_s < circle.PATIENCE_S + 20


def test_ranks_of_a_subgroup_are_told_by_their_global_numbers() -> None:
    with fresh_ranks(4, group_timeout_s=600) as ranks:
        ranks.start(train_until, "terngrad", 3, "killed", 0, (1, 2, 3))
        answers = ranks.collect(60)
    assert answers[0] == ("ok", ("", "", 0.0))
    for rank in (1, 2):
        kind, value = answers[rank]
        assert kind == "ok", value
        assert value[0].startswith(f"rank {rank} could not go on at ")
        assert f": rank 3 {KILLED} [" in value[0]


def end_within(what: str, folder: str) -> tuple[str, str, str]:
    """Kill rank 3 of four in the middle of a call; give what the call raised, its class, and the link's error."""
    import torch.distributed as dist

    rank = dist.get_rank()
    parameters = list(layers(3).named_parameters())
    # Ranks that import this module later than others would come to the call when rank 3 has ended.
    dist.barrier()

    def deadly(given: Any) -> Any:
        if rank == 3:
            # Who ends before the others have met it is only known not to have come.
            while what != "elsewhere" and Watch.current().absent(range(4)):
                time.sleep(0.01)
            # The others are waiting by now, or come when it has ended: both have the same outcome.
            time.sleep(0.5)
            end("killed")
        yield from given

    link: Any = None
    try:
        if what == "elsewhere":
            list(deadly(()))
        if what == "connecting" and rank == 3:
            circle.Circle.connected = lambda *_: list(deadly(()))  # type: ignore[method-assign,assignment,return-value]
        link = gw.Link(deadly(parameters) if what == "attach" else parameters, "terngrad")
        if what == "load":
            gw.save(link, folder)
        if rank == 3:
            link.state_dict = link.check_state_dict = lambda *_: list(deadly(()))
        gw.load(link, folder) if what == "load" else gw.save(link, folder)
    except gw.GradwireError as error:
        return str(error), type(error).__name__, str(link and link.error)
    return "no error", "", ""


@pytest.mark.parametrize("what", ["attach", "connecting", "save", "load", "elsewhere"])
def test_a_death_in_a_call_that_all_ranks_make_names_the_rank(what: str, tmp_path: Path) -> None:
    with fresh_ranks(4, group_timeout_s=600) as ranks:
        ranks.start(end_within, what, str(tmp_path))
        *found, (gone, _) = ranks.collect(60)
    assert gone == "gone"
    where = {
        "save": "gradwire.save or load",
        "load": "gradwire.save or load",
        "connecting": "the connections of a link",
    }.get(what, "the comparison of what ranks were started with")
    missed = r"never came to rank \d \(it ended before, or is out of its reach\)"
    how = missed if what == "elsewhere" else re.escape(KILLED)
    for rank, (kind, value) in enumerate(found):
        assert kind == "ok", value
        error, name, kept = value
        assert name == "ExchangeError"
        assert re.match(rf"rank {rank} could not go on at {re.escape(where)}: rank 3 {how} \[", error)
        assert kept == (error if what in ("save", "load") else "None")
    # What was saved before is still there, whole; what was not is not.
    assert (tmp_path / "common.pt").exists() == (what == "load")


def begin_without_store(port: int) -> str:
    """Build a link when rank 0 has ended, and with it the store by which ranks would meet."""
    import torch.distributed as dist

    hosted_by_rank_0(port)
    dist.barrier()
    if dist.get_rank() == 0:
        end("killed")
    store = dist.distributed_c10d._get_default_store()
    with contextlib.suppress(RuntimeError):
        while True:
            store.check(["anything"])
            time.sleep(0.01)
    try:
        gw.Link(layers(3).named_parameters(), "terngrad")
    except gw.ExchangeError as error:
        return str(error)
    return "no error"


def test_a_link_that_begins_when_the_host_of_the_store_has_ended_names_it() -> None:
    with fresh_ranks(3, group_timeout_s=600) as ranks:
        ranks.start(begin_without_store, unused_port())
        (gone, _), *found = ranks.collect(60)
    assert gone == "gone"
    lost = "rank 0 ended, or is out of reach, and with it the process group's store, which it holds"
    assert found == [("ok", f"rank {rank} could not meet the others: {lost}") for rank in (1, 2)]


def broken(where: str) -> tuple[weakref.ref[Any], Exception | None]:
    """Break a link in the hook itself, in a lane, or in a collective's callback; give its module, and what it keeps."""
    rank = torch.distributed.get_rank()
    ddp = DistributedDataParallel(layers(6))
    link = gw.attach(ddp, "fp32" if where == "callback" else "terngrad")
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


@pytest.mark.parametrize("where", ["hook", "lane", "callback"])
def test_a_broken_link_keeps_its_error_but_not_the_program_that_it_broke(where: str) -> None:
    with fresh_ranks(2) as ranks:
        for freed, sentence, cause in ranks(let_go_of, where):
            assert freed
            assert "round 0" in sentence
            assert "KeyError" in sentence
            assert cause == "KeyError('boom')"
