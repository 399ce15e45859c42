"""The training of a task by a worker that comes and goes: its engine, its loop, and its run folder."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import gradwire as gw
from gradwire.seeds import worker_seed
from gradwire.tools.experiments.config import RunConfig
from gradwire.tools.experiments.engine import LinkEngine, build_model, link_options, score_share
from gradwire.tools.experiments.errors import UsageError
from gradwire.tools.experiments.folder import RunFolder, checkpoint_steps
from gradwire.tools.experiments.order import DataOrder
from gradwire.tools.experiments.run import begun, check_link
from gradwire.tools.experiments.run_record import MEMBERSHIP, Audience, config_of, default_folder, report
from gradwire.tools.experiments.tasks.graph import GraphTask
from gradwire.tools.experiments.train import Trainer


class Progress:
    """The steps of a training and the buffers of its model, which a new member takes over."""

    def __init__(self, model: nn.Module) -> None:
        self.step = 0
        self._buffers = dict(model.named_buffers())

    def state_dict(self) -> dict[str, Any]:
        """Return the number of steps, and the buffers."""
        return {"step": self.step, "buffers": self._buffers}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the number of steps, and the buffers."""
        self.step = int(state["step"])
        for name, buffer in self._buffers.items():
            buffer.copy_(state["buffers"][name])


class MemberEngine(LinkEngine):
    """An :class:`~gradwire.tools.experiments.engine.Engine` of one member, which reports and evaluates by itself.

    All members hold the same parameters after a round, so that each can evaluate without the others.

    Args:
        plan: Settings of the run; ``plan.task.batch`` is that of ``plan.workers`` members.
        membership: The membership.
        past: The run folder of a member whose newest checkpoint this worker begins with. Unless it is the first to
            begin a training, it takes over what the others have.

    Raises:
        UsageError: samples of the task belong to workers, so that they cannot come and go.
    """

    link: gw.Link
    rank, world_size = 0, 1

    def __init__(self, plan: RunConfig, membership: gw.Membership, past: RunFolder | None = None) -> None:
        self.plan, self.membership = plan, membership
        self.model: nn.Module = build_model(plan)
        self.source = plan.task.load()
        if not isinstance(plan.task.order(plan.seed, self.source.samples, plan.workers), DataOrder):
            raise UsageError(f"{plan.task.name}: each worker owns samples; workers that come and go share all of them")
        for parameter in plan.task.decayed(self.model) if plan.task.decay else ():
            parameter.register_hook(self._decay(parameter))
        self.optimizer = plan.task.build_optimizer(self.model)
        self.progress = Progress(self.model)
        self.local = gw.method(plan.method).traits.local_steps > 0
        if past is not None:
            self._take(past)
        self._sampler = gw.ElasticSampler(
            self.source.samples, membership, plan.task.batch // plan.workers, seed=plan.seed
        )
        membership.carry(progress=self.progress)
        options = {**link_options(plan, self.optimizer), "optimizer": self.optimizer}
        group: Any = membership
        self.link = gw.Link(self.model.named_parameters(), plan.method, group=group, **options)

    def _take(self, past: RunFolder) -> None:
        """Take over parameters, the optimizer's state and the step of a checkpoint."""
        shared = past.load_part("shared")
        own = past.load_part("rank-0") if self.local else shared
        self.model.load_state_dict(own["model"])
        self.optimizer.load_state_dict(own["optimizer"])
        self.progress.step = shared["step"]

    def _decay(self, parameter: Tensor) -> Callable[[Tensor], Tensor]:
        factor = self.plan.task.decay
        return lambda gradient: gradient + parameter.detach() * factor

    def backward(self, step: int) -> float:
        """Compute the mean gradient of a step, unless the method has local steps.

        Raises:
            LeftOutError: the others went on without this worker, and have taken it in again.
        """
        batch = self._sampler.draw() or []
        # The batch of each member begins at position 0, and must not be augmented as that of another.
        seed = worker_seed(self.plan.seed, self.membership.rank)
        inputs, targets = self.source.batch(torch.tensor(batch), slice(0, len(batch)), seed=seed, step=step)
        loss = self.plan.task.loss(self.model(inputs), targets)
        loss.backward()
        if self.local:
            # The link exchanges within the optimizer's step, and newcomers are taken in there, after this step.
            self.progress.step = step + 1
        else:
            self.link.reduce_()
        return float(loss.detach())

    def mean(self, values: Sequence[float]) -> list[float]:
        """Return the values: each member tells its own."""
        return list(values)

    def score(self) -> tuple[float, float]:
        """Evaluate the model on all of the evaluation data."""
        with self.link.global_parameters() if self.local else contextlib.nullcontext():
            loss, right, count = score_share(self.plan, self.model, self.source.evaluation(0, 1))
        return loss / count, right / count

    def barrier(self) -> None:
        """Wait for nobody: a member writes its own folder."""

    def gauges(self) -> list[dict[str, float]]:
        """Return the method's gauges of this member's latest step."""
        return [self.link.gauges()]


