"""Links whose gradients lie on a device, with a GPU that is not there and real ranks."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import gradwire as gw
from fake_gpu import FakeGPU, fake_gpu, here, parameters_of, there
from gradwire.exchange.ops import Reduce
from log_texts import LogTexts
from ranks import fresh_ranks, wait_until_watched

pytestmark = pytest.mark.ranks

SHAPES = {"a": (30, 20), "b": (90,), "c": (700,)}
STEPS = 3


def rounds(method: str, options: dict[str, Any], gpu: FakeGPU | None = None) -> tuple[list[torch.Tensor], Any]:
    """Exchange some rounds in a loop without DDP; return the means of each, and the link's record."""
    parameters = parameters_of(SHAPES, gpu is not None)
    link = gw.Link(parameters.items(), method, min_numel=95, seed=4, **options)
    draw, found = torch.Generator().manual_seed(dist.get_rank()), []
    for step in range(STEPS):
        if gpu is not None and step == 1:
            # Tables are copied to the device once.
            gpu.waits_for.clear()
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
    return found, record, {"waits_for": gpu.waits_for, "copies": gpu.copies, "waits": gpu.waits}


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
        assert not [where for where, stream in noted["waits_for"] if stream == "link"]


ON_DEVICE = [
    *("fp32", "bf16", "terngrad", "QSGD()", "nuqsgd", "natural", "scaledsign", "eden", "dorefa", "naturaldithering"),
    *("ErrorFeedback(compressor=QSGDinf())", "EF21(compressor=QSGDinf())", "ef_signsgd", "onebit"),
    *("signsgd", "signum", "qsgdmaxnorm", "QSGDMaxNorm(block_size=256)", "p_quantisation"),
    *("diana", "DIANA(compressor=QSGDinf(), momentum=0.9)", "dqgd"),
    *("TernGrad(share_scaler=False)", "PQuantisation(p=1)", "DRIVE()", "EDEN(bits=3)"),
    "EDEN(bits=0.5, spacing='uniform')",
]


@pytest.mark.parametrize("method", ON_DEVICE)
def test_payloads_made_on_the_device_have_the_same_bits(three_ranks: Any, method: str) -> None:
    for _, record, noted in same(three_ranks, method, {}):
        assert record["kernels_on"] == "cuda:0"
        if method not in ("fp32", "bf16"):
            # Codes leave it, not gradients.
            assert noted["copies"]["from the device"] < 4 * ELEMENTS * STEPS
        # What travels is copied in page-locked memory, and waited for as such; nothing else is.
        assert not [where for where, stream in noted["waits_for"] if stream == "link"]


@pytest.mark.parametrize("options", [{"check_every": 1}, {"fallback": "bf16", "fallback_limit": 0.01}])
def test_numbers_that_ranks_gather_beside_a_round_travel_where_payloads_are_made_on_the_device(
    three_ranks: Any, options: dict[str, Any]
) -> None:
    """They lie in main memory, and lanes of such links start nothing on another thread than their own."""
    expected, found = three_ranks(plain, "terngrad", options), three_ranks(on_gpu, "terngrad", options)
    for (means, record), (others, other, _) in zip(expected, found):
        assert all(same_bits(mean, theirs) for mean, theirs in zip(means, others))
        assert other["sent_bytes"] == record["sent_bytes"]
        assert other["kernels_on"] == "cuda:0"


@pytest.mark.parametrize(
    ("method", "reason"), [("TopK(density=0.1)", "'indices'"), ("EDEN(bits=0.5)", "between its kernels")]
)
def test_auto_takes_main_memory_where_the_device_does_not_serve(three_ranks: Any, method: str, reason: str) -> None:
    for _, record, _ in same(three_ranks, method, {}):
        assert record["kernels_on"] == "cpu"
        assert reason in record["kernels_reason"]


def refusal(method: str, options: dict[str, Any], on_device: bool) -> str:
    try:
        on_gpu(method, options) if on_device else plain(method, options)
    except gw.GradwireError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was refused"


