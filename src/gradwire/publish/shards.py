"""Shards of tensors: which box of a DTensor a rank holds, and the pieces that it publishes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import torch

from gradwire.errors import IncompatibleError
from gradwire.publish.boxes import Strips, TensorBox, TensorPiece, covers, pieces_of
from gradwire.publish.layout import BlockSpan, Entry, Layout
from gradwire.publish.part_ranks import PartRanks
from gradwire.publish.weights import LiveTensors, Readable, Tensors, named_tensors


def is_shard(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a DTensor, without importing that class, which takes a second."""
    return hasattr(tensor, "to_local")


def box_of(name: str, tensor: torch.Tensor) -> TensorBox:
    """Return the box of a tensor that this rank holds: of a DTensor its shard, of any other all.

    Raises:
        IncompatibleError: the shard is not a box, or is a part of a sum.
    """
    if not is_shard(tensor) or not tensor.numel():
        return TensorBox.of_all(tensor.shape)
    kinds = [type(placement).__name__ for placement in tensor.placements]  # type: ignore[attr-defined]
    if not {"Shard", "Replicate", "_StridedShard"}.issuperset(kinds):
        raise IncompatibleError(
            f"{name!r} is a DTensor of placements {tensor.placements}: publish shards and replicas"  # type: ignore[attr-defined]
        )
    # The protocol by which torch.distributed.checkpoint asks a tensor for its shards.
    (chunk,) = tensor.__create_chunk_list__()  # type: ignore[attr-defined]
    start, size = tuple(chunk.offsets), tuple(chunk.sizes)
    whole = tuple(tensor.shape)
    if "_StridedShard" in kinds and 0 not in size:
        _check_strided(name, tensor, start, size)
    return TensorBox(start, tuple(a + n for a, n in zip(start, size)), whole)


def _check_strided(name: str, tensor: torch.Tensor, start: Sequence[int], size: Sequence[int]) -> None:
    """Refuse a shard whose indices of a dimension do not follow one another."""
    from torch.distributed.tensor import Replicate, distribute_tensor

    mesh, placements = tensor.device_mesh, tensor.placements  # type: ignore[attr-defined]
    for dimension, length in enumerate(tensor.shape):
        row = []
        for placement in placements:
            along = getattr(placement, "dim", None) == dimension
            factor = getattr(placement, "split_factor", None)
            if not along:
                row.append(Replicate())
            else:
                row.append(type(placement)(0) if factor is None else type(placement)(0, split_factor=factor))
        # Without a source nothing is sent: each rank divides the indices by itself.
        indices = torch.arange(length, device=mesh.device_type)
        held = distribute_tensor(indices, mesh, row, src_data_rank=None).to_local().tolist()
        if held != list(range(start[dimension], start[dimension] + size[dimension])):
            raise IncompatibleError(
                f"{name!r} is a DTensor of placements {placements}, whose indices {held[:8]}... of dimension "
                f"{dimension} do not follow one another: redistribute it to Shard placements"
            )


def is_owner(tensor: torch.Tensor) -> bool:
    """Return whether this rank publishes its shard: of replicas, the first does."""
    mesh, placements = tensor.device_mesh, tensor.placements  # type: ignore[attr-defined]
    place = mesh.get_coordinate()
    if place is None:
        return False
    return all(not index for index, placement in zip(place, placements) if type(placement).__name__ == "Replicate")


def local_tensors(weights: Tensors) -> tuple[dict[str, torch.Tensor], dict[str, TensorBox]]:
    """Return the tensors that this rank holds, and the box of each: shards of DTensors, and all others.

    Raises:
        IncompatibleError: a tensor is of an unsupported kind.
    """
    tensors = named_tensors(weights, sharded=True)
    boxes = {name: box_of(name, tensor) for name, tensor in tensors.items()}
    return local_of(tensors), boxes


