"""No sample comes twice in a pass, and none is left out but those of a lost worker, whoever comes and goes."""

from __future__ import annotations

import random
import threading
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gradwire as gw
from gradwire.link.membership.epochs import changed_epoch, next_epoch
from gradwire.link.membership.protocol import Seat
from gradwire.link.membership.records import Epoch, Member, new_id


class Worker:
    """A place in a training, and its sampler, without connections."""

    def __init__(self, length: int, batch_size: int, passes: int | None) -> None:
        self.seat = Seat(Member(new_id()))
        party = SimpleNamespace(seat=self.seat, lock=threading.RLock(), link=None, carry=lambda **things: None)
        self.sampler = gw.ElasticSampler(length, party, batch_size, passes=passes)
        self.drawn: list[list[int]] = []

    def adopt(self, epoch: Epoch) -> None:
        for _ in self.seat._adopt(epoch):
            pass

    def hold(self, round: int) -> None:
        """Hold the state after a round."""
        self.seat.holds, self.seat.rounds, self.seat.held = True, round, round

    def draw(self) -> list[int]:
        batch = self.sampler.draw()
        if batch is not None:
            self.drawn.append(batch)
        return batch or []


class Training:
    """Members that take rounds."""

    def __init__(self, members: int, length: int, batch_size: int, passes: int | None = None) -> None:
        self.given = (length, batch_size, passes)
        self.members = [Worker(*self.given) for _ in range(members)]
        self.rounds = 0
        named = tuple(w.seat.me for w in self.members)
        self.follow(Epoch(1, named, tuple(m.id for m in named[1:])))

    def follow(self, epoch: Epoch) -> None:
        self.epoch = epoch
        for worker in self.members:
            worker.adopt(epoch)

    def meet(self) -> None:
        for worker in self.members:
            worker.hold(self.rounds)

    def take_rounds(self, count: int) -> None:
        """Let all members meet and take rounds."""
        self.meet()
        for _ in range(count):
            for worker in self.members:
                worker.draw()
            self.vote()

    def vote(self) -> None:
        """End a round in which all have drawn."""
        self.rounds += 1
        position = max(worker.seat.position for worker in self.members)
        for worker in self.members:
            worker.seat.position, worker.seat.reserve = position, 0
            worker.hold(self.rounds)

    def lose(self, lost: Worker) -> None:
        """Go on without a member."""
        self.members.remove(lost)
        self.follow(next_epoch(self.epoch, {w.seat.me.id: w.seat.report() for w in self.members}))

    def take_in(self, comer: Worker) -> None:
        """Go on with another member, which meets the others later."""
        first = self.members[0].seat
        self.members.append(comer)
        joining = (comer.seat.me,)
        self.follow(changed_epoch(self.epoch, (), joining, self.rounds, first.position, first.reserve))


def test_a_worker_that_comes_again_draws_where_the_others_are() -> None:
    training = Training(3, 1000, 4)
    training.meet()
    a, b, c = training.members
    # With local steps, members are at different steps of a round.
    for worker, steps in ((a, 3), (b, 2), (c, 8)):
        for _ in range(steps):
            worker.draw()
    training.lose(c)
    for worker, steps in ((a, 5), (b, 6)):
        for _ in range(steps):
            worker.draw()
    training.vote()
    c.drawn.clear()
    c.seat.again()
    training.take_in(c)
    training.meet()
    for worker, steps in ((c, 8), (a, 8), (b, 8)):
        for _ in range(steps):
            worker.draw()
    training.vote()
    handed = [i for worker in (a, b, c) for batch in worker.drawn for i in batch]
    assert len(set(handed)) == len(handed) == 4 * (2 * 8 + 3 * 8)
    # All of them were the next ones: 36 samples were given to three, then 40 to two, and 96 to three.
    order = a.sampler._samples(0, 36 + 40 + 96)
    lost = set(order) - set(handed)
    assert len(lost) == 3 * 4
    assert lost < set(order[:36])


