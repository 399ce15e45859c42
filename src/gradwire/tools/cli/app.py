"""The commands of ``gradwire``: each reads its options and makes one call."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from gradwire.tools.cli import join_commands, publish_app
from gradwire.tools.cli import options as o
from gradwire.tools.cli.show import handled

app = typer.Typer(
    name="gradwire",
    help="Data-parallel training over slow links: gradients packed to a few bits per element, for real.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)

bench = typer.Typer(no_args_is_help=True, help="Measured tables: training steps, and kernels against memcpy.")
app.add_typer(bench, name="bench")

app.command()(publish_app.publish)
app.command()(publish_app.subscribe)
app.add_typer(publish_app.patch, name="patch")


def _version(wanted: bool) -> None:
    if wanted:
        import importlib.metadata

        print(f"gradwire {importlib.metadata.version('gradwire')}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version")
    ] = False,
) -> None:
    pass


@app.command()
@o.with_records
def plan(*, options: o.PlanOptions, debug: o.Debug = False) -> None:
    """Predict step time by method, say what bounds it, and what to do; the answer may be "do nothing".

    The model's backward timeline and the methods' codecs are timed here; bytes and rounds are those of the methods' own
    protocols. The interval holds 80 % of the measured steps by which the machine was calibrated.

    Example: [cyan]gradwire plan --profile train.py --hosts 4 --hosts 16 --bandwidth 1gbit[/cyan]
    """
    with handled(debug):
        from gradwire.tools.cli import plan_command

        plan_command.plan(options)


@app.command()
def lab(
    command: Annotated[list[str], typer.Argument(metavar="COMMAND...", help="What each host runs, behind --")],
    hosts: Annotated[int, typer.Option(help="Network namespaces, each with its own link")] = 4,
    bandwidth: Annotated[str, typer.Option(help="Rate of a link, both ways: 100mbit, 1gbit, unlimited")] = "unlimited",
    asymmetric: Annotated[
        str | None, typer.Option(metavar="RATE", help="Rate at which a host sends, if it differs from --bandwidth")
    ] = None,
    host: Annotated[
        list[str] | None,
        typer.Option(
            metavar="N=RATE",
            help="One host's own link: 2=10mbit, 2=10mbit:100mbit (sends:receives) or 2.delay=50ms; repeatable",
        ),
    ] = None,
    groups: Annotated[int, typer.Option(help="Groups that the hosts are spread over, each with one link")] = 1,
    group: Annotated[
        list[str] | None, typer.Option(metavar="NAME=HOSTS", help="A group by its hosts: far=4-7; repeatable")
    ] = None,
    between: Annotated[
        list[str] | None,
        typer.Option(
            metavar="RATE",
            help="Of each group's link to the others; also delay=20ms, far=10mbit or far.loss=1%; repeatable",
        ),
    ] = None,
    delay: o.Delay = None,
    jitter: o.Jitter = None,
    loss: o.Loss = None,
    burst: o.Burst = None,
    reorder: o.Reorder = None,
    outage: o.Outages = None,
    congestion: o.Congestion = None,
    seed: Annotated[int, typer.Option(help="Seed of losses, jitter and reordering")] = 0,
    debug: o.Debug = False,
) -> None:
    """Run a command once on each host of an emulated cluster: Linux, root, iproute2.

    Each host is a network namespace, with its link limited both ways. RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are
    set as torchrun would set them, and GLOO_SOCKET_IFNAME to the host's interface.

    Example: [cyan]sudo env "PATH=$PATH" gradwire lab --hosts 4 --bandwidth 100mbit -- python train.py[/cyan]
    """
    with handled(debug):
        from gradwire.errors import HyperparameterError
        from gradwire.tools.lab import Topology, open_network, run_command

        parts = [f"hosts={hosts}", f"bandwidth={bandwidth}"]
        # Named groups have a number of their own.
        parts += [f"groups={groups}"] if groups != 1 or not group else []
        given = {"asymmetric": asymmetric, "delay": delay, "jitter": jitter, "loss": loss, "burst": burst}
        given |= {"reorder": reorder, "congestion": congestion, "outage": "+".join(outage or []) or None}
        parts += [f"{key}={value}" for key, value in given.items() if value is not None]
        parts += [f"seed={seed}"] if seed else []
        parts += [f"host{item}" for item in host or []]
        parts += [f"group.{item}" for item in group or []]
        parts += [f"between.{item}" if "=" in item else f"between={item}" for item in between or []]
        for part in parts:
            if "," in part:
                raise HyperparameterError(f"{part!r}: one value is needed; give each setting by an option of its own")
        with open_network(Topology.parse(",".join(parts))) as network:
            try:
                run_command(network, command)
            finally:
                report = network.report()
                if report is not None:
                    print(f"gradwire: {report.describe()}", file=sys.stderr, flush=True)


def _run_config(
    task: str, method: str | None, training: o.TrainingOptions, exchange: o.ExchangeOptions, **more: Any
) -> Any:
    from gradwire.tools.experiments.config import RunConfig
    from gradwire.tools.experiments.tasks import build

    own = {field.name for field in dataclasses.fields(RunConfig)}
    built = build(task, **{name: value for name, value in vars(training).items() if name not in own})
    more |= {name: value for name, value in vars(training).items() if name in own}
    return RunConfig(task=built, method=method or built.usual_method, **more, **exchange.settings())


@app.command()
@o.with_records
def train(
    *,
    context: typer.Context,
    task: o.TaskName = "digits",
    method: o.TaskMethod = None,
    training: o.TrainingOptions,
    exchange: o.ExchangeOptions,
    membership: o.JoinOptions,
    out: o.Out = None,
    overwrite: o.Overwrite = False,
    resume: Annotated[Path | None, typer.Option(metavar="RUN", help="Continue this run; all else is as it was")] = None,
    checkpoint_every: Annotated[
        int, typer.Option(help="Steps between checkpoints; 0: by time, and at the end", rich_help_panel=o.OUTPUT)
    ] = 0,
    checkpoint_minutes: Annotated[
        float, typer.Option(help="Minutes of training between checkpoints; 0: none by time", rich_help_panel=o.OUTPUT)
    ] = 10.0,
    stop_after: o.StopAfter = None,
    log_every: o.LogEvery = 10,
    as_json: o.AsJson = False,
    debug: o.Debug = False,
) -> None:
    """Train a built-in task data-parallel, on local workers, simulated ones, or those that torchrun started.

    With --lab the workers run on the hosts of an emulated cluster. With --join this process is one worker of a training
    whose workers come and go; --workers of them begin together, each with its part of --batch.

    Example: [cyan]gradwire train digits --method terngrad --workers 4[/cyan]
    """
    with handled(debug):
        if membership.join is not None:
            # Before anything imports torch.
            join_commands.silence_torch()
        from gradwire.tools.cli import commands

        how: dict[str, Any] = {"stop_after": stop_after, "as_json": as_json, "debug": debug}
        if resume is not None:
            own = {"join", "secret_file"} if membership.join is not None else set[str]()
            o.refuse_beside(context, "--resume", {"resume", *how, *own})
            if membership.join is None:
                commands.resume(resume, **how)
            else:
                join_commands.resume(resume, membership.join, membership.secret_file, **how)
            return
        config = _run_config(
            task,
            method,
            training if membership.join is not None else o.with_torchruns_workers(context, training),
            exchange,
            checkpoint_every=checkpoint_every,
            checkpoint_minutes=checkpoint_minutes,
            log_every=log_every,
        )
        if membership.join is not None:
            allowed = set(context.params) - {"simulate", "lab", "ema"}
            o.refuse_beside(context, "--join", allowed, "makes this process one worker")
            how |= {"overwrite": overwrite}
            join_commands.train(config, membership.join, membership.secret_file, out, **how)
            return
        commands.train(config, out, overwrite=overwrite, **how)


@app.command()
def coordinate(
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Where to listen; without a host at all IPv4 addresses")
    ] = ":29400",
    secret_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The secret: read, or drawn and written if there is no file")
    ] = None,
    state: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Go on from this file after a restart; it holds the secret")
    ] = None,
    as_json: o.AsJson = False,
    debug: o.Debug = False,
) -> None:
    """Keep the membership of a training whose workers come and go; it computes nothing and sees no gradient.

    It prints the line by which workers join. Ctrl-C ends it. Rounds go on without it, but workers can come and go only
    once it is started again.

    Example: [cyan]gradwire coordinate --listen :29400 --state coordinator.json[/cyan]
    """
    with handled(debug):
        from gradwire.tools.cli import coordinate_command

        coordinate_command.coordinate(listen, secret_file, state, as_json=as_json)


@app.command()
@o.with_records
def compare(
    *,
    task: o.TaskName = "digits",
    method: o.Methods = None,
    training: o.TrainingOptions,
    exchange: o.ExchangeOptions,
    out: o.Out = None,
    overwrite: o.Overwrite = False,
    log_every: o.LogEvery = 10,
    as_json: o.AsJson = False,
    debug: o.Debug = False,
) -> None:
    """Train the same task from the same seed under each method; print one table, write one report.

    Without --method it compares fp32 and terngrad.

    Example: [cyan]gradwire compare digits --method fp32 --method terngrad --method bf16[/cyan]
    """
    with handled(debug):
        from gradwire.tools.cli import commands

        config = _run_config(task, "fp32", training, exchange, log_every=log_every)
        chosen = method or ["fp32", "terngrad"]
        commands.compare(config, chosen, out, overwrite=overwrite, as_json=as_json, debug=debug)


@app.command(context_settings={"allow_interspersed_args": False})
@o.with_records
def run(
    *,
    context: typer.Context,
    script: Annotated[Path, typer.Argument(metavar="SCRIPT", help="A DDP script, unchanged")],
    arguments: Annotated[list[str] | None, typer.Argument(metavar="[ARGS]...", help="Its arguments")] = None,
    method: o.Method = "terngrad",
    exchange: o.ExchangeOptions,
    seed: o.Seed = 0,
    lab: o.Lab = None,
    membership: o.JoinOptions,
    torchrun: o.TorchrunOptions,
    standalone: Annotated[bool, typer.Option("--standalone", help="One machine", rich_help_panel=o.RENDEZVOUS)] = False,
    debug: o.Debug = False,
) -> None:
    """Run your own, unchanged DDP script under torchrun, with the method on every DDP module it builds.

    With --lab, on every host of an emulated cluster. With --join it runs one worker of a training whose workers come
    and go: a script that calls gw.join() without an address, and makes its own link. It is started again when it fails,
    --max-restarts times in a row (3).

    Example: [cyan]gradwire run --nproc-per-node 4 --method terngrad train.py --epochs 3[/cyan]
    """
    with handled(debug):
        if membership.join is not None:
            allowed = {"join", "secret_file", "script", "arguments", "max_restarts", "debug"}
            o.refuse_beside(context, "--join", allowed, "runs a script that makes its own link")
            told = (script, arguments or [], torchrun.max_restarts)
            raise typer.Exit(join_commands.run(membership.join, membership.secret_file, *told))
        import gradwire as gw
        from gradwire.tools.cli.torchrun import command, replace_process, run_on_lab
        from gradwire.tools.experiments.config import LinkSettings

        settings = LinkSettings(method=repr(gw.method(method)), seed=seed, **exchange.settings())
        gw.check_options(settings.method, **settings.link_options())
        if lab is not None:
            run_on_lab(lab, settings, torchrun.flags(), standalone, script, arguments or [])
            return
        words = command(torchrun.flags(), standalone, script, arguments or [])
        if debug:
            words[2] = "torch.distributed.run"
        replace_process(settings, words)


@app.command()
def methods(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="One method, in full")] = None,
    everything: Annotated[bool, typer.Option("--all", help="More of each method")] = False,
    as_json: o.AsJson = False,
    debug: o.Debug = False,
) -> None:
    """List the methods by family, or show one.

    Example: [cyan]gradwire methods terngrad[/cyan]
    """
    with handled(debug):
        from gradwire.tools.cli.methods_command import method_rows, print_methods
        from gradwire.tools.cli.show import print_json

        rows = method_rows([name] if name else [])
        print_json(rows) if as_json else print_methods(rows, in_full=everything)


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders, or a comparison's folder")],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="The page")] = Path("report.html"),
    as_json: o.AsJson = False,
    debug: o.Debug = False,
) -> None:
    """Write one self-contained HTML page about runs: table, plots, and whether compression paid.

    Example: [cyan]gradwire report runs/digits-compare-* -o report.html[/cyan]
    """
    with handled(debug):
        from gradwire.tools.cli.show import print_summary
        from gradwire.tools.report import write_report

        write_report(runs, out)
        print_summary(runs, out, as_json=as_json)


@bench.command()
@o.with_records
def step(*, options: o.StepOptions, debug: o.Debug = False) -> None:
    """Measure training steps: models by hosts by bandwidths by exchanges, taking turns within a cell.

    On one machine the workers' passes compete with the exchange for the cores, which a cluster does not do; with
    --compute sleep, DDP gets the same gradients at the times measured for one worker alone.

    Resumes where it was stopped. Fails if the interfaces' bytes differ by more than 5 % from the library's.

    Example: [cyan]sudo env "PATH=$PATH" gradwire bench step --model mlp --hosts 4 --bandwidth 100mbit[/cyan]
    """
    with handled(debug):
        from gradwire.tools.cli import bench_commands

        bench_commands.step(options)


@bench.command()
@o.with_records
def timeline(*, options: o.TimelineOptions, debug: o.Debug = False) -> None:
    """Record what each lane does in a step: encode, wait for its turn, send, decode; and where the link is idle.

    Example: [cyan]sudo env "PATH=$PATH" gradwire bench timeline --method coded --figure coded.png[/cyan]
    """
    with handled(debug):
        from gradwire.tools.cli import bench_commands

        bench_commands.timeline(options)


@bench.command()
def kernels(
    elements: Annotated[int, typer.Option(help="Elements of the large vectors")] = 20_000_000,
    repetitions: Annotated[int, typer.Option(help="Repetitions of each kernel")] = 15,
    backend: Annotated[str, typer.Option(help="auto, cpu, cpu-plain, reference")] = "auto",
    device: Annotated[
        str, typer.Option(metavar="cpu|cuda", help="cuda: compare Triton's kernels with the reference there first")
    ] = "cpu",
    as_json: o.AsJson = False,
    debug: o.Debug = False,
) -> None:
    """Measure the kernels on one thread, or on the GPU, each between two memcpys of the same run.

    Example: [cyan]gradwire bench kernels --json > kernels.json[/cyan]
    """
    with handled(debug):
        from gradwire.tools.cli import bench_commands

        bench_commands.kernels(elements, repetitions, backend, device, as_json=as_json)
