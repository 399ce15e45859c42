"""TernGrad's CIFAR-10 experiment (Wen et al., NeurIPS 2017, table 1), whole: 38.4 million images a training, on a GPU.

    python benchmarks/claims/terngrad_whole.py --data FOLDER --json benchmarks/results/claims/terngrad_whole.json

The settings are those of ``terngrad_cifar10.py``, which trains a part in 391 on processors: the ConvNet of TensorFlow's
tutorial, crops of 24 pixels and flips, Adam at 2e-4, a weight decay of 0.004 on the two hidden linear layers, an
average of the weights in evaluation, batches 1 to 4 for training and 5 for evaluation. Float32 and TernGrad begin with
the same weights and see the same images. Each of TernGrad's workers has the gradient of its own share of a batch, and
the exchange is made by the method's own codec and kernels, in the memory of the device: the first and the last one are
compared with :class:`gradwire.SimulatedLink`, bit for bit. Convolutions and products use TF32 on a GPU.

A GPU repeats two recorded graphs a step, between which the payloads are encoded, since their random numbers depend on
the round. After ``--seconds`` a training is evaluated where it stands, and the result says after how many steps. Rows
of other numbers of workers in the result are kept. Trainings of several seeds differ in their first weights and in
TernGrad's random numbers, and see the same images.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import gradwire as gw
from benchmarks.claims.terngrad_cifar10 import BATCH, PAPER
from benchmarks.lib.runs import earlier, write
from gradwire.exchange.codecs.base import Draw
from gradwire.exchange.segments import Parameter, Segment, divide
from gradwire.kernels import get_kernels
from gradwire.methods.ternary.ternary_codec import TernarySummary
from gradwire.tools.experiments.simulate import places_of
from gradwire.tools.experiments.tasks.cifar10 import Cifar10, ConvNet, ResponseNorm

CROP, RATE, DECAY, AVERAGE = 24, 2e-4, 0.004, 0.9999
DENSE_BELOW = 1024
"""Parameters with fewer elements are sent in float32, as by default."""
WARM_UP = 3
STREAMS = 4
PATIENCE = 200
"""Steps between looks at the clock."""
EVALUATED_AT_ONCE = 2500


class Batches:
    """Random batches of cropped and flipped images, drawn on a device.

    Args:
        images: Training and evaluation images of the task.
        batch: Images of all workers in a step.
        device: Where everything lies.
    """

    def __init__(self, images: Any, batch: int, device: torch.device) -> None:
        self.inputs = images.inputs.permute(0, 2, 3, 1).contiguous().to(device)
        self.labels = images.labels.to(device)
        self._scale, self._shift = images.scale.to(device), images.shift.to(device)
        self.batch, self.steps = batch, images.samples // batch
        self._order = torch.zeros(self.steps * batch, dtype=torch.int64, device=device)
        self._begun = torch.zeros((), dtype=torch.int64, device=device)
        self._own, self._side = torch.arange(batch, device=device), torch.arange(CROP, device=device)
        self.images = torch.empty(
            (batch, 3, CROP, CROP), device=device, memory_format=torch.channels_last
        )  # fmt: skip
        self.targets = torch.empty(batch, dtype=torch.int64, device=device)
        top = (32 - CROP) // 2
        central = images.eval_inputs[:, :, top : top + CROP, top : top + CROP].permute(0, 2, 3, 1)
        self.held_out, self.held_out_labels = central.contiguous().to(device), images.eval_labels.to(device)

    def begin_epoch(self) -> None:
        """Draw a new order of the images, of which the last that fill no batch are left out."""
        order = torch.randperm(len(self.inputs), device=self.inputs.device)
        self._order.copy_(order[: len(self._order)])
        self._begun.zero_()

    def draw(self) -> None:
        """Fill ``images`` and ``targets`` with the next batch."""
        device, chosen = self.inputs.device, self._order[self._begun + self._own]
        self._begun += self.batch
        top, left = torch.randint(0, 32 - CROP + 1, (2, self.batch, 1), device=device)
        flipped = torch.randint(0, 2, (self.batch, 1), device=device, dtype=torch.bool)
        rows = top + self._side
        columns = left + torch.where(flipped, CROP - 1 - self._side, self._side)
        picked = self.inputs[chosen[:, None, None], rows[:, :, None], columns[:, None, :]]
        self.images.copy_(self.scaled(picked))
        self.targets.copy_(self.labels[chosen])

    def scaled(self, pixels: Tensor) -> Tensor:
        """Return the inputs of a network, ``[count, 3, height, width]``, from pixels with the channels last."""
        inputs: Tensor = (pixels * self._scale - self._shift).permute(0, 3, 1, 2)
        return inputs


class Exchange:
    """TernGrad's exchange between workers whose gradients lie in the rows of one matrix.

    Args:
        named: Parameters by name.
        workers: Number of workers.
        seed: Seed of the method's random numbers.
        device: Device of the matrix.
    """

    def __init__(self, named: Sequence[tuple[str, Tensor]], workers: int, seed: int, device: torch.device) -> None:
        segments, offset = [], 0
        for name, p in named:
            parameter = Parameter(name, tuple(p.shape), p.stride())
            segments.append(Segment(parameter, offset, 0, p.numel(), dense=p.numel() < DENSE_BELOW))
            offset += p.numel()
        compressed, self.dense = divide(segments)
        kernels = get_kernels("triton" if device.type == "cuda" else "auto")
        self.codec = gw.TernGrad().codec(kernels, compressed, workers, seed)
        self.workers = workers
        self._payloads = torch.zeros(
            (workers, self.codec.payload_bytes(self.codec.units)), dtype=torch.uint8, device=device
        )  # fmt: skip
        self._agreed: list[TernarySummary] = []

    def agree(self, rows: Tensor) -> None:
        """Compute scalers and limits, and share the largest scalers."""
        found = [self.codec.summarise(row) for row in rows]
        shared = torch.stack([one.scale for one in found]).amax(0)
        self._agreed = [TernarySummary(shared, shared, one.limit) for one in found]

    def encode(self, rows: Tensor, round: int) -> None:
        """Encode each worker's gradient."""
        for worker, (row, agreed) in enumerate(zip(rows, self._agreed)):
            self.codec.encode(row, agreed, Draw(round, worker), self._payloads[worker])

    def decode(self, rows: Tensor, mean: Tensor) -> None:
        """Add the payloads, and write the mean of all workers."""
        self.codec.decode_rows(self._payloads, self._agreed[0], mean)
        for part in self.dense:
            here = slice(part.offset, part.offset + part.numel)
            mean[here] = rows[:, here].mean(0)


