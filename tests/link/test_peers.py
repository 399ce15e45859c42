"""What ranks tell each other of failures, and whom they name; time is the test's."""

from __future__ import annotations

import contextlib
import logging
import math
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from gradwire.errors import ExchangeError, PayloadError
from gradwire.exchange.drivers import Group
from gradwire.link.peers import circle, connections, watch
from gradwire.link.peers.addresses import Address, listening
from gradwire.link.peers.blame import BECAUSE, CLOSED, ENDED, FAILED, Inbox, Notice, Standing, judge
from gradwire.link.peers.circle import Circle
from gradwire.link.peers.watch import Watch

SILENT = "rank 2 hangs, or the network between it and rank 0 is silent: no sign of it for 6[0-9] s"
KILLED = "rank 1 ended without a word (killed, or out of memory?)"


def until(true: Callable[[], bool]) -> bool:
    """Wait for something that another thread does."""
    for _ in range(6000):
        if true():
            return True
        time.sleep(0.01)
    return False


# ---------------------------------------------------------------------- bytes of peers


notices = st.builds(
    Notice,
    st.sampled_from([FAILED, BECAUSE, CLOSED, ENDED]),
    st.text(max_size=64),
    st.lists(st.integers(0, (1 << 31) - 1), max_size=64).map(tuple),
    st.text(max_size=2000),
)


@given(st.lists(notices, max_size=4), st.integers(1, 50))
def test_a_notice_arrives_whole_in_whichever_pieces(sent: list[Notice], size: int) -> None:
    data = b"\0".join(notice.frame() for notice in sent)
    inbox, found = Inbox(), list[Notice]()
    for at in range(0, len(data), size):
        found += inbox.feed(data[at : at + size])
    assert [(n.kind, n.link, n.ranks) for n in found] == [(n.kind, n.link, n.ranks) for n in sent]
    assert all(len(n.text) <= 1000 and n.text.isprintable() for n in found)


@given(st.lists(st.binary(max_size=200), max_size=8), st.booleans())
def test_any_bytes_of_a_peer_are_notices_or_one_error(pieces: list[bytes], framed: bool) -> None:
    inbox = Inbox()
    with contextlib.suppress(PayloadError):
        for piece in pieces:
            for found in inbox.feed(b"\1" + len(piece).to_bytes(2, "big") + piece if framed else piece):
                assert isinstance(found, Notice)
            # What is not whole yet stays bounded, whatever length was announced.
            assert len(inbox._bytes) <= 8192 + 3


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{}", b"[]", b"null", b'["failed", "", [1]]', b'["failed", "", [true], ""]', b'["other", "", [], ""]',
        b'["failed", "", [-1], ""]', b'["failed", "", 1, ""]', b'["failed", 1, [], ""]', b'["failed", "", [], null]',
        b'["failed", "", [1e9], ""]', b"\xff\xfe", b"[" * 8000, b"9" * 8000,
    ],
)  # fmt: skip
def test_a_malformed_notice_is_refused(body: bytes) -> None:
    with pytest.raises(PayloadError):
        Inbox().feed(b"\1" + len(body).to_bytes(2, "big") + body)


@given(st.binary(max_size=600))
def test_any_bytes_in_the_store_are_an_address_or_an_error(value: bytes) -> None:
    with contextlib.suppress(PayloadError):
        assert Address.read(value).to_bytes() == value or value.split(b" ")[1].startswith(b"0")


# ---------------------------------------------------------------------- who is named


def standing(ended_s: float | None = None, *notices: tuple[Notice, float]) -> Standing:
    made = Standing(heard_s=0.0, ended_s=ended_s)
    for notice, now_s in notices:
        made.take(notice, now_s)
    return made


def test_a_survivor_that_ends_because_of_another_is_not_named() -> None:
    told = Notice(BECAUSE, "a", (1,), KILLED)
    # Not even where nothing is known of the victim itself, or the survivor spoke of another link of the same process.
    for link in ("a", "b"):
        found = judge({2: standing(8.0, (told, 7.0))}, link)
        assert found is not None
        assert (found.ranks, found.text) == ((1,), KILLED)
    alive = {2: standing(None, (told, 7.0))}
    assert judge(alive, "b") is None
    through = judge(alive, "b", elsewhere_since_s=7.0)
    assert through is not None
    assert through.ranks == (1,)


