"""What attach refuses, what it survives, and what it says."""

from __future__ import annotations

import io
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire as gw
from gradwire.exchange.digests import unpack
from oracle import batch, digest, layers, simulated_run, square_loss

pytestmark = pytest.mark.ranks

CAP = 0.0163


def refusal(build: Any, *, error: type[Exception] = gw.GradwireError) -> str:
    """Return the sentence with which ``build`` refuses."""
    try:
        build()
    except error as refused:
        return f"{type(refused).__name__}: {refused}"
    return "nothing was refused"


# ---------------------------------------------------------------------- refusals


def refuse_mismatch(field: str) -> str:
    import torch.distributed as dist

    odd = dist.get_rank() == 2
    width = 48 if odd and field == "parameters" else 64
    named = list(layers(2, width).named_parameters())
    method = "TernGrad(clip=3.0)" if odd and field == "method" else "terngrad"
    options = {"seed": 7} if odd and field == "seed" else {}
    options |= {"min_numel": 5} if odd and field == "min_numel" else {}
    lanes = 3 if odd and field == "lanes" else 2
    return refusal(lambda: gw.Link(named, method, lanes=lanes, **options))


@pytest.mark.parametrize("field", ["method", "parameters", "seed", "min_numel", "lanes"])
def test_mismatch_names_rank_and_field_on_every_rank(three_ranks: Any, field: str) -> None:
    found = three_ranks(refuse_mismatch, field)
    assert len(set(found)) == 1
    assert found[0].startswith(f"RankMismatchError: rank 2 differs from rank 0 in '{field}'")


def refuse_modules() -> list[str]:
    import torch._dynamo

    found = []
    ddp = DistributedDataParallel(layers(2))
    link = gw.attach(ddp, "terngrad")
    found.append(refusal(lambda: gw.attach(ddp, "fp16")))
    link.close()
    hooked = DistributedDataParallel(layers(2))
    hooked.register_comm_hook(None, _nothing)
    found.append(refusal(lambda: gw.attach(hooked, "terngrad")))
    found.append(refusal(lambda: gw.attach(layers(2), "terngrad")))  # type: ignore[arg-type]
    sparse = DistributedDataParallel(nn.Sequential(nn.Embedding(50, 32, sparse=True)))
    found.append(refusal(lambda: gw.attach(sparse, "terngrad")))
    broken = layers(2)
    with torch.no_grad():
        broken[1].weight[3, 3] = float("nan")
    found.append(refusal(lambda: gw.attach(DistributedDataParallel(broken), "terngrad")))
    torch._dynamo.config.optimize_ddp = "python_reducer"
    try:
        compiled = DistributedDataParallel(layers(2))
        found.append(refusal(lambda: gw.attach(compiled, "terngrad")))
    finally:
        torch._dynamo.config.optimize_ddp = True
    ddp = DistributedDataParallel(layers(2))
    found.append(refusal(lambda: gw.attach(ddp, "terngrad", exclude=["1.wieght"])))
    found.append(refusal(lambda: gw.attach(ddp, "terngrad", collective="two_shots")))
    found.append(refusal(lambda: gw.attach(ddp, "fp32", collective="two_shot")))
    found.append(refusal(lambda: gw.attach(ddp, "terngrad", bucket_size=3)))
    found.append(refusal(lambda: gw.attach(ddp, "terngrad", lanes=0)))
    # Nothing of all this used the module up.
    gw.attach(ddp, "terngrad").close()
    return found


def _nothing(state: object, bucket):  # type: ignore[no-untyped-def]
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def test_refusals_say_what_to_do(three_ranks: Any) -> None:
    found = three_ranks(refuse_modules)
    assert found[0] == found[1] == found[2]
    expected = [
        ("IncompatibleError", "already exchanges by TernGrad(clip=2.5, clip_by='rms', share_scaler=True, ahead=False)"),
        ("IncompatibleError", "another communication hook"),
        ("IncompatibleError", "not Sequential"),
        ("IncompatibleError", "sparse=False"),
        ("IncompatibleError", "'1.weight' holds a NaN"),
        ("IncompatibleError", "ddp_optimizer"),
        ("HyperparameterError", "did you mean '1.weight'"),
        ("HyperparameterError", "did you mean 'two_shot'"),
        ("IncompatibleError", "use collective='auto'"),
        ("HyperparameterError", "unknown option 'bucket_size'"),
        ("HyperparameterError", "lanes"),
    ]
    assert len(found[0]) == len(expected)
    for sentence, (kind, part) in zip(found[0], expected):
        assert sentence.startswith(kind), sentence
        assert part in sentence