class Training:
    """One network with its optimizer, and the gradients of its workers.

    Args:
        workers: Workers that exchange by TernGrad; 0: one process computes the whole batch in float32.
        seed: Seed of the weights.
        batches: Images.
    """

    def __init__(self, workers: int, seed: int, batches: Batches) -> None:
        self.method, self.workers, self.seed, self.batches = "terngrad" if workers else "fp32", workers, seed, batches
        device = batches.inputs.device
        torch.manual_seed(seed)
        self.model = ConvNet(CROP).to(device)
        for part in self.model.modules():
            if isinstance(part, ResponseNorm):
                part.band = part.band.to(device)
        named = list(self.model.named_parameters())
        self.parameters = [p for _, p in named]
        self.flat = torch.empty(sum(p.numel() for p in self.parameters), device=device)
        self.decay = torch.zeros_like(self.flat)
        self.rows = torch.zeros((max(1, workers), len(self.flat)), device=device)
        self.mean = self.rows[0] if not workers else torch.zeros_like(self.flat)
        for p, place, decay in zip(
            self.parameters, places_of(self.parameters, self.flat), places_of(self.parameters, self.decay)
        ):
            place.copy_(p.detach())
            p.data = place
            if any(p is one for one in self.model.decayed()):
                decay.fill_(DECAY)
        self._gradients = [places_of(self.parameters, row) for row in self.rows]
        self.exchange = Exchange(named, workers, seed, device) if workers else None
        on_gpu = device.type == "cuda"
        self.optimizer = torch.optim.Adam([self.flat], lr=RATE, fused=on_gpu or None, capturable=on_gpu)
        self.average, self._first = self.flat.clone(), self.flat.clone()
        self._steps = torch.zeros((), device=device)

    def jobs(self) -> list[Callable[[], None]]:
        """Return the work of each worker before the exchange."""
        return [partial(self._backward, worker) for worker in range(len(self.rows))]

    def _backward(self, worker: int) -> None:
        size = self.batches.batch // len(self.rows)
        share = slice(worker * size, (worker + 1) * size)
        loss = F.cross_entropy(self.model(self.batches.images[share]), self.batches.targets[share])
        torch._foreach_copy_(self._gradients[worker], list(torch.autograd.grad(loss, self.parameters)))
        self.rows[worker].addcmul_(self.flat, self.decay)

    @torch.no_grad()
    def step(self) -> None:
        """Take the step of the optimizer, and move the average of the weights, as TensorFlow does."""
        self.flat.grad = self.mean
        self.optimizer.step()
        self._steps += 1
        self.average.lerp_(self.flat, 1 - ((1 + self._steps) / (10 + self._steps)).clamp(max=AVERAGE))

    @torch.no_grad()
    def reset(self) -> None:
        """Begin anew with the first weights."""
        self.flat.copy_(self._first)
        self.average.copy_(self._first)
        self._steps.zero_()
        for value in self.optimizer.state[self.flat].values():
            value.zero_()

    @torch.no_grad()
    def evaluated(self, weights: Tensor) -> tuple[float, float]:
        """Return accuracy and mean loss on the held-out images."""
        values = dict(zip((name for name, _ in self.model.named_parameters()), places_of(self.parameters, weights)))
        right, loss, number = 0.0, 0.0, len(self.batches.held_out)
        for first in range(0, number, EVALUATED_AT_ONCE):
            here = slice(first, first + EVALUATED_AT_ONCE)
            inputs, labels = self.batches.scaled(self.batches.held_out[here]), self.batches.held_out_labels[here]
            found = torch.func.functional_call(self.model, values, (inputs,))
            right += float((found.argmax(1) == labels).sum())
            loss += float(F.cross_entropy(found, labels, reduction="sum"))
        return right / number, loss / number

    def differs(self, rows: Tensor, round: int) -> bool:
        """Return whether the mean is another than that of a simulated link between the same workers in main memory."""
        if self.exchange is None:
            return False
        with torch.device("meta"):
            named = ConvNet(CROP).named_parameters()
        link = gw.SimulatedLink(list(named), "terngrad", self.workers, seed=self.seed)
        link.round = round
        wanted, found = link.reduce_(rows.to("cpu", copy=True)), self.mean.cpu()
        whole = torch.ones(len(found), dtype=torch.bool)
        for part in self.exchange.dense:
            whole[part.offset : part.offset + part.numel] = False
        # Float32 gradients are added in another order.
        near = torch.allclose(found[~whole], wanted[~whole], rtol=1e-5, atol=1e-9)
        return not (near and torch.equal(found[whole], wanted[whole]))