class MemberTrainer(Trainer):
    """Trains until the last step, or until this member has left."""

    engine: MemberEngine
    _evaluated: int | None = None
    """Step of the last evaluation; None while the folder has none."""

    def run(self, stop_after: int | None = None) -> None:
        """Train from the step of the others to the last, or to ``stop_after``, and write a checkpoint."""
        last = min(self.plan.task.steps, stop_after or self.plan.task.steps)
        membership, progress = self.engine.membership, self.engine.progress
        self.step = progress.step
        self._record_link()
        if self.step == 0:
            self._evaluate()
            self._evaluated = 0
        while self.step < last and not membership.left:
            self._tell("training")
            times = membership.counts["left_out"]
            try:
                self._one_step()
            except gw.LeftOutError:
                self.optimizer.zero_grad()
                self.step = progress.step
                continue
            if membership.counts["left_out"] > times:
                # What it has learnt meanwhile is gone: it goes on where the others are.
                self.step = progress.step
                continue
            progress.step = self.step
            if self.step % self.plan.log_every == 0 or self.step == last:
                self._log()
            if self.step % self.plan.task.eval_every == 0:
                self._evaluate()
                self._evaluated = self.step
            if self._is_due or (self.plan.checkpoint_every and self.step % self.plan.checkpoint_every == 0):
                self.save()
        if self._losses:
            self._log()
        # Also if it was told to leave before its first step: a run has a row.
        if self._evaluated != self.step:
            self._evaluate()
        self.save()
        self._record_link()

    def follow(self, past: RunFolder) -> None:
        """Go on with the rows and the counts of a run folder, from its newest checkpoint.

        The training goes on from an earlier step if the checkpoint of the first worker is older than this one. Later
        rows are dropped, since they are written again. Counts and time stay those of the checkpoint: this worker did
        send those bytes.
        """
        shared = past.load_part("shared")
        self.elapsed_s, self.base = shared["elapsed_s"], dict(shared["counters"])
        # A training that begins at step 0 evaluates its initial parameters, so that no row of that step is kept.
        past.cut_metrics(min(shared["step"], self.engine.progress.step) or -1)
        self._evaluated = min(shared["step"], self.engine.progress.step)


@contextlib.contextmanager
def _told(audience: Audience) -> Iterator[None]:
    """Tell who comes and goes, and warnings, in the body."""

    class Teller(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            audience.say(record.getMessage())

    logger, teller = logging.getLogger("gradwire"), Teller(logging.INFO)
    level = logger.level
    logger.addHandler(teller)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(teller)
        logger.setLevel(level)


def train_as_member(
    plan: RunConfig,
    audience: Audience,
    address: str,
    secret: str | None,
    *,
    folder: Path | None = None,
    overwrite: bool = False,
    stop_after: int | None = None,
) -> Path:
    """Train as one member of a training whose workers come and go; return the run folder, which is its own.

    As many workers as ``plan.workers`` begin together, and later ones are taken in. On SIGTERM it leaves after the
    current round, and waits no longer if it has not been taken in.

    Raises:
        GradwireError: the run cannot be started, nobody takes this worker in before it is told to leave, or the
            training has failed.
    """
    if isinstance(plan.task, GraphTask):
        raise UsageError("graph: each worker owns a part of the graph, and cannot come and go: leave --join out")
    if plan.task.ema:
        raise UsageError("ema: a moving average of the weights is not handed to new members: leave --ema or --join out")
    check_link(plan)

    with contextlib.ExitStack() as lock:

        def folder_of() -> RunFolder:
            run = RunFolder.create(folder or default_folder(plan), overwrite=overwrite)
            lock.enter_context(run.locked())
            run.write_config({**config_of(plan), MEMBERSHIP: address})
            return run

        return _train(plan, audience, address, secret, folder_of, stop_after)


def resume_as_member(
    folder: Path, audience: Audience, address: str, secret: str | None, *, stop_after: int | None = None
) -> Path:
    """Join again with the folder of a member; return it.

    If the training has members, this worker takes over what they have. Otherwise it begins again with the newest
    checkpoint of the first worker that joins: parameters, the optimizer's state and the step. The method's state and
    the order of the samples begin anew. A worker that was killed before its first checkpoint writes its rows anew.

    Raises:
        RunError: the folder holds no run, or another process trains in it.
        GradwireError: as for :func:`train_as_member`.
    """
    past, plan = begun(folder)
    last = max(checkpoint_steps(folder), default=None)
    if last is not None and last >= plan.task.steps:
        audience.say(f"{folder} is finished: {last} of {plan.task.steps} steps")
        # A member that was ended at its last rows has none.
        report([folder], folder)
        return folder
    with past.locked():
        if last is None:
            audience.say(f"{folder} holds no checkpoint: this worker begins with what the others have")
            past.cut_metrics(-1)
            return _train(plan, audience, address, secret, lambda: past, stop_after)
        return _train(plan, audience, address, secret, lambda: past, stop_after, past)


def _train(
    plan: RunConfig,
    audience: Audience,
    address: str,
    secret: str | None,
    folder_of: Callable[[], RunFolder],
    stop_after: int | None,
    past: RunFolder | None = None,
) -> Path:
    plan.task.check_data()
    gw.warm_up(plan.method)
    torch.set_num_threads(plan.threads)
    with _told(audience), gw.join(address, secret=secret, least=plan.workers) as membership:
        engine = MemberEngine(plan, membership, past)
        run = folder_of()
        audience.start(plan)
        trainer = MemberTrainer(plan, engine, run, audience.row, audience.step)
        if past is not None:
            trainer.follow(past)
            audience.say(f"goes on after step {engine.progress.step} of {plan.task.steps}")
        trainer.run(stop_after)
        if membership.left:
            audience.say(f"left after step {engine.progress.step}; the others go on")
    report([run.path], run.path)
    return run.path
