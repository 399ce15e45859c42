"""Payloads merged pair by pair: who meets whom, and what ranks end with."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

import gradwire as gw
from gradwire.errors import ExchangeError
from gradwire.exchange.codecs import Draw, LeftOut
from gradwire.exchange.drivers import Meter, simulate_ranks
from gradwire.exchange.ops import Exchange, SendRecv
from gradwire.exchange.protocols.tree import Meeting, meetings
from gradwire.methods.sparse.sparse_codec import SparseCodec
from gradwire.seeds import merge_stream


def steps(world_size: int) -> list[tuple[Meeting, ...]]:
    """What all ranks do, round after round."""
    return list(zip(*(list(meetings(rank, world_size)) for rank in range(world_size)), strict=True))


@pytest.mark.parametrize("world_size", range(1, 18))
def test_every_ranks_part_reaches_all_once_and_each_rest_has_one_keeper(world_size: int) -> None:
    have, numbers = [{rank} for rank in range(world_size)], dict[int, set[int]]()
    for step in steps(world_size):
        before, merges = [set(part) for part in have], dict[frozenset[int], list[bool]]()
        for rank, meeting in enumerate(step):
            if meeting.source is None:
                continue
            assert step[meeting.source].to == rank
            came = before[meeting.source]
            if meeting.merges:
                assert not before[rank] & came
                have[rank] = before[rank] | came
                merges.setdefault(frozenset(have[rank]), []).append(meeting.keeps)
                assert numbers.setdefault(meeting.number, have[rank]) == have[rank]
            else:
                have[rank] = came
        assert all(sum(keepers) == 1 for keepers in merges.values())
    assert have == [set(range(world_size))] * world_size
    assert len(numbers) == world_size - 1
    assert world_size == 1 or numbers[1] == set(range(world_size))
    extra = world_size & (world_size - 1) != 0
    assert len(steps(world_size)) == world_size.bit_length() - 1 + 2 * extra


@pytest.mark.parametrize("world_size", [2, 3, 5, 7, 8])
def test_all_ranks_end_with_the_same_bits(world_size: int) -> None:
    g = torch.randn(world_size, 3000, generator=torch.Generator().manual_seed(world_size)) ** 3
    link = gw.SimulatedLink([("w", torch.empty(3000))], gw.GTopK(density=0.01), world_size, min_numel=0, check=True)
    for _ in range(3):
        assert int(link.reduce_(g.clone()).count_nonzero()) <= 30


@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_merges_of_a_tree_round_independently(world_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one stream for all merges, payloads that are alike are rounded alike, and their errors add up."""
    merged, merge = list[tuple[int, bytes]](), SparseCodec.merge

    def noted(codec: SparseCodec, rows: Sequence[torch.Tensor], draw: Draw, out: torch.Tensor) -> LeftOut:
        rest = merge(codec, rows, draw, out)
        merged.append((draw.stream, out.numpy().tobytes()))
        return rest

    monkeypatch.setattr(SparseCodec, "merge", noted)
    g = torch.rand(600, generator=torch.Generator().manual_seed(0)) + 0.5
    method = gw.GTopK(density=1.0, blocks="parameter", values=gw.QSGDinf(levels=8, block_size=64))
    gw.simulate(g.repeat(world_size, 1), method)
    assert {stream for stream, _ in merged} == {merge_stream(number) for number in range(1, world_size)}
    # Ranks that do the same merge find the same; others do not, though all hold the same vector.
    assert len(set(merged)) == len({out for _, out in merged}) == world_size - 1


def test_ranks_that_do_not_meet_are_found_out() -> None:
    def one(rank: int) -> Exchange[None]:
        room = torch.zeros(4, dtype=torch.uint8)
        yield SendRecv(room.clone(), room, to=1 - rank, source=rank)

    with pytest.raises(ExchangeError, match="waits for rank"):
        simulate_ranks([one(0), one(1)], [Meter(), Meter()])
