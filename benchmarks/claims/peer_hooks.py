"""PyTorch's own communication hooks over Gloo: its quantization hooks' bias, and PowerSGD with several buckets.

    python benchmarks/claims/peer_hooks.py --json benchmarks/results/claims/peer_hooks.json

Every worker has one gradient that stays the same, so that the mean over rounds of what an exchange returns tells its
bias: what is drawn anew in each round averages out, by the square root of the number of rounds, and what is not does
not. Bytes are those that left through the loopback interface of a network namespace of the script's own. Over Gloo the
quantization hooks may not run at all. So their quantisers are also applied to the same gradients without an exchange.
PowerSGD's hook trains twelve layers of one bucket each, several times. A trial ends alike on all ranks, or in an error,
or not in time. ``gradwire`` runs beside it, by the same trials.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.ao.quantization import MinMaxObserver, PerChannelMinMaxObserver
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook, quantization_hooks
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import gradwire as gw
from benchmarks.lib.interface import interface_bytes, isolate
from benchmarks.lib.runs import write

NUMEL, ROUNDS, UNCOUNTED = 1 << 18, 64, 2
LAYERS, WIDTH, STEPS = 12, 64, 20
BUCKET_MB = 0.0157
"""Just above the weights of one of the twelve layers, so that each bucket has one."""
LIMIT_S = 40.0
"""Within which a trial takes its steps, a tenth of a second of computing, or counts as one that hangs."""
CHANNEL = 512
HOOKS = {"per tensor": "quantization_pertensor_hook", "per channel of 512": "quantization_perchannel_hook"}
QUANTISED = (*HOOKS, "gradwire qsgdinf")
BUCKETED = ("powerSGD_hook", "gradwire powersgd")


class Fixed(nn.Module):
    """A vector of parameters whose gradient is the vector that :meth:`forward` is given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(NUMEL))

    def forward(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return a number whose gradient it is."""
        return (self.weight * gradient).sum()


def quantised(rank: int, name: str) -> dict[str, float]:
    """Return the bytes an element that all ranks sent, and the errors of one mean and of the mean over all rounds."""
    model = DistributedDataParallel(Fixed(), bucket_cap_mb=100)
    if name in HOOKS:
        model.register_comm_hook(dist.group.WORLD, getattr(quantization_hooks, HOOKS[name]))
    else:
        gw.attach(model, name.removeprefix("gradwire "), collective="two_shot")
    number = dist.get_world_size()
    every = gradients(number)
    exact, total, once, start = every.mean(0), torch.zeros(NUMEL), 0.0, 0
    for round in range(UNCOUNTED + ROUNDS):
        if round == UNCOUNTED:
            dist.barrier()
            start = interface_bytes()
            dist.barrier()
        model.zero_grad()
        model(every[rank]).backward()
        found = model.module.weight.grad
        if round >= UNCOUNTED:
            total += found
            once = relative(found, exact)
    dist.barrier()
    sent = (interface_bytes() - start) / (number * ROUNDS * NUMEL)
    return {"bytes_per_element": sent, "squared_error": once, "squared_error_of_mean": relative(total / ROUNDS, exact)}


def gradients(workers: int) -> torch.Tensor:
    """Return a gradient of each worker."""
    return torch.stack([torch.randn(NUMEL, generator=torch.Generator().manual_seed(r)) for r in range(workers)])


def relative(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Return the relative squared error."""
    return float((found - exact).square().sum() / exact.square().sum())


def quantisers_alone(workers: int) -> list[dict[str, Any]]:
    """Return the error of the mean that the hooks' quantisers give without an exchange: the same in every round."""
    every, rows = gradients(workers), []
    for name, wide in zip(HOOKS, (False, True)):
        back = []
        for one in every:
            if wide:
                channels = one.reshape(-1, CHANNEL)
                observer = PerChannelMinMaxObserver()
                observer(channels)
                scale, zero = observer.calculate_qparams()
                codes = quantization_hooks._quantize_per_channel_backend(channels, scale, zero)
                back.append(quantization_hooks._dequantize_per_channel_backend(codes, scale, zero).reshape(-1))
            else:
                observer = MinMaxObserver()
                observer(one)
                scale, zero = observer.calculate_qparams()
                codes = quantization_hooks._quantize_per_tensor_backend(one, scale, zero)
                back.append(quantization_hooks._dequantize_per_tensor_backend(codes, scale, zero))
        error = relative(torch.stack(back).mean(0), every.mean(0))
        rows.append({"quantiser": name, "workers": workers, "squared_error": error, "squared_error_of_mean": error})
    return rows


def bucketed(rank: int, name: str) -> dict[str, Any]:
    """Train twelve buckets, and return a digest of the parameters."""
    torch.manual_seed(0)
    model = DistributedDataParallel(
        nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))), bucket_cap_mb=BUCKET_MB
    )
    if name == "powerSGD_hook":
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    else:
        gw.attach(model, name.removeprefix("gradwire "), warmup_steps=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    draw = torch.Generator().manual_seed(rank)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(torch.randn(8, WIDTH, generator=draw)).square().mean().backward()
        optimizer.step()
    whole = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    return {"digest": hash(whole.numpy().tobytes()), "finite": bool(whole.isfinite().all())}


WORKS = {"quantised": quantised, "bucketed": bucketed}


def rank_main(rank: int, world_size: int, port: int, work: str, name: str, pipe: Any) -> None:
    """Be a rank; send what the work returns, or the error that ended it."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=4 * LIMIT_S)
    )
    try:
        pipe.send(WORKS[work](rank, name))
    except Exception as error:
        pipe.send({"error": f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"})
    os._exit(0)


def all_ranks(world_size: int, work: str, name: str) -> list[dict[str, Any]]:
    """Return what each rank found, or how it ended."""
    os.environ["PYTHONHASHSEED"] = "0"
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for rank in range(world_size):
        ours, theirs = context.Pipe()
        processes.append(context.Process(target=rank_main, args=(rank, world_size, store.port, work, name, theirs)))
        processes[-1].start()
        theirs.close()
        pipes.append(ours)
    found: list[dict[str, Any]] = []
    end_s = time.monotonic() + LIMIT_S
    for pipe, process in zip(pipes, processes):
        try:
            ended = pipe.poll(max(0.0, end_s - time.monotonic()))
            found.append(pipe.recv() if ended else {"error": f"no end in {LIMIT_S:g} s"})
        except EOFError:
            process.join()
            found.append({"error": f"ended with {process.exitcode}"})
    for process in processes:
        process.kill()
        process.join()
    return found


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    isolate()
    rows: list[dict[str, Any]] = []
    for workers in (2, 4, 8):
        for name in QUANTISED:
            rows.append({"hook": name, "workers": workers, **all_ranks(workers, "quantised", name)[0]})
            print(rows[-1], flush=True)
    alone = [row for workers in (2, 4, 8) for row in quantisers_alone(workers)]
    print(*alone, sep="\n", flush=True)
    trials: list[dict[str, Any]] = []
    for name in BUCKETED:
        for trial in range(arguments.trials):
            ends = all_ranks(3, "bucketed", name)
            errors = sorted({end["error"] for end in ends if "error" in end})
            alike = not errors and len({end["digest"] for end in ends}) == 1 and all(end["finite"] for end in ends)
            trials.append({"hook": name, "trial": trial, "alike": alike, "errors": errors})
            print(trials[-1], flush=True)
    what = {"elements": NUMEL, "rounds": ROUNDS, "buckets": LAYERS, "steps": STEPS, "ranks_of_trials": 3}
    write(arguments.json, **what, quantised=rows, quantisers_alone=alone, bucketed=trials)
    return 0


if __name__ == "__main__":
    sys.exit(main())
