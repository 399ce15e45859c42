"""Tables that ranks tell one another: exact, bounded, and never executed, whatever a peer sends."""

from __future__ import annotations

import json
import math
import os
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given
from hypothesis import strategies as st

import gradwire as gw
from gradwire.errors import IncompatibleError, PayloadError
from gradwire.exchange.digests import digest_of
from gradwire.exchange.drivers import TorchGroup, tables
from gradwire.exchange.drivers.tables import all_gather_tables, broadcast_table, decode, encode, plain
from gradwire.link.handshake import agreement
from ranks import Ranks, fresh_ranks

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(1 << 2048) + 1, (1 << 2048) - 1)
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=["Cs"]))
    | st.binary()
)
KEYS = st.text(st.characters(exclude_categories=["Cs"])).filter(lambda key: key != "$bytes")
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(KEYS, inner), max_leaves=20)


def forged(text: bytes, subject: str = "handshake", sender: int = 3) -> bytes:
    """Return a message whose digest is right, as one who means harm makes it."""
    return digest_of(f"gradwire table\0{subject}\0{sender}\0".encode() + text) + text


@given(VALUES)
@example([-0.0, 5e-324, 1.7976931348623157e308, math.inf, -math.inf])
def test_a_table_arrives_as_it_was_told(value: Any) -> None:
    found = decode(encode(value, "handshake", 3), "handshake", 3)
    assert found == value
    assert repr(found) == repr(value)  # also -0.0, and 1 beside 1.0 and True


def test_tuples_arrive_as_lists_and_nan_as_nan() -> None:
    assert decode(encode({"shape": (3, (4,))}, "x", 0), "x", 0) == {"shape": [3, [4]]} == plain({"shape": (3, (4,))})
    found = decode(encode([math.nan], "x", 0), "x", 0)
    assert isinstance(found, list)
    assert math.isnan(found[0])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "value", [{1: 2}, {"$bytes": "AA=="}, {1, 2}, torch.zeros(2), object(), 1 << 2048, "\ud800", float, ...]
)
def test_what_is_no_table_is_refused_before_it_is_sent(value: Any) -> None:
    with pytest.raises(IncompatibleError):
        encode([value], "handshake", 3)


def test_nesting_is_bounded_where_a_table_is_made() -> None:
    deep: Any = 1
    for _ in range(32):
        deep = [deep]
    assert decode(encode(deep, "x", 0), "x", 0) == deep
    with pytest.raises(IncompatibleError, match="32 deep"):
        encode([deep], "x", 0)


@given(st.binary(max_size=200))
def test_random_bytes_are_refused_with_their_sender(message: bytes) -> None:
    with pytest.raises(PayloadError, match="handshake from rank 3"):
        decode(message, "handshake", 3)


@given(VALUES, st.data())
def test_a_change_of_any_byte_and_a_cut_anywhere_are_seen(value: Any, data: st.DataObject) -> None:
    message = bytearray(encode(value, "handshake", 3))
    place = data.draw(st.integers(0, len(message) - 1))
    with pytest.raises(PayloadError, match="handshake from rank 3"):
        decode(bytes(message[:place]), "handshake", 3)
    message[place] ^= data.draw(st.integers(1, 255))
    with pytest.raises(PayloadError, match="handshake from rank 3"):
        decode(bytes(message), "handshake", 3)


@pytest.mark.parametrize(("subject", "sender"), [("save", 3), ("handshake", 2)])
def test_a_message_of_another_subject_or_sender_is_refused(subject: str, sender: int) -> None:
    with pytest.raises(PayloadError, match=f"{subject} from rank {sender}: its checksum differs"):
        decode(encode(1, "handshake", 3), subject, sender)


HARMFUL = {
    "nothing": b"",
    "no JSON": b"{1}",
    "not UTF-8": b'"\xff"',
    "a lone surrogate": b'"\\ud800"',
    "an escape that is not needed": b'"\\u0041"',
    "white space": b'{"a": 1}',
    "two values": b"1 2",
    "a key twice": b'{"a":1,"a":2}',
    "a key twice, with one value": b'{"a":1,"a":1}',
    "deep lists": b"[" * 100_000 + b"]" * 100_000,
    "deep objects": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "lists that do not end": b"[" * 100_000,
    "strings that do not end": b'"\\' * 100_001,
    "brackets behind a string": b'"\\"",' + b"[" * 100_000,
    "a long number": b"1" * 100_000,
    "a long float": b"0." + b"1" * 100_000,
    "a float out of range": b"1e999",
    "no base64": b'{"$bytes":"?"}',
    "base64 of no string": b'{"$bytes":5}',
    "bytes and more": b'{"$bytes":"AA==","a":1}',
    "base64 with other padding": b'{"$bytes":"AB=="}',
}


