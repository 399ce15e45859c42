"""The records of a membership: members, epochs, reports and requests, and the seal by which members know their own.

All records are plain tables. In the store, a record is 64 hexadecimal digits, a BLAKE2b digest under the secret that
members share, and the JSON text that it covers, together with the number of the run and the key at which it lies. A
value that does not verify counts as absent.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, TypeAlias, TypeVar

from gradwire.errors import HyperparameterError

MOST_BYTES = 1 << 18
"""Largest number of bytes of a record: 1,000 members take about 70 kB."""

MOST_MEMBERS = 1024
MOST_NAME, MOST_TEXT = 200, 500
MOST_ROUNDS = 1 << 48

DIGEST_CHARACTERS = 64
LEAST_SECRET, MOST_SECRET = 16, 64
"""Least and largest number of bytes of a secret; BLAKE2b takes keys of at most 64 bytes."""

_ID, _HEX = re.compile("[0-9a-f]{16}"), re.compile("[0-9a-f]{64}")

Table: TypeAlias = dict[str, Any]


def new_id() -> str:
    """Return a number for a member or a run: 16 hexadecimal digits, drawn at random."""
    return secrets.token_hex(8)


@dataclass(frozen=True)
class Member:
    """One worker, from the moment it is named until it leaves. A worker that comes again is another member.

    Attributes:
        id: 16 hexadecimal digits, drawn at random.
        name: Host and process, for messages.
    """

    id: str
    name: str = ""

    @staticmethod
    def read(table: Any) -> Member:
        """Read a table.

        Raises:
            ValueError: it is not a member.
        """
        found = Member(*_fields(table, "id", "name"))
        _check(isinstance(found.id, str) and _ID.fullmatch(found.id) is not None, "a member's id")
        _check(_is_text(found.name, MOST_NAME), "a member's name")
        return found


@dataclass(frozen=True)
class Epoch:
    """Who belongs to the training, and from which round on. It is written once, and never changes.

    Attributes:
        number: Counted from 1.
        members: The members, in the order of their ranks.
        new: Ids of the members that have to receive the state from another one.
        round: Number of rounds that count when the epoch begins.
        position: Samples of the data that were handed out before; see :class:`gradwire.ElasticSampler`.
        reserved: Samples among them that are for each of the new members.
        previous: Digest of the epoch before; empty for the first.
    """

    number: int
    members: tuple[Member, ...]
    new: tuple[str, ...] = ()
    round: int = 0
    position: int = 0
    reserved: int = 0
    previous: str = ""

    def ids(self) -> tuple[str, ...]:
        """Return the ids of the members by rank."""
        return tuple(member.id for member in self.members)

    def digest(self) -> str:
        """Return the digest by which the next epoch names this one."""
        return hashlib.blake2b(text_of(asdict(self)).encode(), digest_size=32).hexdigest()

    @staticmethod
    def read(table: Any) -> Epoch:
        """Read a table.

        Raises:
            ValueError: it is not an epoch.
        """
        number, members, new, round, position, reserved, previous = _fields(
            table, "number", "members", "new", "round", "position", "reserved", "previous"
        )
        _check(_is_whole(number, 1), "an epoch's number")
        _check(isinstance(members, list) and len(members) <= MOST_MEMBERS, "an epoch's members")
        found = tuple(Member.read(member) for member in members)
        ids = {member.id for member in found}
        _check(len(ids) == len(found), "an epoch's members, of whom two have one id,")
        _check(isinstance(new, list) and ids.issuperset(n for n in new if isinstance(n, str)), "an epoch's new members")
        _check(len(set(map(str, new))) == len(new) and all(isinstance(n, str) for n in new), "an epoch's new members")
        _check(_is_whole(round) and _is_whole(position) and _is_whole(reserved), "an epoch's round")
        chained = isinstance(previous, str) and (previous == "" or _HEX.fullmatch(previous) is not None)
        _check(chained, "an epoch's chain")
        return Epoch(number, found, tuple(new), round, position, reserved, previous)


@dataclass(frozen=True)
class EpochReport:
    """The report of a member about the end of an epoch: that it is alive, and how far it came.

    After it has written its report a member does nothing more in that epoch.

    Attributes:
        number: Number of the epoch.
        id: Id of the member.
        held: Number of rounds whose mean it holds: those that count, and perhaps one more that it exchanged.
        holds: True if it has the state of the training.
        leaving: True if it will not belong to the next epoch.
        met: True if all members of the epoch met.
        position: Samples that were handed out, as far as it knows.
        missed: Ids of the members that it could not reach when the epoch began.
    """

    number: int
    id: str
    held: int
    holds: bool
    leaving: bool = False
    met: bool = True
    position: int = 0
    missed: tuple[str, ...] = ()

    @staticmethod
    def read(table: Any) -> EpochReport:
        """Read a table.

        Raises:
            ValueError: it is not a report.
        """
        number, id, held, holds, leaving, met, position, missed = _fields(
            table, "number", "id", "held", "holds", "leaving", "met", "position", "missed"
        )
        _check(_is_whole(number, 1) and _is_whole(held) and _is_whole(position), "a report's number")
        _check(isinstance(id, str) and _ID.fullmatch(id) is not None, "a report's id")
        _check(all(isinstance(flag, bool) for flag in (holds, leaving, met)), "a report's flag")
        listed = isinstance(missed, list) and len(missed) <= MOST_MEMBERS
        _check(listed and all(isinstance(m, str) and _ID.fullmatch(m) for m in missed), "a report's missed members")
        return EpochReport(number, id, held, holds, leaving, met, position, tuple(missed))


@dataclass(frozen=True)
class Request:
    """The request of a worker to be named in the next epoch.

    Attributes:
        member: The worker.
        terms: Digest of what all members have to have in common: version, method, options and parameters.
        beat: Counts up as long as the worker waits, so that nobody waits for one that has ended.
        state: True if it asks for state first, and not to be named yet.
    """

    member: Member
    terms: str = ""
    beat: int = 0
    state: bool = False

    @staticmethod
    def read(table: Any) -> Request:
        """Read a table.

        Raises:
            ValueError: it is not a request.
        """
        member, terms, beat, state = _fields(table, "member", "terms", "beat", "state")
        _check(_is_text(terms, DIGEST_CHARACTERS) and _is_whole(beat), "a request's terms")
        _check(isinstance(state, bool), "a request's flag")
        return Request(Member.read(member), terms, beat, state)


@dataclass(frozen=True)
class Offer:
    """The offer of a member to give its state to newcomers.

    Attributes:
        number: Number of the epoch.
        round: Number of rounds that counted when the state was taken.
        members: Number of members that were asked to offer it.
        host, port: Address at which the member serves it.
    """

    number: int
    round: int
    members: int
    host: str
    port: int

    @staticmethod
    def read(table: Any) -> Offer:
        """Read a table.

        Raises:
            ValueError: it is not an offer.
        """
        number, round, members, host, port = _fields(table, "number", "round", "members", "host", "port")
        _check(_is_whole(number, 1) and _is_whole(round) and _is_whole(members, 1), "an offer's number")
        _check(members <= MOST_MEMBERS and _is_whole(port, 1) and port < 1 << 16, "an offer's port")
        _check(_is_text(host, MOST_NAME) and host != "", "an offer's host")
        return Offer(number, round, members, host, port)


@dataclass(frozen=True)
class Ready:
    """The word of a member that it is connected to all others of a candidate.

    Attributes:
        digest: Digest of the candidate.
        id: Id of the member.
    """

    digest: str
    id: str

    @staticmethod
    def read(table: Any) -> Ready:
        """Read a table.

        Raises:
            ValueError: it is not such a word.
        """
        digest, id = _fields(table, "digest", "id")
        _check(isinstance(digest, str) and _HEX.fullmatch(digest) is not None, "a candidate's digest")
        _check(isinstance(id, str) and _ID.fullmatch(id) is not None, "a member's id")
        return Ready(digest, id)


@dataclass(frozen=True)
class RunRecord:
    """The run that a coordinator keeps.

    Attributes:
        id: 16 hexadecimal digits, drawn at random.
    """

    id: str

    @staticmethod
    def read(table: Any) -> RunRecord:
        """Read a table.

        Raises:
            ValueError: it is not a run.
        """
        (id,) = _fields(table, "id")
        _check(isinstance(id, str) and _ID.fullmatch(id) is not None, "a run's id")
        return RunRecord(id)


@dataclass(frozen=True)
class Removed:
    """The word of the coordinator that keys of old epochs are no longer in the store.

    Attributes:
        number: Number of the last epoch whose keys may be missing.
    """

    number: int

    @staticmethod
    def read(table: Any) -> Removed:
        """Read a table.

        Raises:
            ValueError: it is not such a word.
        """
        (number,) = _fields(table, "number")
        _check(_is_whole(number), "a removed epoch's number")
        return Removed(number)


Record = Epoch | EpochReport | Request | Offer | Ready | RunRecord | Removed
R = TypeVar("R", Epoch, EpochReport, Request, Offer, Ready, RunRecord, Removed)


@dataclass(frozen=True)
class Seal:
    """Writes and reads records under a secret.

    Attributes:
        secret: The secret that members share.
        run: Number of the run, so that a record of another run does not verify; empty for the record of the run itself.
    """

    secret: str = field(repr=False)
    run: str = ""

    def __post_init__(self) -> None:
        size = len(self.secret.encode())
        if not LEAST_SECRET <= size <= MOST_SECRET:
            raise HyperparameterError(
                f"secret: {LEAST_SECRET} to {MOST_SECRET} bytes are needed, not {size}: take the one that "
                "`gradwire coordinate` prints"
            )

    def key_of(self, purpose: str) -> bytes:
        """Return a key for a purpose in this run, 32 bytes, from which neither the secret nor another key follows."""
        body = f"gradwire key\0{self.run}\0{purpose}".encode()
        return hashlib.blake2b(body, key=self.secret.encode(), digest_size=32).digest()

    def close(self, key: str, record: Record) -> str:
        """Return the value of a record at a key."""
        text = text_of(asdict(record))
        return self._digest(key, text) + text

    def open(self, key: str, value: bytes, kind: type[R]) -> R | None:
        """Return the record that a value holds; None if it does not verify, or is not of the kind."""
        if not DIGEST_CHARACTERS < len(value) <= MOST_BYTES:
            return None
        try:
            text = value.decode("ascii")
            digest, text = text[:DIGEST_CHARACTERS], text[DIGEST_CHARACTERS:]
            if not hmac.compare_digest(digest, self._digest(key, text)):
                return None
            # Only who knows the secret comes as far as the parser.
            return kind.read(json.loads(text))
        except (ValueError, TypeError, KeyError, RecursionError):
            return None

    def _digest(self, key: str, text: str) -> str:
        body = f"gradwire membership\0{self.run}\0{key}\0{text}".encode()
        return hashlib.blake2b(body, key=self.secret.encode(), digest_size=DIGEST_CHARACTERS // 2).hexdigest()


def text_of(table: Mapping[str, Any]) -> str:
    """Return the text of a table: ASCII, the same for equal tables."""
    return json.dumps(table, separators=(",", ":"), sort_keys=True)


def _fields(table: Any, *names: str) -> list[Any]:
    if not isinstance(table, dict) or table.keys() != set(names):
        raise ValueError(f"a table with {', '.join(names)} is needed")
    return [table[name] for name in names]


def _is_whole(value: object, least: int = 0) -> bool:
    return type(value) is int and least <= value < MOST_ROUNDS


def _is_text(value: object, most: int) -> bool:
    return isinstance(value, str) and len(value) <= most and value.isprintable()


def _check(right: bool, what: str) -> None:
    if not right:
        raise ValueError(f"{what} is not valid")