def refuse_plans() -> list[str]:
    found = []
    for method in ("QSGDMaxNorm(levels=20000)", "MultiScale(levels=(20000, 40000))", "Coded(compressor=SignSGD())"):
        ddp = DistributedDataParallel(layers(2))
        found.append(refusal(lambda ddp=ddp, method=method: gw.attach(ddp, method)))  # type: ignore[misc]
    return found


def test_what_has_no_plan_for_so_many_workers_is_refused_by_attach(three_ranks: Any) -> None:
    for found in three_ranks(refuse_plans):
        assert all(sentence.startswith("IncompatibleError") for sentence in found)
        most = "use at most levels=10922"
        assert [part in sentence for part, sentence in zip((most, most, "Coded("), found)] == [True] * 3


def refuse_scalers() -> list[str]:
    import torch.distributed as dist

    found = []
    for scaler in (object(), 1024.0, object() if dist.get_rank() == 1 else None):
        ddp = DistributedDataParallel(layers(2))
        found.append(refusal(lambda ddp=ddp, scaler=scaler: gw.attach(ddp, "terngrad", grad_scaler=scaler)))  # type: ignore[misc]
    return found


def test_a_scaler_that_is_none_is_refused_by_attach(three_ranks: Any) -> None:
    for rank, found in enumerate(three_ranks(refuse_scalers)):
        assert all("torch.amp.GradScaler that scales the loss is needed" in sentence for sentence in found)
        assert [sentence.startswith("IncompatibleError: rank 1: ") for sentence in found] == [False, False, rank != 1]


def refuse_one_rank() -> str:
    import torch.distributed as dist

    module = layers(2)
    if dist.get_rank() == 1:
        with torch.no_grad():
            module[0].bias[0] = float("inf")
    return refusal(lambda: gw.Link(module.named_parameters(), "terngrad"))


def test_a_refusal_on_one_rank_reaches_the_others(three_ranks: Any) -> None:
    found = three_ranks(refuse_one_rank)
    assert found[1].startswith("IncompatibleError: parameter '0.bias' holds a NaN or inf")
    assert found[0] == found[2] == found[1].replace("Error: ", "Error: rank 1: ")


def refuse_tuple() -> str:
    from gradwire.link.adapters.ddp import _exchange

    return refusal(lambda: _exchange(object(), (torch.zeros(3), torch.zeros(3))))  # type: ignore[arg-type]


def test_python_reducer_s_tuples_are_refused(three_ranks: Any) -> None:
    assert "python_reducer" in three_ranks(refuse_tuple)[0]


# ---------------------------------------------------------------------- non-finite gradients


def run_scaler(bad_layer: int) -> tuple[str, list[bool], int, float]:
    """Train under a GradScaler with an inf on rank 1 alone, in the first or the last bucket, at step 2."""
    import torch.distributed as dist

    module = layers(6)
    ddp = DistributedDataParallel(module, bucket_cap_mb=CAP)
    link = gw.attach(ddp, "terngrad")
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    skipped = []
    for step in range(5):
        optimizer.zero_grad()
        loss = square_loss(ddp, dist.get_rank(), step)
        if step == 2 and dist.get_rank() == 1:
            loss = loss + module[bad_layer].weight.sum() * float("inf")
        scaler.scale(loss).backward()
        before = digest(module)
        scaler.step(optimizer)
        scaler.update()
        skipped.append(digest(module) == before)
    rounds = link.diagnostics()["skipped_rounds"]
    link.close()
    return digest(module), skipped, rounds, scaler.get_scale()


@pytest.mark.parametrize("bad_layer", [0, 5])
def test_inf_on_one_rank_makes_every_rank_skip(three_ranks: Any, bad_layer: int) -> None:
    found = three_ranks(run_scaler, bad_layer)
    assert len({d for d, *_ in found}) == 1
    for _, skipped, rounds, scale in found:
        assert skipped == [False, False, True, False, False]
        assert rounds == 1
        assert scale == 512.0


def run_bad_values(method: str, value: float, layer: int) -> list[tuple[bool, bool]]:
    import torch.distributed as dist

    module = layers(4)
    ddp = DistributedDataParallel(module, bucket_cap_mb=CAP)
    link = gw.attach(ddp, method)
    for step in range(3):
        ddp.zero_grad()
        loss = square_loss(ddp, dist.get_rank(), step)
        if step == 2 and dist.get_rank() == 2:
            loss = loss + module[layer].weight.sum() * value
        loss.backward()
    link.close()
    return [(bool(p.grad.isfinite().any()), bool(p.grad.isfinite().all())) for p in module.parameters()]