def local_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors that this rank holds; the same objects as long as nothing has replaced them."""
    # With gradients, a DTensor would return another view at each call.
    with torch.no_grad():
        return {name: t.to_local() if is_shard(t) else t for name, t in tensors.items()}  # type: ignore[attr-defined]


def own_pieces(weights: Tensors, strips: Strips, rank: int, dtype: torch.dtype | None) -> LiveTensors | None:
    """Return the pieces of tensors that this rank publishes; None if there are none.

    Replicas of a shard are published by the first of the ranks that hold it, tensors that are no DTensors by rank 0.
    """
    tensors = named_tensors(weights, sharded=True)
    local, boxes = local_tensors(tensors)
    own = [(name, boxes[name]) for name, t in tensors.items() if (is_owner(t) if is_shard(t) else rank == 0)]
    views = {piece.label: _view(local[piece.name], piece, boxes[piece.name]) for piece in pieces_of(own, strips)}
    return LiveTensors(views, dtype) if views else None


def _view(tensor: torch.Tensor, piece: TensorPiece, outer: TensorBox) -> torch.Tensor:
    return tensor.detach()[piece.box.within(outer)]


def parts_of(ranks: PartRanks, layout: Layout | None, cut: bool) -> tuple[tuple[str, ...], int | None]:
    """Return the digests of all parts' layouts, and the number of this rank's part.

    Raises:
        IncompatibleError: the pieces of all ranks are not all tensors, each element once.
    """
    rows = [] if layout is None else [[entry.name, entry.kind.name] for entry in layout.entries]
    own = json.dumps([layout.digest.hex() if layout else "", rows if cut else []]).encode()
    told = [json.loads(row) for row in ranks.gather(own)]
    parts = tuple(digest for digest, _ in told if digest)
    if not parts:
        raise IncompatibleError("there are no tensors: pass a module, named tensors, or a safetensors file or folder")
    boxes: dict[str, list[TensorBox]] = {}
    kinds: dict[str, set[object]] = {}
    for label, kind in (row for _, rows in told for row in rows):
        piece = TensorPiece.parse(label)
        boxes.setdefault(piece.name, []).append(piece.box)
        kinds.setdefault(piece.name, set()).add((kind, piece.box.whole))
    for name, found in boxes.items():
        if len(kinds[name]) > 1 or not covers(TensorBox.of_all(found[0].whole), found):
            raise IncompatibleError(
                f"the shards of {name!r} that all ranks hold are not the whole tensor, each element once: "
                f"{', '.join(map(str, found[:8]))}; group= names the ranks that publish"
            )
    before = sum(1 for digest, _ in told[: ranks.rank] if digest)
    return parts, before if cut and layout is not None else None


class CutTensors:
    """Whole tensors, published in pieces.

    Args:
        whole: The tensors.
        strips: How to cut them.
    """

    def __init__(self, whole: Readable, strips: Strips) -> None:
        self._whole = whole
        entries = {entry.name: (number, entry) for number, entry in enumerate(whole.layout.entries)}
        pieces = pieces_of([(name, TensorBox.of_all(entry.shape)) for name, (_, entry) in entries.items()], strips)
        self.layout = Layout(Entry(p.label, entries[p.name][1].kind, p.box.shape) for p in pieces)
        by_label = {piece.label: piece for piece in pieces}
        self._pieces = [by_label[entry.name] for entry in self.layout.entries]
        self._tensors = [entries[piece.name][0] for piece in self._pieces]

    def check_unchanged(self) -> None:
        self._whole.check_unchanged()

    def read(self, span: BlockSpan) -> torch.Tensor:
        piece, tensor, kind = self._pieces[span.tensor], self._tensors[span.tensor], span.kind
        whole = TensorBox.of_all(piece.box.whole)
        at = piece.box.contiguous_at(whole)
        if at is not None:
            at *= kind.numbers
            return self._whole.read(BlockSpan(tensor, at + span.begin, at + span.stop, kind))
        # Rows are runs of elements that follow one another in the piece, of which the tensor has more.
        cut = next(d for d, (size, all_) in enumerate(zip(piece.box.shape, whole.shape)) if size != all_)
        inner = kind.numbers
        for size in whole.shape[cut + 1 :]:
            inner *= size
        row, width = piece.box.shape[cut] * inner, whole.shape[cut] * inner
        first, last = span.begin // row, -(-span.stop // row)
        octets = self._whole.read(BlockSpan(tensor, first * width, last * width, kind))
        begin = piece.box.start[cut] * inner * kind.width
        rows = octets.reshape(last - first, width * kind.width)[:, begin : begin + row * kind.width].reshape(-1)
        return rows[(span.begin - first * row) * kind.width : (span.stop - first * row) * kind.width]


def check_slices(slices: Mapping[str, Sequence[slice]], names: Sequence[str]) -> None:
    """Refuse ranges that are given for no tensor, or not as ranges.

    Raises:
        IncompatibleError: they are.
    """
    for name, ranges in slices.items():
        if name not in names:
            raise IncompatibleError(f"slices has {name!r}, and there is no tensor of that name")
        if any(r.step not in (None, 1) or (r.start or 0) < 0 or (r.stop is not None and r.stop < 0) for r in ranges):
            raise IncompatibleError(f"slices of {name!r}: give ranges of indices from 0 on, without steps: {ranges}")


def sliced_box(name: str, ranges: Sequence[slice], held: Sequence[int], whole: Sequence[int]) -> TensorBox:
    """Return the box of a published tensor that ranges name.

    Raises:
        IncompatibleError: it does not lie within the published tensor, or has another shape than the tensor at hand.

    Example:
        >>> str(sliced_box("w", [slice(4, 8)], (4, 3), (16, 3)))
        '4:8/16,0:3/3'
    """
    given = [*ranges, *[slice(None)] * (len(whole) - len(ranges))]
    start = tuple(r.start or 0 for r in given)
    stop = tuple(size if r.stop is None else r.stop for r, size in zip(given, whole))
    box = TensorBox(start, stop, tuple(whole))
    inside = len(given) == len(whole) and all(0 <= a <= b <= n for a, b, n in zip(start, stop, whole))
    if not inside or box.shape != tuple(held):
        raise IncompatibleError(
            f"{name!r} has the shape {list(held)} here, and slices {list(ranges)} of the published {list(whole)}"
        )
    return box