def test_a_failure_that_a_program_went_on_from_is_not_named_for_a_later_link() -> None:
    """A link "old" failed on rank 2, whose program caught that; now rank 1 fails in a new one."""
    ranks = {
        1: standing(None, (Notice(FAILED, "new", text="at bucket 0: ValueError: no"), 7.2)),
        2: standing(None, (Notice(FAILED, "old", text="at bucket 5: KeyError"), 7.0)),
    }
    for since_s in (0.0, 7.1, math.inf):
        found = judge(ranks, "new", elsewhere_since_s=since_s)
        assert found is not None
        assert (found.ranks, found.text) == ((1,), "rank 1 failed at bucket 0: ValueError: no")
    # Where nothing is said of the new one, only a failure of now counts.
    assert judge({2: ranks[2]}, "new", elsewhere_since_s=7.1) is None
    other = judge({2: ranks[2]}, "new", elsewhere_since_s=6.9)
    assert other is not None
    assert other.ranks == (2,)


def test_who_fails_is_named_after_any_number_of_links_that_were_closed() -> None:
    made = standing()
    made.take(Notice(ENDED, text="ended by itself"), 0.0)
    for link in range(10_000):
        made.take(Notice(CLOSED, str(link)), float(link))
    made.take(Notice(FAILED, "the last", text="at a bucket"), 20_000.0)
    blame = judge({1: made}, "the last")
    assert blame is not None
    assert (blame.ranks, blame.text) == ((1,), "rank 1 failed at a bucket")
    assert made.first(ENDED) is not None
    assert len(made.notices) < 1000


def test_a_chain_of_survivors_resolves_to_the_victim() -> None:
    """Each is told only by the one before it."""
    said = Notice(FAILED, "a", (), "at bucket 3, round 7: KeyError: 'boom'")
    told, text = said, ""
    for rank in range(1, 6):
        found = judge({rank: standing(1.0, (told, 0.5))}, "a")
        assert found is not None
        assert found.ranks == (1,)
        text = found.text
        told = Notice(BECAUSE, "a", found.ranks, found.text)
    assert text == "rank 1 failed at bucket 3, round 7: KeyError: 'boom'"


def test_ranks_that_end_together_are_all_named_and_those_that_end_later_are_not() -> None:
    found = judge({1: standing(10.0), 2: standing(10.3), 3: standing(14.0)}, "a")
    assert found is not None
    assert found.ranks == (1, 2)
    assert "rank 2 ended without a word" in found.text
    assert "rank 3" not in found.text


def test_an_end_in_order_counts_only_where_it_is_asked_for() -> None:
    ends = {
        "rank 1 ended by itself": standing(5.0, (Notice(ENDED, text="ended by itself"), 4.9)),
        "rank 1 closed its link, handling KeyError: 1": standing(
            None, (Notice(CLOSED, "a", text=", handling KeyError: 1"), 5.0)
        ),
    }
    for text, how in ends.items():
        assert judge({1: how}, "a", orderly=False) is None
        found = judge({1: how}, "a")
        assert found is not None
        assert (found.ranks, found.text) == ((1,), text)
    # An exception that nobody caught is told before the end.
    raised = standing(
        5.0, (Notice(FAILED, text="with KeyError: 'boom', which nobody caught"), 4.9), (Notice(ENDED), 4.9)
    )
    found = judge({1: raised}, "a", orderly=False)
    assert found is not None
    assert found.text == "rank 1 failed with KeyError: 'boom', which nobody caught"


def test_what_a_rank_said_of_another_link_does_not_break_this_one_while_it_lives() -> None:
    failed = standing(None, (Notice(FAILED, "other", (), "at round 1: KeyError: 1"), 1.0))
    assert judge({1: failed}, "a") is None
    assert judge({1: failed}, "other") is not None


# ---------------------------------------------------------------------- connections