@pytest.mark.parametrize("value", [float("inf"), float("nan"), -float("inf")])
@pytest.mark.parametrize("method", ["terngrad", "TernGrad(share_scaler=False)", "TernGrad(clip=None)", "bf16", "fp32"])
def test_non_finite_values_reach_every_rank(three_ranks: Any, method: str, value: float) -> None:
    for layer in (0, 3):
        for found in three_ranks(run_bad_values, method, value, layer):
            finite = [all_ for _, all_ in found]
            assert finite[2 * layer] is False
            assert all(f for i, f in enumerate(finite) if i != 2 * layer)


# ---------------------------------------------------------------------- copies, state, other loops


def reload_module() -> tuple[list[str], list[str], str]:
    import torch.distributed as dist

    module = layers(3)
    # A buffer too, which is counted by a hook of the module's.
    module[0].register_buffer("count", torch.zeros(3))
    ddp = DistributedDataParallel(module)
    link = gw.attach(ddp, "terngrad")
    buffer = io.BytesIO()
    torch.save(ddp, buffer)
    buffer.seek(0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        again = torch.load(buffer, weights_only=False)
    said = [str(w.message) for w in caught if "gradwire.attach" in str(w.message)]
    link.close()  # beside an open link another draws random numbers of its own
    new = gw.attach(again, "terngrad")
    optimizer = torch.optim.SGD(again.parameters(), lr=0.05)
    for step in range(3):
        optimizer.zero_grad()
        square_loss(again, dist.get_rank(), step).backward()
        optimizer.step()
    new.close()
    return said, [], digest(again.module)


def test_a_reloaded_module_says_so_and_can_be_attached_again(three_ranks: Any) -> None:
    expected = digest(simulated_run(layers(3), square_loss, "terngrad", 3, 3))
    for said, _, found in three_ranks(reload_module):
        assert len(said) == 1
        assert found == expected


def run_resumed(folder: str, stop: int | None) -> tuple[str, int]:
    """Train 8 steps, the second part from what was saved if ``stop`` is given."""
    import torch.distributed as dist

    def make() -> tuple[nn.Module, nn.Module, gw.Link, torch.optim.Optimizer]:
        module = layers(4)
        ddp = DistributedDataParallel(module, bucket_cap_mb=CAP)
        link = gw.attach(ddp, "terngrad", warmup_steps=2)
        return module, ddp, link, torch.optim.Adam(module.parameters(), lr=1e-3)

    module, ddp, link, optimizer = make()
    for step in range(8):
        if step == stop:
            gw.save(link, folder)
            held = {"model": module.state_dict(), "optimizer": optimizer.state_dict()}
            buffer = io.BytesIO()
            torch.save(held, buffer)
            link.close()
            module, ddp, link, optimizer = make()
            buffer.seek(0)
            held = torch.load(buffer, weights_only=True)
            module.load_state_dict(held["model"])
            optimizer.load_state_dict(held["optimizer"])
            gw.load(link, folder)
        optimizer.zero_grad()
        square_loss(ddp, dist.get_rank(), step).backward()
        optimizer.step()
    rounds = link.diagnostics()["rounds"]
    link.close()
    return digest(module), rounds


@pytest.mark.parametrize("stop", [1, 5])
def test_resuming_is_bit_identical(three_ranks: Any, tmp_path: Any, stop: int) -> None:
    whole = three_ranks(run_resumed, str(tmp_path / "none"), None)
    parts = three_ranks(run_resumed, str(tmp_path / "state"), stop)
    assert parts == whole
    assert len(set(whole)) == 1
    state = unpack(torch.load(tmp_path / "state" / "common.pt", weights_only=True), "common.pt")
    assert int(state["global"]["round"]) == stop


def run_without_ddp(channels_last: bool) -> tuple[str, dict[str, Any]]:
    import torch.distributed as dist

    module: nn.Module = layers(3)
    if channels_last:
        module = nn.Sequential(nn.Conv2d(4, 16, 3), nn.Flatten(), layers(1, 16 * 36)).to(
            memory_format=torch.channels_last
        )
        for p in module.parameters():
            with torch.no_grad():
                p.fill_(0.01).add_(torch.arange(p.numel(), dtype=torch.float32).view(p.shape) * 1e-6)
    link = gw.Link(module.named_parameters(), "terngrad", chunk_numel=1000)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    for step in range(4):
        optimizer.zero_grad()
        shape = (4, 4, 8, 8) if channels_last else (8, 64)
        module(batch(dist.get_rank(), step, shape)).square().mean().backward()
        link.reduce_()
        optimizer.step()
    found = link.diagnostics()
    link.close()
    return digest(module), found


def test_a_loop_without_ddp(three_ranks: Any) -> None:
    found = three_ranks(run_without_ddp, False)
    expected = digest(simulated_run(layers(3), square_loss, "terngrad", 3, 4))
    assert {d for d, _ in found} == {expected}
    for _, diagnostics in found:
        assert diagnostics["rounds"] == 4
        row = diagnostics["parameters"]["0.weight"]
        # Relative variance of a clipped Gaussian is about 1 (property 8), so the error is about 1 too, and
        # the cosine 1 / sqrt(2); a method that sent nothing would have error 1 and cosine 0.
        assert 0.5 < row["relative_error"] < 2
        assert 0.5 < row["cosine"] < 0.95
        assert min(diagnostics[k] for k in ("encode_s", "wire_s", "decode_s")) > 0


def test_a_loop_without_ddp_channels_last(three_ranks: Any) -> None:
    assert len({d for d, _ in three_ranks(run_without_ddp, True)}) == 1


def run_closed() -> list[str]:
    import torch.distributed as dist

    ddp = DistributedDataParallel(layers(2))
    link = gw.attach(ddp, "terngrad")
    square_loss(ddp, dist.get_rank(), 0).backward()
    link.close()
    found = [refusal(lambda: square_loss(ddp, dist.get_rank(), 1).backward(), error=Exception)]
    named = list(layers(2).named_parameters())
    for options in ({"backend": "cpuu"}, {"backend": "meta"}, {"exclude": None}, {"exclude": [1]}):
        found.append(refusal(lambda options=options: gw.Link(named, "terngrad", **options), error=Exception))
    return found


def test_what_is_refused_before_anything_hangs(three_ranks: Any) -> None:
    for found in three_ranks(run_closed):
        assert "this link was closed" in found[0]
        assert found[1].startswith("HyperparameterError")
        assert "did you mean 'cpu'" in found[1]
        assert found[2].startswith("HyperparameterError: backend")
        assert found[3].startswith("HyperparameterError: exclude")
        assert found[4].startswith("HyperparameterError: exclude")


def run_all_bad() -> tuple[int, int, float]:
    import torch.distributed as dist

    ddp = DistributedDataParallel(layers(6), bucket_cap_mb=CAP)
    link = gw.attach(ddp, "terngrad")
    for step in range(4):
        loss = square_loss(ddp, dist.get_rank(), step)
        (loss * float("inf") if step >= 2 else loss).backward()
        ddp.zero_grad()
    found = link.diagnostics()
    link.close()
    return found["skipped_rounds"], found["rounds"], found["parameters"]["3.weight"]["cosine"]


def test_skipped_rounds_are_rounds_not_buckets(three_ranks: Any) -> None:
    for skipped, rounds, _ in three_ranks(run_all_bad):
        assert (skipped, rounds) == (2, 4)


def run_buffers() -> list[int]:
    import torch.distributed as dist

    module = nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.Linear(64, 64))
    ddp = DistributedDataParallel(module)
    link = gw.attach(ddp, "terngrad")
    for step in range(3):
        ddp(batch(dist.get_rank(), step, (8, 32))).square().mean().backward()
    found = link.traffic().buffer_bytes
    link.close()
    return [found]


