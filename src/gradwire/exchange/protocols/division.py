"""Division of segments: into the pieces of each chunk, and of a chunk's pieces into a share for each rank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TypeAlias

from gradwire.exchange.segments import Segment, rows_of_rank

Pieces: TypeAlias = Sequence[tuple[Segment, tuple[int, int]]]
"""Pieces, that is, parts of segments. Each has a mark, which all parts of it keep: the number of its operator, and that
of its segment among the operator's."""


def join(runs: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Join neighbours among ascending runs."""
    joined: list[tuple[int, int]] = []
    for begin, end in runs:
        if joined and joined[-1][1] == begin:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((begin, end))
    return joined


def cut(segments: Sequence[Segment], chunk_numel: int, grain: int) -> list[list[tuple[Segment, Segment]]]:
    """Cut segments into chunks of at most ``chunk_numel`` elements, at multiples of ``grain`` in the parameter.

    Returns:
        For each chunk, its pieces, each with the whole segment.
    """
    size = max(grain, -(-chunk_numel // grain) * grain)
    chunks: list[list[tuple[Segment, Segment]]] = []
    room = 0
    for whole in segments:
        done = 0
        while done < whole.numel:
            if room < min(grain, whole.numel - done):
                chunks.append([])
                room = size
            left = whole.numel - done
            take = left if left <= room else room // grain * grain
            chunks[-1].append((_piece(whole, done, take), whole))
            done += take
            room -= take
    return chunks


def even_shares(pieces: Pieces, ranks: int, grain: int) -> list[Pieces]:
    """Divide pieces into runs of about equal length, one for each rank, at multiples of ``grain`` in the parameter."""
    total, done = sum(piece.numel for piece, _ in pieces), 0
    shares: list[list[tuple[Segment, tuple[int, int]]]] = [[] for _ in range(ranks)]
    for piece, mark in pieces:
        at = 0
        while at < piece.numel:
            owner = done * ranks // total
            room = -(-total * (owner + 1) // ranks) - done
            take = min(piece.numel - at, -(-room // grain) * grain)
            shares[owner].append((_piece(piece, at, take), mark))
            at, done = at + take, done + take
    return list(shares)


def row_shards(pieces: Pieces, ranks: int, grain: int) -> list[Pieces]:
    """Divide pieces into each rank's rows of the parameters, extended to multiples of ``grain`` in the parameter.

    With a grain above 1, pieces of neighbouring ranks may overlap; with 1, every element belongs to one rank.
    """
    shards: list[list[tuple[Segment, tuple[int, int]]]] = [[] for _ in range(ranks)]
    for piece, mark in pieces:
        for rank in range(ranks):
            first, last = rows_of_rank(piece.parameter, rank, ranks)
            if first == last:
                continue
            begin = max(first // grain * grain, piece.start)
            end = min(-(-last // grain) * grain, piece.start + piece.numel)
            if begin < end:
                shards[rank].append((_piece(piece, begin - piece.start, end - begin), mark))
    return list(shards)


def _piece(segment: Segment, begin: int, numel: int) -> Segment:
    """Return ``numel`` elements of a segment from ``begin`` on."""
    return replace(segment, offset=segment.offset + begin, start=segment.start + begin, numel=numel)