@pytest.mark.parametrize("early", [0, 1, 3])
def test_the_last_round_of_a_pass_is_shared_out_once_when_a_member_is_lost_in_it(early: int) -> None:
    training = Training(4, 102, 8, passes=1)
    training.take_rounds(3)
    a, *others, d = training.members
    # 6 samples are left for four: 2, 2, 1 and 1.
    drawn = [a, *others][:early]
    sizes = [len(worker.draw()) for worker in drawn]
    training.lose(d)
    sizes += [len(worker.draw()) for worker in [a, *others] if worker not in drawn]
    training.vote()
    assert sorted(sizes) == ([1, 2, 2] if early else [2, 2, 2])
    assert all(worker.sampler.draw() is None for worker in training.members)
    handed = [i for worker in (a, *others, d) for batch in worker.drawn for i in batch]
    assert len(set(handed)) == len(handed) == 102 - bool(early)


def test_a_newcomer_keeps_the_batch_that_was_reserved_for_it_when_its_epoch_breaks() -> None:
    training = Training(3, 1000, 4)
    training.take_rounds(2)
    a, b, c = training.members
    for worker in (a, b, c):
        worker.draw()
    comer = Worker(*training.given)
    training.take_in(comer)
    # Before all have met, c is lost.
    training.lose(c)
    assert comer.seat.epoch is not None
    assert comer.seat.epoch.new == (comer.seat.me.id,)
    training.meet()
    comer.draw()
    training.vote()
    for worker in training.members:
        worker.draw()
    order = a.sampler._samples(0, 24 + 12 + 4 + 12)
    handed = [i for worker in (a, b, c, comer) for batch in worker.drawn for i in batch]
    assert sorted(handed) == sorted(order)


def test_a_newcomer_is_given_nothing_beyond_the_last_pass() -> None:
    training = Training(3, 26, 4, passes=1)
    training.take_rounds(1)
    a, b, c = training.members
    for worker in (a, b, c):
        worker.draw()
    comer = Worker(*training.given)
    # 2 samples are left, of a batch of 4.
    training.take_in(comer)
    training.meet()
    assert len(comer.draw()) == 2
    training.vote()
    assert all(worker.sampler.draw() is None for worker in training.members)
    handed = [i for worker in (a, b, c, comer) for batch in worker.drawn for i in batch]
    assert sorted(handed) == list(range(26))


@settings(max_examples=200)
@given(st.integers(0, 2**32), st.integers(1, 5), st.integers(20, 400), st.integers(1, 9), st.integers(1, 2))
def test_each_sample_comes_once_whoever_comes_and_goes(
    seed: int, members: int, length: int, batch_size: int, passes: int
) -> None:
    rng = random.Random(seed)
    training = Training(members, length, batch_size, passes)
    training.meet()
    everyone, may_be_lost = list(training.members), list[int]()
    while True:
        # Some have drawn for the next round when something happens; the first member is among them, or nobody is.
        early = [w for w in training.members[1:] if rng.random() < 0.5]
        early = [training.members[0], *early] if rng.random() < 0.5 else []
        drawn = [worker for worker in early if worker.draw()]
        if rng.random() < 0.4:
            comer = Worker(*training.given)
            everyone.append(comer)
            training.take_in(comer)
            if rng.random() < 0.7:
                training.meet()
        lost = rng.choice(training.members)
        if rng.random() < 0.4 and any(worker is not lost and worker.seat.holds for worker in training.members):
            if lost in drawn:
                # The round does not count for it. Others may be given the same samples.
                may_be_lost += lost.drawn.pop()
                drawn.remove(lost)
            elif drawn:
                may_be_lost += lost.sampler.draw() or []
            training.lose(lost)
        training.meet()
        for worker in training.members:
            if worker not in early:
                worker.draw()
        training.vote()
        if training.members[0].seat.position + len(training.members) > passes * length:
            break
    handed = [i for worker in everyone for batch in worker.drawn for i in batch]
    assert all(handed.count(i) <= passes for i in set(handed))
    missing = [i for i in range(length) for _ in range(passes - handed.count(i))]
    assert len(missing) < len(training.members) + len(may_be_lost)