def test_buffer_broadcasts_have_their_own_row(three_ranks: Any) -> None:
    # Running mean and variance, 64 floats each, and a counter of 8 bytes: three times, to two other ranks.
    assert sum(n for found in three_ranks(run_buffers) for n in found) == 3 * 2 * (2 * 64 * 4 + 8)


def run_checked_corruption() -> str:
    """Rank 1 decodes something else, as a broken CPU or a drifted library would."""
    import torch.distributed as dist

    from gradwire.methods.ternary.ternary_codec import TernaryCodec

    ddp = DistributedDataParallel(layers(2))
    link = gw.attach(ddp, "terngrad", check=True)
    real = TernaryCodec.decode_mean
    if dist.get_rank() == 1:

        def wrong(self: Any, data: Any, summary: Any, begin: int, end: int, flat: torch.Tensor) -> None:
            real(self, data, summary, begin, end, flat)
            flat[7] += 1e-3

        TernaryCodec.decode_mean = wrong  # type: ignore[method-assign]
    try:
        square_loss(ddp, dist.get_rank(), 0).backward()
    except RuntimeError:
        return str(link.error)
    finally:
        TernaryCodec.decode_mean = real  # type: ignore[method-assign]
    return "no error"


def test_check_names_the_rank_whose_bits_differ(three_ranks: Any) -> None:
    for sentence in three_ranks(run_checked_corruption):
        assert "the mean of ranks [1] differs" in sentence
        assert "bucket 0" in sentence