@pytest.mark.parametrize("text", HARMFUL.values(), ids=HARMFUL)
def test_harm_behind_a_right_checksum_is_refused_with_its_sender(text: bytes) -> None:
    with pytest.raises(PayloadError, match="handshake from rank 3 is not a table") as caught:
        decode(forged(text), "handshake", 3)
    assert len(str(caught.value)) < 300


@given(st.text('[]{}",:\\0e.-1 a$bytes') | st.recursive(st.text(max_size=3), st.lists).map(json.dumps))
def test_a_text_is_a_table_written_as_tables_are_or_refused(text: str) -> None:
    message = forged(text.encode("utf-8", "surrogatepass"))
    try:
        found = decode(message, "handshake", 3)
    except PayloadError:
        return
    assert encode(found, "handshake", 3) == message


class Harm:
    """Makes a file where it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


def told(group: Any, number: int) -> Any:
    return all_gather_tables([number], "test", group, lambda table: table[0] + 1)


def gather_from_a_rank_that_means_harm(kind: str, path: str) -> list[Any]:
    """Return how each of a healthy gather, one with harm by rank 1, and a healthy one ended."""
    group = dist.group.WORLD
    assert group is not None
    before, found = (tables._message, tables.announce), []
    for harm in (False, True, False):
        if harm and group.rank() == 1:
            texts = {
                "pickle": pickle.dumps(Harm(path)),
                "pickle with a checksum": forged(pickle.dumps(Harm(path)), "test", 1),
                "nesting": forged(b"[" * 50_000, "test", 1),
                "another type": forged(b'["one"]', "test", 1),
                "another form": forged(b"5", "test", 1),
                "empty": b"",
            }
            lengths = {"a gigabyte": torch.tensor([1 << 30]), "four gigabytes": torch.tensor([(1 << 32) - 1])}
            if kind in texts:
                message = torch.tensor(list(texts[kind]), dtype=torch.uint8)
                tables._message = lambda *_, told=message: told  # type: ignore[assignment]
            else:
                announced = before[1](lengths[kind])
                tables.announce = lambda _, told=announced: told  # type: ignore[assignment]
        try:
            found.append(told(group, group.rank()))
        except PayloadError as error:
            found.append(str(error))
        finally:
            tables._message, tables.announce = before  # type: ignore[assignment]
    return found


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        ("pickle", "the test from rank 1: its checksum differs"),
        ("pickle with a checksum", "the test from rank 1 is not a table"),
        ("nesting", "the test from rank 1 is not a table"),
        ("another type", "the test from rank 1 has not the expected form (TypeError"),
        ("another form", "the test from rank 1 has not the expected form (TypeError"),
        ("empty", "the test from rank 1: its checksum differs"),
        ("a gigabyte", "rank 1 announced a row of 1073741824 bytes"),
        ("four gigabytes", "rank 1 announced a row of 4294967295 bytes"),
    ],
)
def test_all_ranks_refuse_harm_by_its_sender_and_go_on(
    three_ranks: Ranks, tmp_path: Path, kind: str, sentence: str
) -> None:
    for first, second, third in three_ranks(gather_from_a_rank_that_means_harm, kind, str(tmp_path / "harm")):
        assert first == third == [1, 2, 3]
        assert second.startswith(sentence)
    assert not (tmp_path / "harm").exists()


def tell_in_groups() -> Any:
    """Ranks 1 and 2 gather and broadcast in a group of their own; rank 1 of it is rank 2."""
    group = dist.new_group([1, 2])
    if dist.get_rank() == 0:
        return None
    gathered = all_gather_tables({"rank": dist.get_rank(), "long": "x" * 100 * dist.get_rank()}, "test", group, dict)
    names = [(table["rank"], len(table["long"])) for table in gathered]
    refusals = []
    for read in (lambda table: table["absent"], lambda table: table.absent):
        try:
            broadcast_table({"of": dist.get_rank()}, "test", group, read, source=1)
        except PayloadError as error:
            refusals.append(str(error))
    return names, broadcast_table(dist.get_rank(), "test", group, int, source=1), refusals


@pytest.mark.ranks
def test_a_group_of_some_ranks_names_them_by_their_numbers_among_all(three_ranks: Ranks) -> None:
    outside, *inside = three_ranks(tell_in_groups)
    assert outside is None
    for names, broadcast, refusals in inside:
        assert names == [(1, 100), (2, 200)]
        assert broadcast == 2
        assert len(refusals) == 2
        assert all(refusal.startswith("the test from rank 2 has not the expected form") for refusal in refusals)


def tell_beside_lengths() -> Any:
    """Gather tables of which so many bytes travel with their lengths; count the messages."""
    found = []
    for longest in (0, 40, 41, 2000):
        group = TorchGroup(dist.group.WORLD)  # type: ignore[arg-type]
        # A string has two quotation marks.
        group.table_bytes = tables.DIGEST_BYTES + 42
        usual, messages = group.all_gather, list[int]()

        def count(rows: torch.Tensor, own: torch.Tensor, usual: Any = usual, messages: Any = messages) -> Any:
            messages.append(len(own))
            return usual(rows, own)

        group.all_gather = count  # type: ignore[method-assign]
        texts = all_gather_tables("x" * (longest if dist.get_rank() == 1 else 3), "test", group, str)
        found.append(([len(text) for text in texts], len(messages)))
    return found


@pytest.mark.ranks
def test_a_short_table_travels_with_its_length(three_ranks: Ranks) -> None:
    for found in three_ranks(tell_beside_lengths):
        assert found == [([3, 0, 3], 1), ([3, 40, 3], 1), ([3, 41, 3], 2), ([3, 2000, 3], 2)]


def agree(kind: str) -> tuple[str, Any]:
    group = dist.group.WORLD
    assert group is not None
    try:
        with agreement(TorchGroup(group)) as mine:
            mine.fields = {"shape": (3, (4,)), "rate": 0.1, "none": None}
            mine.told, mine.open_links = {"a": {"b": group.rank() / 3}}, {group.rank()}
            if group.rank() == 1 and kind == "more":
                mine.fields["other"] = 5
            if group.rank() == 1 and kind == "object":
                mine.fields["other"] = object()
            if group.rank() == 1 and kind == "times":
                mine.told = {"a": {"c": 0.0}}
    except gw.GradwireError as error:
        return type(error).__name__, str(error)
    return mine.token, (mine.everyone, mine.open_links)


@pytest.mark.ranks
def test_terms_that_only_one_rank_has_differ(three_ranks: Ranks) -> None:
    for kind, sentence in (("more", "in 'other': rank 1 has 5, rank 0 has None"), ("times", "in 'coders'")):
        for name, text in three_ranks(agree, kind):
            assert (name, text.split(" differs ")[0]) == ("RankMismatchError", "rank 1")
            assert sentence in text


@pytest.mark.ranks
def test_ranks_take_the_same_terms_and_one_that_cannot_tell_its_own_still_takes_part(three_ranks: Ranks) -> None:
    first, *others = three_ranks(agree, "alike")
    assert others == [first, first]
    assert first[1] == ([{"a": {"b": rank / 3}} for rank in range(3)], {0, 1, 2})
    found = three_ranks(agree, "object")
    assert {name for name, _ in found} == {"IncompatibleError"}
    assert found[1][1].startswith("ranks tell one another")
    assert found[0][1] == found[2][1] == f"rank 1: {found[1][1]}"


def build_a_link_beside_pickles(path: str) -> str:
    if dist.get_rank() == 1:
        # It waits for the others' pickles for ever, and they do not send any.
        threading.Thread(target=dist.all_gather_object, args=([None, None], Harm(path)), daemon=True).start()
        return "sent"
    try:
        gw.Link([("w", torch.nn.Parameter(torch.zeros(10)))], "fp32")
    except PayloadError as error:
        return str(error)
    return "nothing was refused"


@pytest.mark.ranks
def test_the_handshake_executes_no_pickle_of_a_peer(tmp_path: Path) -> None:
    with fresh_ranks(2) as ranks:
        found = ranks(build_a_link_beside_pickles, str(tmp_path / "harm"))
    assert not (tmp_path / "harm").exists()
    assert "rank 1 announced a row of" in found[0]
