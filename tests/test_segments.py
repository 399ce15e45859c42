"""Where randomness and elements come from: keys of parameters, and the order in which elements lie."""

from __future__ import annotations

import hashlib

import pytest
import torch

from gradwire.exchange.segments import Parameter, flat_view, flatten, lay_out
from gradwire.seeds import OWNER, SHARED, parameter_key


def test_a_key_is_the_hash_of_seed_purpose_and_name() -> None:
    """Written down once more: another machine, or version, must draw the same numbers."""
    for seed, name, purpose in ((0, "fc.weight", ""), (1, "fc.weight", "ternary"), (-3, "a", "data order")):
        digest = hashlib.blake2b(f"{seed}\0{purpose}\0{name}".encode(), digest_size=8).digest()
        words = tuple(int.from_bytes(part, "little") for part in (digest[:4], digest[4:]))
        assert parameter_key(seed, name, purpose) == words
    keys = [parameter_key(0, "a"), parameter_key(1, "a"), parameter_key(0, "b"), parameter_key(0, "a", "b")]
    keys += [parameter_key(12, "a"), parameter_key(1, "2a"), parameter_key(0, "", "a")]
    assert len(set(keys)) == 7
    assert SHARED != OWNER


def test_parameters_lie_one_after_the_other() -> None:
    first, second = Parameter("a", (2, 3), (3, 1)), Parameter("b", (4,), (1,))
    assert [(s.offset, s.start, s.numel, s.dense) for s in lay_out([first, second])] == [
        (0, 0, 6, False),
        (6, 0, 4, False),
    ]
    assert Parameter.of("a", torch.empty(2, 3)) == first
    assert Parameter("scalar", (), ()).numel == 1


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(24.0).view(2, 3, 4),
        torch.arange(24.0).view(2, 3, 4).permute(2, 0, 1),
        torch.arange(120.0).view(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.arange(5.0)[None, :, None],
        torch.tensor(3.0),
        torch.empty(0, 4),
    ],
)
def test_a_view_is_in_memory_order_and_shares_its_memory(tensor: torch.Tensor) -> None:
    view = flat_view(tensor)
    assert view.shape == (tensor.numel(),)
    assert view.data_ptr() == tensor.data_ptr()
    steps = [sum(i * s for i, s in zip(index, tensor.stride())) for index in torch.ones_like(tensor).nonzero().tolist()]
    assert view.tolist() == [tensor.flatten()[steps.index(at)].item() for at in range(tensor.numel())]


def test_gaps_and_overlaps_are_flattened_in_the_order_of_shape() -> None:
    assert flat_view(torch.arange(10.0)[::2]).tolist() == [0.0, 2.0, 4.0, 6.0, 8.0]
    assert flat_view(torch.tensor([7.0]).expand(3)).tolist() == [7.0, 7.0, 7.0]
    joined = flatten([torch.arange(6.0).view(2, 3).T, torch.tensor([9.0])])
    assert joined.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 9.0]