@contextlib.contextmanager
def watches(world_size: int) -> Iterator[tuple[dist.Store, list[Watch]]]:
    store = dist.HashStore()
    made = [Watch(store, rank, world_size) for rank in range(world_size)]
    yield store, made
    for one in made:
        one._connections.close()


def knows(one: Watch, other: int) -> Standing:
    return one._standings[other]


def test_all_ranks_meet_and_see_an_end_behind_what_was_said() -> None:
    with watches(3) as (_, made):
        for one in made:
            one.meet(range(3))
        assert until(lambda: all(knows(a, b.rank).heard_s for a in made for b in made if a is not b))
        made[1].tell(Notice(BECAUSE, "a", (7,), "rank 7 ended"))
        made[1]._connections.close()
        for one in (made[0], made[2]):
            assert until(lambda one=one: knows(one, 1).ended_s is not None)
            assert knows(one, 1).unheard is None
            found = one.judge([1], "b")
            assert found is not None
            assert found.ranks == (7,)
        assert knows(made[0], 2).ended_s is None


def test_a_rank_behind_a_silent_network_keeps_nobody_from_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """What listens at rank 0's address accepts a connection, and says nothing."""
    monkeypatch.setattr(connections, "FIRST_TRY_S", 0.1)
    monkeypatch.setattr(connections, "HANDSHAKE_S", 3600.0)
    with watches(3) as (store, made), socket.create_server(("127.0.0.1", 0)) as silent:
        store.set("gradwire/peers/0", Address("127.0.0.1", silent.getsockname()[1], "0" * 32).to_bytes())
        made[2].meet(range(3))
        made[1].meet([2])
        assert until(lambda: knows(made[2], 1).heard_s is not None)
        assert knows(made[2], 0).heard_s is None


def test_trouble_is_told_to_those_that_are_met_later() -> None:
    with watches(2) as (_, made):
        made[1].tell(Notice(FAILED, "a", text="at bucket 0: KeyError: 'boom'"))
        for one in made:
            one.meet(range(2))
        assert until(lambda: knows(made[0], 1).heard_s is not None)
        made[1].tell(Notice(CLOSED, "a"))
        # A connection keeps the order of what is said.
        assert until(lambda: (CLOSED, "a") in knows(made[0], 1).notices)
        found = made[0].judge([1], "a")
        assert found is not None
        assert found.text == "rank 1 failed at bucket 0: KeyError: 'boom'"


def test_a_link_may_be_closed_by_a_garbage_collection_while_something_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with watches(2) as (_, made):
        for one in made:
            one.meet(range(2))
        assert until(lambda: all(knows(one, 1 - one.rank).heard_s is not None for one in made))
        send, closed = connections._Line.send, list[None]()

        def collect_and_send(line: connections._Line, data: bytes) -> None:
            if line.socket is made[1]._connections._lines[0].socket and not closed:
                closed.append(None)
                made[1].tell(Notice(CLOSED, "b"))
            send(line, data)

        monkeypatch.setattr(connections._Line, "send", collect_and_send)
        telling = threading.Thread(target=made[1].tell, args=(Notice(CLOSED, "a"),), daemon=True)
        telling.start()
        telling.join(10)
        assert not telling.is_alive()
        assert until(lambda: {(CLOSED, "a"), (CLOSED, "b")} <= knows(made[0], 1).notices.keys())