def side_by_side(jobs: Sequence[Callable[[], None]], streams: Sequence[Any]) -> None:
    """Run jobs on streams of a GPU, beside each other; without streams one after the other."""
    if not streams:
        for job in jobs:
            job()
        return
    here = torch.cuda.current_stream()
    for number, job in enumerate(jobs):
        stream = streams[number % len(streams)]
        if number < len(streams):
            stream.wait_stream(here)
        with torch.cuda.stream(stream):
            job()
    for stream in streams[: len(jobs)]:
        here.wait_stream(stream)


class Steps:
    """Steps of several trainings on the same images.

    Args:
        trainings: Trainings, all with the same batches.
    """

    def __init__(self, trainings: Sequence[Training]) -> None:
        self.trainings, self.batches = trainings, trainings[0].batches
        self._on_gpu = self.batches.inputs.device.type == "cuda"
        self._streams = [torch.cuda.Stream() for _ in range(STREAMS)] if self._on_gpu else []
        self._before, self._after = self._first_part, self._second_part
        self.batches.begin_epoch()
        if self._on_gpu:
            self._record()

    def _first_part(self) -> None:
        self.batches.draw()
        side_by_side([job for one in self.trainings for job in one.jobs()], self._streams)
        for one in self.trainings:
            if one.exchange is not None:
                one.exchange.agree(one.rows)

    def _second_part(self) -> None:
        for one in self.trainings:
            if one.exchange is not None:
                one.exchange.decode(one.rows, one.mean)
            one.step()

    def _record(self) -> None:
        """Record both parts as graphs, and begin anew with the first weights."""
        beside = torch.cuda.Stream()
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            for _ in range(WARM_UP):
                self._first_part()
                self.encode(0)
                self._second_part()
        torch.cuda.current_stream().wait_stream(beside)
        for name, part in (("_before", self._first_part), ("_after", self._second_part)):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                part()
            setattr(self, name, graph.replay)
        for one in self.trainings:
            one.reset()

    def encode(self, round: int) -> None:
        """Encode the payloads of a round."""
        for one in self.trainings:
            if one.exchange is not None:
                one.exchange.encode(one.rows, round)

    def take(self, round: int) -> None:
        """Take a step of each training."""
        if round % self.batches.steps == 0:
            self.batches.begin_epoch()
        self._before()
        self.encode(round)
        self._after()

    def check(self, round: int) -> None:
        """Compare the exchange that was made last with that of a simulated link.

        Raises:
            SystemExit: they differ.
        """
        for one in self.trainings:
            if one.differs(one.rows, round):
                raise SystemExit(
                    f"round {round}: the exchange of {one.workers} workers differs from a simulated link's"
                )


