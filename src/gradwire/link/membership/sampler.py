"""Samples of a data set for workers that come and go."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator

import torch

from gradwire.errors import IncompatibleError
from gradwire.exchange.method import check_seed, is_whole, require
from gradwire.link.membership.party import Party
from gradwire.link.membership.records import Epoch
from gradwire.seeds import worker_seed


class ElasticSampler:
    """Hands out the samples of a data set to the members of a training, a batch to each and round.

    All members walk along one order of the data set, drawn anew for each pass. A round hands the next ``batch_size``
    samples to each, by rank. So no sample comes twice in a pass. None is left out, but

    - the batches that a lost member was given for the round in which it was lost (with local steps: since the last
      exchange),
    - with ``passes``, the last samples if they are fewer than there are members.

    When members change in the middle of a round, each that was not given its batch before is given the one of its old
    rank. It is an iterator of lists of indices, for ``DataLoader(batch_sampler=...)`` without workers, since these
    would draw ahead of the rounds. It belongs to the state that a new member takes over.

    Args:
        length: Number of samples of the data set.
        membership: The membership; make the sampler before the link.
        batch_size: Number of samples for a member and a round.
        seed: Seed of the orders; the same on all members.
        passes: Number of passes over the data after which it ends; None: it does not end.

    Attributes:
        position: Samples that were handed out to all members, over all passes.

    Raises:
        HyperparameterError: a value is wrong.
        IncompatibleError: the membership goes on with a quorum, under which members take unlike numbers of steps.
    """

    def __init__(
        self, length: int, membership: Party, batch_size: int, *, seed: int = 0, passes: int | None = None
    ) -> None:
        require(is_whole(length, 1), "length", f"a whole number of at least 1 is needed, not {length!r}")
        require(is_whole(batch_size, 1), "batch_size", f"a whole number of at least 1 is needed, not {batch_size!r}")
        require(passes is None or is_whole(passes, 1), "passes", f"a whole number is needed, or None, not {passes!r}")
        check_seed(seed)
        if membership.seat.quorum is not None:
            raise IncompatibleError(
                "under a quorum members take unlike numbers of steps, and ElasticSampler shares out equal ones: draw "
                "samples by membership.seat.me.id, each worker for itself"
            )
        self.length, self.batch_size, self.seed, self.passes = length, batch_size, seed, passes
        self._party, self._seat = membership, membership.seat
        self.position = 0
        self._owed: deque[tuple[int, int]] = deque()
        self._stride: tuple[int, int] | None = None
        self._me = ""
        self._order: tuple[int, torch.Tensor] | None = None
        membership.carry(sampler=self)

    @property
    def passed(self) -> int:
        """Number of passes that have ended."""
        return self.position // self.length

    def __iter__(self) -> Iterator[list[int]]:
        while (batch := self.draw()) is not None:
            yield batch

    def draw(self) -> list[int] | None:
        """Return the next batch of this member; None after the last pass.

        Raises:
            IncompatibleError: the link has not been made, so that this worker is no member yet.
        """
        with self._party.lock:
            if (link := self._party.link) is not None:
                link.settle()
            self._follow()
            if self._stride is None:
                raise IncompatibleError("this worker is no member yet: make the link before samples are drawn")
            if self._owed:
                return self._samples(*self._owed.popleft())
            begin, size, of_all = self._share(*self._stride)
            if not of_all:
                return None
            self._set(self.position + of_all)
            return self._samples(begin, size)

    def _share(self, rank: int, members: int) -> tuple[int, int, int]:
        """Return where a rank's next batch begins, its size, and that of the batches of all together."""
        left = self._left(self.position)
        if left >= members * self.batch_size:
            return self.position + rank * self.batch_size, self.batch_size, members * self.batch_size
        if left < members:
            return self.position, 0, 0
        # The last round shares out what is left: sizes differ by one at most.
        each, more = divmod(int(left), members)
        return self.position + rank * each + min(rank, more), each + (rank < more), int(left)

    def _left(self, position: int) -> float:
        """Return the number of samples from a position to the end of the last pass."""
        return math.inf if self.passes is None else self.passes * self.length - position

    def state_dict(self) -> dict[str, int]:
        """Return what a new member takes over."""
        return {"length": self.length, "batch_size": self.batch_size, "seed": self.seed}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Check that another member's sampler walks along the same order.

        Raises:
            HyperparameterError: it does not.
        """
        for name, value in self.state_dict().items():
            require(state.get(name) == value, name, f"{value} here and {state.get(name)} on the other members")

    def _set(self, position: int) -> None:
        self.position = self._seat.position = position
        self._seat.reserve = self.batch_size

    def _follow(self) -> None:
        """Go along with the epochs that were adopted since the last draw, and with what the others have drawn."""
        while self._seat.adopted:
            self._adopt(self._seat.adopted.popleft())
        # In a round, all members have been given as much.
        self.position = max(self.position, self._seat.position)

    def _adopt(self, epoch: Epoch) -> None:
        ids, me = epoch.ids(), self._seat.me.id
        target = epoch.position - epoch.reserved * len(epoch.new)
        if me != self._me:
            # It has come in again: what it was given before counts for nobody.
            self._me, self._stride = me, None
            self._owed.clear()
        if me in epoch.new:
            begin = target + epoch.new.index(me) * epoch.reserved
            size = int(min(epoch.reserved, self._left(begin)))
            # If the epoch breaks before all have met, the next one reserves nothing: this batch is still its own.
            if size > 0:
                self._owed.append((begin, size))
        elif self._stride is not None:
            # Others have drawn for a round of the old epoch, which this member has not: its batch is still its own.
            while self.position < target:
                begin, size, of_all = self._share(*self._stride)
                if not of_all:
                    break
                self._owed.append((begin, size))
                self.position += of_all
        self.position = epoch.position
        self._stride = (ids.index(me), len(ids))

    def _samples(self, begin: int, size: int) -> list[int]:
        found: list[int] = []
        for place in range(begin, begin + size):
            number, within = divmod(place, self.length)
            if self._order is None or self._order[0] != number:
                draw = torch.Generator().manual_seed(worker_seed(self.seed, number) % (1 << 63))
                self._order = number, torch.randperm(self.length, generator=draw, device="cpu")
            found.append(int(self._order[1][within]))
        return found