def test_who_fails_waits_for_those_that_connect_just_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its program may fail in the first steps, on a machine so busy that ranks have not met."""
    monkeypatch.setattr(sys, "last_value", KeyError("boom"), raising=False)
    monkeypatch.setattr(watch, "MEET_S", 60.0)
    with watches(2) as (_, made):
        made[1].meet([0])
        leaving = threading.Thread(target=made[1].leave, args=("its program came to its end",))
        made[0].meet([1])
        leaving.start()
        assert until(lambda: knows(made[0], 1).ended_s is not None)
        leaving.join(60)
        found = made[0].judge([1], "a")
        assert found is not None
        assert found.text == "rank 1 failed with KeyError: 'boom', which nobody caught"


def test_who_fails_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "last_value", KeyError("boom"), raising=False)
    monkeypatch.setattr(watch, "MEET_S", 0.05)
    with watches(2) as (_, made):
        made[1].meet([0])
        leaving = threading.Thread(target=made[1].leave, args=("its program came to its end",))
        leaving.start()
        leaving.join(10)
        assert not leaving.is_alive()


def test_who_fails_does_not_wait_for_those_that_it_blames(monkeypatch: pytest.MonkeyPatch) -> None:
    """They never came."""
    monkeypatch.setattr(sys, "last_value", KeyError("boom"), raising=False)
    monkeypatch.setattr(watch, "MEET_S", 600.0)
    with watches(2) as (_, made):
        made[1].meet([7])
        made[1].tell(Notice(BECAUSE, "a", (7,), "rank 7 never came"))
        leaving = threading.Thread(target=made[1].leave, args=("its program came to its end",), daemon=True)
        leaving.start()
        leaving.join(10)
        assert not leaving.is_alive()


def test_a_stranger_is_not_taken_for_a_rank() -> None:
    with watches(2) as (store, made):
        made[0].meet([1])
        at = Address.read(store.get("gradwire/peers/0"))
        hello = connections._HELLO.pack(b"gwpeers1", 1)
        for said in (b"GET / HTTP/1.1\r\n" * 8, hello + bytes(32), hello[:-4] + bytes(4) + at.proof(hello), b""):
            with socket.create_connection((at.host, at.port)) as stranger:
                stranger.sendall(said)
                stranger.shutdown(socket.SHUT_WR)
                stranger.settimeout(10)
                with contextlib.suppress(ConnectionResetError):
                    assert stranger.recv(1) == b""
        assert knows(made[0], 1).heard_s is None
        assert knows(made[0], 1).ended_s is None
        # One who knows the secret is a rank; what it sends then is its own fault, and not its end.
        with socket.create_connection((at.host, at.port)) as peer:
            peer.sendall(hello + at.proof(hello))
            assert len(peer.recv(32)) == 32
            peer.sendall(b"\1\xff\xff")
            assert until(lambda: knows(made[0], 1).unheard is not None)
        found = made[0].judge([1], "a")
        assert found is not None
        assert "what it sends cannot be read" in found.text


@pytest.mark.parametrize("value", [b"", b"nonsense", b"\xff" * 600, b"127.0.0.1 1 " + b"0" * 32, b"[] 99999 x"])
def test_a_malformed_entry_of_the_store_harms_nobody(value: bytes) -> None:
    with watches(3) as (store, made):
        right = store.get("gradwire/peers/0")
        store.set("gradwire/peers/0", value)
        for one in made:
            one.meet(range(3))
        assert until(lambda: bool(knows(made[2], 1).heard_s))
        assert knows(made[2], 0).heard_s is None
        # The rank is met as soon as its entry is right, as after a restart.
        store.set("gradwire/peers/0", right)
        assert until(lambda: bool(knows(made[2], 0).heard_s and knows(made[0], 2).heard_s))


def test_a_rank_listens_where_the_host_of_the_store_reaches_it() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    listener, at = listening(dist.PrefixStore("a", dist.PrefixStore("b", store)))
    with listener:
        assert at.host == "127.0.0.1"
        assert listener.getsockname() == ("127.0.0.1", at.port)


class _Ranks(Group):
    """The part of a group that a circle asks for."""

    def __init__(self, place: int, ranks: Sequence[int]) -> None:
        self.place, self.ranks, self.store = place, tuple(ranks), None

    def all_gather(self, rows: torch.Tensor, own: torch.Tensor) -> dist.Work:
        raise NotImplementedError

    def broadcast(self, row: torch.Tensor, source: int) -> None:
        raise NotImplementedError


def circles(
    monkeypatch: pytest.MonkeyPatch, made: list[Watch], ranks: list[int], beside: Sequence[int] = ()
) -> list[Circle]:
    """Return the circle of some ranks, seen from each of them."""
    found = []
    for place, rank in enumerate(ranks):
        monkeypatch.setattr(Watch, "of", lambda group, rank=rank: made[rank])
        found.append(Circle(_Ranks(place, ranks), beside))
        found[-1].token = "link"
    assert until(lambda: all(knows(made[a], b).heard_s for a in ranks for b in ranks if a != b))
    return found


@contextlib.contextmanager
def silent_for(one: Watch, ranks: Sequence[int], seconds: float) -> Iterator[None]:
    """Let ranks have been silent for some time, until this one waits for what they tell."""
    with one.changed:
        # Their next sign of life would come at any moment.
        for rank in ranks:
            knows(one, rank).heard_s = time.monotonic() - seconds
        yield


def test_a_rank_that_cannot_go_on_tells_the_others_because_of_whom(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(circle, "PATIENCE_S", 60.0)
    with watches(4) as (_, made):
        first, second, third = circles(monkeypatch, made, [1, 2, 3])
        assert (second.place, second.rank) == (1, 2)
        assert not second.lost()
        made[3]._connections.close()
        with pytest.raises(ExchangeError) as told, second.naming("a gather"):
            raise RuntimeError("[/src/pair.cc:1] Connection closed by peer [::1]. This is typically caused by")
        said = "rank 2 could not go on at a gather: rank 3 ended without a word (killed, or out of memory?)"
        assert str(told.value) == f"{said} [Connection closed by peer [::1]]"
        assert until(lambda: bool(knows(made[1], 2).notices))
        # Rank 1 is told by rank 2, whatever it has seen itself.
        made[1]._standings.pop(3)
        assert first.explain() == "rank 3 ended without a word (killed, or out of memory?)"
        assert first.lost()
        assert third.rank == 3


def test_where_nobody_ended_those_are_named_that_give_no_sign(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PATIENCE_S", "STRANGE_S"):
        monkeypatch.setattr(circle, name, 0.0)
    with watches(3) as (_, made):
        first, *_ = circles(monkeypatch, made, [0, 1, 2])
        assert first.explain().startswith("all ranks are alive; ")
        assert not first.lost()
        # One that is watched beside the group counts, and one that hangs more than one that never came.
        first, *_ = circles(monkeypatch, made, [0, 1], [2, 7])
        with silent_for(made[0], [2], 60):
            said = first.explain()
        assert re.fullmatch(SILENT, said)
        knows(made[0], 2).heard_s = time.monotonic()
        assert first.explain() == "rank 7 never came to rank 0 (it ended before, or is out of its reach)"
        # Of several that never came, those that are only late are not accused.
        first, *_ = circles(monkeypatch, made, [0, 1], [7, 9])
        said = "one of ranks 7, 9, or several, ended before they came to rank 0, or are out of its reach; "
        said += "others may be late"
        assert first.explain() == said


def test_who_reads_of_a_silence_reads_both_its_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PATIENCE_S", "STRANGE_S"):
        monkeypatch.setattr(circle, name, 0.0)
    with watches(3) as (_, made):
        first, second, _ = circles(monkeypatch, made, [0, 1, 2])
        with silent_for(made[0], [2], 60):
            said = first.explain()
        assert re.fullmatch(SILENT, said)
        assert until(lambda: bool(knows(made[1], 0).notices))
        # Rank 1 hears both.
        assert second.explain() == said


def test_a_silence_that_ends_while_the_reason_is_sought_is_still_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    with watches(3) as (_, made):
        first, *_ = circles(monkeypatch, made, [0, 1, 2])
        with silent_for(made[0], [2], 20):
            assert re.search("no sign of it for 2[0-9] s", first.explain())
        # It has been heard meanwhile.
        assert until(lambda: time.monotonic() - (knows(made[0], 2).heard_s or 0.0) < 10)


def test_a_rank_that_hears_nobody_suspects_its_own_network(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PATIENCE_S", "STRANGE_S"):
        monkeypatch.setattr(circle, name, 0.0)
    with watches(3) as (_, made):
        *_, third = circles(monkeypatch, made, [0, 1, 2])
        with silent_for(made[2], [0, 1], 60):
            said = third.explain()
        told = "rank 2 hears no other rank: no sign of ranks 0, 1 for 6[0-9] s, so that its own network is silent"
        assert re.match(told, said)


class _Gone:
    """A store whose host has ended."""

    def check(self, keys: object) -> bool:
        raise dist.DistNetworkError("Broken pipe")


@pytest.mark.parametrize(
    ("method", "launcher", "watched", "said"),
    [
        # Rank 1 lives, but cannot be found.
        ("env://", "False", [0, 1], "rank 0 ended with the process group's store"),
        ("tcp://a:1", "False", [1], "rank 0 ended, or is out of reach, and with it the process group's store, which"),
        ("env://", "True", [0, 1], "the process group's store is gone: the process that holds it ended, or is out of"),
        (None, "False", [0, 1], "the process group's store is gone: the process that holds it ended, or is out of"),
    ],
)
def test_where_the_store_is_gone_its_host_is_named_and_nobody_who_cannot_be_found_any_more(
    monkeypatch: pytest.MonkeyPatch, method: str | None, launcher: str, watched: list[int], said: str
) -> None:
    monkeypatch.setattr(circle, "STRANGE_S", 0.0)
    monkeypatch.setattr(dist.distributed_c10d, "_default_pg_init_method", method)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", launcher)
    with watches(3) as (_, made):
        made[2]._connections._store = _Gone()
        monkeypatch.setattr(Watch, "of", lambda group: made[2])
        mine = Circle(_Ranks(len(watched), [*watched, 2]))
        assert until(lambda: made[2].storeless)
        assert mine.explain().startswith(said)


def test_one_that_closes_its_link_says_what_it_was_handling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(circle, "ORDER_S", 0.0)
    with watches(2) as (_, made):
        first, second = circles(monkeypatch, made, [0, 1])
        try:
            raise KeyError("boom")
        except KeyError:
            second.close()
        assert until(lambda: bool(knows(made[0], 1).notices))
        assert not first.lost()
        assert first.explain() == "rank 1 closed its link, handling KeyError: 'boom'"


# ---------------------------------------------------------------------- silence


def test_a_silent_rank_is_warned_of_once_and_one_that_was_not_heard_for_an_own_pause_is_not(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.WARNING, "gradwire")
    with watches(1) as (_, (mine,)):
        mine._connections.close()
        mine._connections._thread.join()
        now_s = 1000.0
        mine._ticked_s = now_s
        mine.meet([1, 2, 3])

        def pass_by(seconds: float) -> list[int]:
            """Rank 1 gives signs, rank 2 does not, and rank 3 was never met."""
            nonlocal now_s
            warned = []
            for _ in range(int(2 * seconds)):
                now_s += 0.5
                knows(mine, 1).heard_s = now_s
                warned += mine.look_around(now_s)
            return warned

        knows(mine, 2).heard_s = now_s
        assert pass_by(9.5) == []
        assert mine.quiet([1, 2, 3], now_s) == {2: 9.5, 3: None}
        now_s += 100
        assert pass_by(9) == []
        assert pass_by(2) == [2]
        assert pass_by(60) == []
    assert caplog.text.count("rank 0: rank 2 has given no sign for 10 s") == 1
    assert watch.QUIET_S < watch.SILENCE_S


class _LateWork:
    """A gather that ends, in order or not, just after a slice of time has, before it is asked whether it ended."""

    def __init__(self, error: str | None) -> None:
        self._error, self.waits = error, list[object]()

    def wait(self, timeout: object = None) -> None:
        self.waits.append(timeout)
        if len(self.waits) == 1:
            raise RuntimeError("Operation timed out!")
        if self._error:
            raise RuntimeError(self._error)

    def is_completed(self) -> bool:
        return True


def test_a_gather_that_ends_just_after_a_slice_of_time_has_not_timed_out(monkeypatch: pytest.MonkeyPatch) -> None:
    with watches(2) as (_, made):
        mine, _ = circles(monkeypatch, made, [0, 1])
        work = _LateWork(None)
        mine.wait(work)  # type: ignore[arg-type]
        assert len(work.waits) == 2
        with pytest.raises(RuntimeError, match="Connection reset"):
            mine.wait(_LateWork("Connection reset by peer"))  # type: ignore[arg-type]