def evaluation(one: Training, step: int) -> dict[str, Any]:
    """Return a row of the evaluation of a training."""
    (accuracy, loss), (last, _) = one.evaluated(one.average), one.evaluated(one.flat)
    return {"step": step, "accuracy": accuracy, "loss": loss, "accuracy_of_last_weights": last}


def train(arguments: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    """Train float32 and TernGrad with each seed; return a row each."""
    images = Cifar10(data=str(arguments.data), model="convnet", crop=CROP).load()
    batches = Batches(images, arguments.batch or BATCH[arguments.workers], device)
    trainings = [Training(n, seed, batches) for seed in arguments.seeds for n in (0, arguments.workers)]
    torch.manual_seed(min(arguments.seeds))
    began_s = time.monotonic()
    steps, rows = Steps(trainings), []
    print(f"recorded in {time.monotonic() - began_s:.0f} s", flush=True)
    for one in trainings:
        what = {"method": one.method, "workers": arguments.workers, "batch": batches.batch, "seed": one.seed}
        rows.append({**what, "steps": 0, "evaluations": []})
    total, every = arguments.steps, max(1, arguments.steps // 20)
    began_s = time.monotonic()
    for step in range(total):
        steps.take(step)
        late = False
        if step == 0 or step + 1 == total or step % PATIENCE == 0:
            if device.type == "cuda":
                # The host would run ahead by thousands of steps, and know no time.
                torch.cuda.synchronize()
            late = time.monotonic() - began_s > arguments.seconds
        last = late or step + 1 == total
        if step == 0 or last:
            steps.check(step)
        if last or (step + 1) % every == 0:
            for one, row in zip(trainings, rows):
                row["steps"] = step + 1
                row["ms_per_step_of_all"] = 1e3 * (time.monotonic() - began_s) / (step + 1)
                row["evaluations"].append(evaluation(one, step + 1))
                print(step + 1, row["method"], row["seed"], row["evaluations"][-1], flush=True)
        if last:
            break
    return rows


def table(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return TernGrad beside float32, for each number of workers and of steps."""
    lines = []
    for workers, count in sorted({(row["workers"], row["steps"]) for row in rows}):
        cell = [row for row in rows if (row["workers"], row["steps"]) == (workers, count)]
        last = {(row["method"], row["seed"]): row["evaluations"][-1]["accuracy"] for row in cell}
        seeds = sorted({row["seed"] for row in cell})
        steps, whole, ternary = PAPER.get(workers, (None, None, None))
        line = {"workers": workers, "steps": count, "seeds": seeds}
        line |= {method: [last[method, seed] for seed in seeds] for method in ("fp32", "terngrad")}
        line["difference_points"] = [100 * (last["terngrad", s] - last["fp32", s]) for s in seeds]
        lines.append(line | {"paper_steps": steps, "paper_percent": [whole, ternary]})
    return lines


def main() -> int:
    """Train, check, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with CIFAR-10's data batches")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--batch", type=int, help="images of all workers in a step; by default the paper's")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, help="by default the paper's")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="evaluate and end after so long")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.workers not in BATCH and not (arguments.batch and arguments.steps):
        parser.error("only 2 and 16 workers have a batch and steps in the paper: give --batch and --steps")
    arguments.steps = arguments.steps or PAPER[arguments.workers][0]
    device = torch.device(arguments.device)
    torch.backends.cudnn.benchmark = True
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    known = [row for row in earlier(arguments.json, "runs") if row["workers"] != arguments.workers]
    rows = known + train(arguments, device)
    lines = table(rows)
    for line in lines:
        print(line)
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    what = "ConvNet on crops of 24 of CIFAR-10 (batches 1-4, evaluated on 5), Adam at 2e-4, average of weights"
    write(arguments.json, what=what, gpu=gpu, table=lines, runs=rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