REFUSED = [
    ("terngrad", {"transport": "nccl"}, False, "IncompatibleError: transport='nccl' is for parameters on CUDA devices"),
    ("terngrad", {"transport": "staged"}, False, "IncompatibleError: transport='staged' is for parameters on CUDA"),
    pytest.param(
        *("terngrad", {"transport": "nccl"}, True, "IncompatibleError: transport='nccl' needs a PyTorch with NCCL"),
        marks=pytest.mark.skipif(dist.is_nccl_available(), reason="this PyTorch has NCCL"),
    ),
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
    from gradwire.exchange.drivers import one_device

    with pytest.raises(gw.IncompatibleError, match="'a' is on cpu and 'b' on cuda:0"):
        one_device({"a": torch.device("cpu"), "b": torch.device("cuda", 0)})


def overflowing(method: str, on_device: bool) -> tuple[list[torch.Tensor], int, dict[str, torch.Tensor]]:
    """Exchange rounds of which the second has an infinity on one rank; return means, skipped rounds and residuals."""
    with fake_gpu() if on_device else nullcontext():
        parameters = parameters_of(SHAPES, on_device)
        link = gw.Link(parameters.items(), method, min_numel=95, seed=4)
        draw, found = torch.Generator().manual_seed(dist.get_rank()), []
        for step in range(4):
            for p in parameters.values():
                gradient = torch.randn(p.shape, generator=draw)
                if step == 1 and dist.get_rank() == 2:
                    gradient[0] = torch.inf
                p.grad = there(gradient) if on_device else gradient
            link.reduce_()
            found.append(torch.cat([p.grad.reshape(-1).cpu() for p in parameters.values()]).clone())
        residuals = {key: here(value).clone() for key, value in link.state_dict()["rank"].items()}
        skipped = link.skipped_rounds
        link.close()
    return found, skipped, residuals


@pytest.mark.parametrize("method", ["ErrorFeedback(compressor=QSGDinf())", "EF21(compressor=QSGDinf())"])
def test_a_round_with_an_infinity_leaves_no_trace_on_a_device(three_ranks: Any, method: str) -> None:
    expected, found = three_ranks(overflowing, method, False), three_ranks(overflowing, method, True)
    for (means, skipped, residuals), (others, theirs, kept) in zip(expected, found):
        assert (skipped, theirs) == (1, 1)
        assert all(same_bits(mean, other) for mean, other in zip(means, others))
        assert residuals.keys() == kept.keys()
        assert kept
        assert all(same_bits(value, kept[key]) for key, value in residuals.items())


FEEDBACKS = ("ErrorFeedback(compressor=QSGDinf())", "ErrorFeedback(compressor=ScaledSign())")


def moving(method: str, reloads: bool) -> list[torch.Tensor]:
    """Exchange rounds, and load the link's own state after the second if wanted; return the means."""
    with fake_gpu():
        parameters = parameters_of(SHAPES, True)
        link = gw.Link(parameters.items(), method, min_numel=95, seed=4)
        draw, found = torch.Generator().manual_seed(dist.get_rank()), []
        for step in range(6):
            for p in parameters.values():
                p.grad = there(torch.randn(p.shape, generator=draw))
            link.reduce_()
            found.append(torch.cat([p.grad.reshape(-1).cpu() for p in parameters.values()]).clone())
            if reloads and step == 1:
                link.load_state_dict(link.state_dict())
        link.close()
    return found


def test_state_that_is_loaded_on_a_device_is_not_freed_before_it_is_copied(three_ranks: Any) -> None:
    """The link's stream copies it; the stand-in refuses that the training's stream may get the memory before."""
    for means, others in zip(*(three_ranks(moving, FEEDBACKS[0], reloads) for reloads in (False, True))):
        assert all(same_bits(mean, other) for mean, other in zip(means, others))


def test_residuals_that_pass_between_methods_on_a_device_are_not_freed_before_they_are_copied(three_ranks: Any) -> None:
    """The stand-in raises on the rank where it happens; here ranks end with the same means, of numbers."""
    first, *others = three_ranks(moving, f"Auto(candidates={FEEDBACKS}, turns=2, steps=1)", False)
    assert len(first) == 6
    assert all(bool(mean.isfinite().all()) and bool(mean.any()) for mean in first)
    assert all(same_bits(mean, own) for means in others for mean, own in zip(means, first, strict=True))


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(*(x.reshape(-1).view(torch.uint8) for x in (a, b)))


def corrupted(method: str, kind: str) -> tuple[list[bool], str, str]:
    """Change one byte of what arrives on rank 1 in the second round; return which means are whole, and the errors."""
    from gradwire.exchange.drivers.transports.staged import StagedTransport

    returned, rank = StagedTransport._returned, dist.get_rank()

    def changed(self: Any, to: torch.Tensor, reply: torch.Tensor) -> torch.Tensor:
        is_payload = reply.dim() == 2 and reply.dtype == torch.uint8 and len(reply) == dist.get_world_size()
        if is_payload and rank == 1 and int(reply[2, 4]) == 1 and not done:
            done.append(1)
            reply[2, 40 if kind == "body" else 4] ^= 8
        return returned(self, to, reply)

    done: list[int] = []
    with fake_gpu(), mock.patch.object(StagedTransport, "_returned", changed):
        parameters = parameters_of(SHAPES, True)
        link = gw.Link(parameters.items(), method, min_numel=95, seed=4, lanes=1)
        wait_until_watched()
        whole, errors = [], []
        for step in range(4):
            for p in parameters.values():
                p.grad = there(torch.full(p.shape, 1.0 + step))
            try:
                link.reduce_()
            except gw.GradwireError as error:
                errors.append(str(error))
                continue
            whole.append(all(bool(torch.isfinite(here(p.grad)).all()) for p in parameters.values()))
        link.close()
    return whole, errors[0], str(link.error)


@pytest.mark.parametrize(("kind", "what"), [("body", "its checksum differs"), ("head", "round is 9, expected 1")])
@pytest.mark.parametrize("method", ["terngrad", "QSGD()"])
def test_a_payload_that_changed_on_the_way_to_a_device_is_told_before_the_next_round(
    three_ranks: Any, method: str, kind: str, what: str
) -> None:
    with fresh_ranks(3, group_timeout_s=20) as ranks:
        found = ranks(corrupted, method, kind)
    for rank, (whole, first, error) in enumerate(found):
        assert whole[0]
        assert len(whole) <= 3
        assert "rank 1" in first
        assert first == error
        if rank == 1:
            # Nobody takes its mean for one, and the next round is refused.
            assert whole == [True, False]
            assert "payload from rank 2 for bucket 0" in first
            assert what in first
            assert "the end of round 1" in first


def test_a_wrong_seal_is_an_error_at_once_in_main_memory_and_late_on_a_device() -> None:
    from gradwire.exchange.drivers import LateChecks, Verdict
    from gradwire.exchange.wire import checked_values, with_checksum

    values = torch.arange(6.0)
    rows = torch.stack([with_checksum(values, sender, 7) for sender in range(3)])
    rows[1, 3] ^= 1
    with pytest.raises(gw.GradwireError, match="scales from rank 1: its checksum differs"):
        checked_values(rows, torch.float32, "scales", 7)
    with fake_gpu() as gpu:
        late = LateChecks()
        found = checked_values(there(rows), torch.float32, "scales", 7, checks=late)
        assert here(found).shape == (3, 6)
        assert not here(late.so_far())
        assert not gpu.waits_for
        with pytest.raises(gw.GradwireError, match="scales from rank 1: its checksum differs"):
            Verdict(gpu, True, late).read()
        # Each result is told once.
        assert late.so_far() is True
        assert Verdict(gpu, None, late).read()
        assert not Verdict(gpu, there(torch.tensor(False)), late).read()


def votes(method: str, collective: str, on_device: bool) -> list[torch.Tensor]:
    """Exchange rounds in which some ranks have no gradient of some parameters; return the outcomes."""
    rank = dist.get_rank()
    with fake_gpu() if on_device else nullcontext():
        parameters = parameters_of(SHAPES, on_device)
        link = gw.Link(parameters.items(), method, seed=4, collective=collective)
        draw, found = torch.Generator().manual_seed(rank), []
        for step in range(4):
            for place, (name, p) in enumerate(parameters.items()):
                gradient = torch.randn(p.shape, generator=draw)
                # One rank, two in the last round, and all: in one round, and always of "b".
                few = (rank + place + step) % 3 < (2 if step == 3 else 1)
                if few or name == "b" or (name == "a" and step == 2):
                    gradient.zero_()
                p.grad = there(gradient) if on_device else gradient
            link.reduce_()
            found.append(torch.cat([p.grad.reshape(-1).cpu() for p in parameters.values()]).clone())
        link.close()
    return found


@pytest.mark.parametrize("collective", ["two_shot", "all_gather"])
@pytest.mark.parametrize("method", ["signsgd", "signum"])
def test_ranks_that_do_not_vote_are_told_apart_on_a_device(three_ranks: Any, method: str, collective: str) -> None:
    expected, found = three_ranks(votes, method, collective, False), three_ranks(votes, method, collective, True)
    for outcomes, others in zip(expected, found):
        assert all(same_bits(outcome, other) for outcome, other in zip(outcomes, others))
        # Nobody has a gradient of "b", and one or two ranks have one of the others.
        assert [set(outcome[600:690].tolist()) for outcome in outcomes] == [{0.0}] * 4
        assert set(outcomes[0][:600].tolist()) == {-1.0, 1.0}


def scattered(method: str, on_device: bool) -> tuple[list[torch.Tensor], list[bool], list[tuple[str, str]]]:
    """Reduce-scatter some rounds; return this rank's shards, where operations had their tensors, and who waited."""
    from gradwire.exchange.drivers.transports.staged import StagedTransport

    execute, rank, places = StagedTransport.execute, dist.get_rank(), list[bool]()

    def noted(self: Any, op: Any, turn: Any, job: Any) -> torch.Tensor:
        places.append(self._device.holds(op.value if isinstance(op, Reduce) else op.send))
        return execute(self, op, turn, job)

    numel = 3 * 20 * 400
    waits: list[tuple[str, str]] = []
    with fake_gpu() if on_device else nullcontext() as gpu, mock.patch.object(StagedTransport, "execute", noted):
        parameters = parameters_of({"w": (60, 400)}, on_device)
        # In most chunks some rank has no shard.
        options = {"collective": "reduce_scatter", "chunk_numel": 8000, "lanes": 1}
        link = gw.Link(parameters.items(), method, seed=4, **options)
        draw, found = torch.Generator().manual_seed(rank), []
        for step in range(3):
            flat = torch.randn(numel, generator=draw)
            if step == 1 and rank == 2:
                flat[0] = torch.inf
            if on_device and step == 1:
                gpu.waits_for.clear()
            mean = link.exchange(0, ["w"], there(flat) if on_device else flat, False).wait()
            link.end_round()
            found.append(mean.reshape(3, -1)[rank].cpu().clone())
        if on_device:
            waits = [wait for wait in gpu.waits_for if wait[1] == "link"]
        assert link.skipped_rounds == 1
        link.close()
    return found, places, waits


@pytest.mark.parametrize("method", ["QSGD()", "eden", "ErrorFeedback(compressor=QSGDinf())"])
def test_shards_on_a_device_have_the_same_bits_and_all_ranks_the_same_operations(three_ranks: Any, method: str) -> None:
    """A rank without a shard in a chunk tells of it where the others do, or those who take NCCL would wait for ever."""
    expected, found = three_ranks(scattered, method, False), three_ranks(scattered, method, True)
    for (shards, _, _), (others, places, waits) in zip(expected, found):
        assert all(same_bits(shard, other) for shard, other in zip(shards, others))
        assert len(places) > 9
        assert all(places), "an operation with a tensor in main memory"
        assert not waits


def looked_at() -> dict[str, Any]:
    """Spoil what rank 1 gets in the last round of all, and look at the link in all ways."""
    import tempfile

    from gradwire.exchange.drivers.transports.staged import StagedTransport

    returned, rank, told = StagedTransport._returned, dist.get_rank(), dict[str, Any]()

    def changed(self: Any, to: torch.Tensor, reply: torch.Tensor) -> torch.Tensor:
        if rank == 1 and reply.dim() == 2 and int(reply[2, 4]) == 1:
            reply[2, 40] ^= 8
        return returned(self, to, reply)

    def refusal(look: Any) -> str:
        try:
            look()
        except gw.GradwireError as error:
            return str(error)
        return "nothing was refused"

    with fake_gpu() as gpu, mock.patch.object(StagedTransport, "_returned", changed):
        parameters = parameters_of({"w": (60, 400)}, True)
        link = gw.Link(parameters.items(), "QSGD()", seed=4, lanes=1)
        for _ in range(2):
            parameters["w"].grad = there(torch.ones(60, 400))
            link.reduce_()
        told["before the device is done"] = link.error
        # Where a rank has failed, the others know of it at their next look.
        dist.barrier()
        gpu.catch_up(gpu.mark()._count)
        told["error"] = str(link.error)
        with tempfile.TemporaryDirectory() as folder:
            told["looks"] = [refusal(look) for look in (link.state_dict, link.metrics, link.gauges, link.state_dict)]
            told["save"] = refusal(lambda: gw.save(link, folder))
        link.close()
    return told


def test_an_error_that_is_known_late_is_told_by_every_look_and_to_all_who_save() -> None:
    with fresh_ranks(3, group_timeout_s=20) as ranks:
        found = ranks(looked_at)
    assert all(told["before the device is done"] is None for told in found)
    assert "payload from rank 2" in found[1]["error"]
    assert all("payload from rank 2" in look for look in found[1]["looks"])
    assert all("rank 1" in told["save"] and "payload from rank 2" in told["save"] for told in found)


def closed() -> tuple[str, list[str]]:
    """Spoil what rank 1 gets in the last round, and close the link; return its error and what was logged."""
    from gradwire.exchange.drivers.transports.staged import StagedTransport

    returned, rank = StagedTransport._returned, dist.get_rank()

    def changed(self: Any, to: torch.Tensor, reply: torch.Tensor) -> torch.Tensor:
        if rank == 1 and reply.dim() == 2 and int(reply[2, 4]) == 1:
            reply[2, 40] ^= 8
        return returned(self, to, reply)

    told = LogTexts()
    logging.getLogger("gradwire").addHandler(told)
    with fake_gpu(), mock.patch.object(StagedTransport, "_returned", changed):
        parameters = parameters_of({"w": (60, 400)}, True)
        link = gw.Link(parameters.items(), "QSGD()", seed=4, lanes=1)
        for _ in range(2):
            parameters["w"].grad = there(torch.ones(60, 400))
            link.reduce_()
        dist.barrier()
        link.close()
    logging.getLogger("gradwire").removeHandler(told)
    return str(link.error), told.texts


def test_an_error_of_the_last_round_is_told_when_the_link_is_closed() -> None:
    with fresh_ranks(3, group_timeout_s=20) as ranks:
        error, texts = ranks(closed)[1]
    assert "payload from rank 2" in error
    assert [text for text in texts if "payload from rank 2" in text] == texts[-1:]


def checked() -> str:
    """Spoil what rank 1 gets where bits are compared after each bucket; return the error."""
    from gradwire.exchange.drivers.transports.staged import StagedTransport

    returned, rank = StagedTransport._returned, dist.get_rank()

    def changed(self: Any, to: torch.Tensor, reply: torch.Tensor) -> torch.Tensor:
        if rank == 1 and reply.dim() == 2 and reply.shape[1] > 64:
            reply[2, 40] ^= 8
        return returned(self, to, reply)

    with fake_gpu(), mock.patch.object(StagedTransport, "_returned", changed):
        parameters = parameters_of({"w": (60, 400)}, True)
        link = gw.Link(parameters.items(), "QSGD()", seed=4, check=True)
        parameters["w"].grad = there(torch.ones(60, 400))
        with pytest.raises(gw.GradwireError) as error:
            link.reduce_()
        link.close()
    return str(error.value)


def test_where_bits_are_compared_the_cause_comes_first() -> None:
    with fresh_ranks(3, group_timeout_s=20) as ranks:
        assert "payload from rank 2 for bucket 0" in ranks(checked)[1]
