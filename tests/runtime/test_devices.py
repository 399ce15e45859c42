"""Links whose gradients lie on a device, with a GPU that is not there and real ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import gradwire as gw
from fake_gpu import FakeGPU, fake_gpu, there

pytestmark = pytest.mark.ranks

SHAPES = {"a": (30, 20), "b": (90,), "c": (700,)}
STEPS = 3


def rounds(method: str, options: dict[str, Any], gpu: FakeGPU | None = None) -> tuple[list[torch.Tensor], Any]:
    """Exchange some rounds in a loop without DDP; return the means of each, and the link's record."""
    import torch.distributed as dist

    parameters = {name: torch.nn.Parameter(torch.zeros(shape)) for name, shape in SHAPES.items()}
    link = gw.Link(parameters.items(), method, min_numel=95, seed=4, **options)
    draw, found = torch.Generator().manual_seed(dist.get_rank()), []
    for _ in range(STEPS):
        for p in parameters.values():
            gradient = torch.randn(p.shape, generator=draw)
            p.grad = gradient if gpu is None else there(gradient)
        link.reduce_()
        found.append(torch.cat([p.grad.reshape(-1).cpu() for p in parameters.values()]).clone())
    record = link.record()
    record["sent_bytes"] = link.traffic().sent_bytes
    link.close()
    return found, record


def on_gpu(method: str, options: dict[str, Any]) -> tuple[list[torch.Tensor], Any, dict[str, Any]]:
    with fake_gpu() as gpu:
        found, record = rounds(method, options, gpu)
    return found, record, {"reads": gpu.reads, "copies": gpu.copies, "waits": gpu.waits}


def plain(method: str, options: dict[str, Any]) -> tuple[list[torch.Tensor], Any]:
    return rounds(method, options)


def same(ranks: Any, method: str, options: dict[str, Any]) -> list[Any]:
    """Compare the bits and the bytes of a link on a device with those of one in main memory; return what it noted."""
    expected, found = ranks(plain, method, {}), ranks(on_gpu, method, options)
    for (means, record), (others, other, _) in zip(expected, found):
        assert all(torch.equal(mean, theirs) for mean, theirs in zip(means, others))
        assert other["sent_bytes"] == record["sent_bytes"]
        assert (other["device"], other["transport"]) == ("cuda:0", "staged")
    return found


ELEMENTS = sum(torch.Size(shape).numel() for shape in SHAPES.values())


@pytest.mark.parametrize(
    "method", ["terngrad", "bf16", "TopK(density=0.1)", "ErrorFeedback(compressor=QSGDinf())", "diana"]
)
def test_any_method_is_exchanged_by_copies_in_main_memory(three_ranks: Any, method: str) -> None:
    for _, record, noted in same(three_ranks, method, {"backend": "cpu"}):
        assert record["kernels_on"] == "cpu"
        # Each gradient leaves the device once and returns once, and no thread waits but for that copy.
        assert set(noted["copies"].values()) == {4 * ELEMENTS * STEPS}
        assert not [where for where, stream in noted["reads"] if stream == "link"]


ON_DEVICE = [
    *("fp32", "bf16", "terngrad", "QSGD()", "nuqsgd", "natural", "scaledsign", "eden", "dorefa", "naturaldithering"),
    *("ErrorFeedback(compressor=QSGDinf())", "EF21(compressor=QSGDinf())", "ef_signsgd", "onebit"),
]


@pytest.mark.parametrize("method", ON_DEVICE)
def test_payloads_made_on_the_device_have_the_same_bits(three_ranks: Any, method: str) -> None:
    for _, record, noted in same(three_ranks, method, {}):
        assert record["kernels_on"] == "cuda:0"
        if method not in ("fp32", "bf16"):
            # Codes leave it, not gradients.
            assert noted["copies"]["from the device"] < 4 * ELEMENTS * STEPS


def test_auto_takes_main_memory_where_triton_lacks_a_family(three_ranks: Any) -> None:
    for _, record, _ in same(three_ranks, "TopK(density=0.1)", {}):
        assert record["kernels_on"] == "cpu"
        assert "'indices'" in record["kernels_reason"]


def refusal(method: str, options: dict[str, Any], on_device: bool) -> str:
    try:
        on_gpu(method, options) if on_device else plain(method, options)
    except gw.GradwireError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was refused"


REFUSED = [
    ("terngrad", {"transport": "nccl"}, False, "IncompatibleError: transport='nccl' is for parameters on CUDA devices"),
    ("terngrad", {"transport": "staged"}, False, "IncompatibleError: transport='staged' is for parameters on CUDA"),
    ("terngrad", {"transport": "nccl"}, True, "IncompatibleError: transport='nccl' needs a PyTorch with NCCL"),
    ("terngrad", {"transport": "gloo"}, True, "IncompatibleError: transport='gloo' sends from main memory"),
    ("TopK(density=0.1)", {"backend": "triton"}, True, "BackendError: backend='triton' cannot serve parameters on"),
    ("terngrad", {"transport": "tcp"}, False, "HyperparameterError: transport"),
]


@pytest.mark.parametrize(("method", "options", "on_device", "expected"), REFUSED)
def test_what_cannot_be_is_refused(
    three_ranks: Any, method: str, options: dict[str, Any], on_device: bool, expected: str
) -> None:
    for found in three_ranks(refusal, method, options, on_device):
        assert expected.removeprefix("IncompatibleError: ") in found


def test_parameters_of_two_devices_are_refused() -> None:
    from gradwire.drivers import one_device

    with pytest.raises(gw.IncompatibleError, match="'a' is on cpu and 'b' on cuda:0"):
        one_device({"a": torch.device("cpu"), "b": torch.device("cuda", 0)})
