"""The commands; each parses its options and makes one call."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from gradwire.tools.cli import options as o
from gradwire.tools.cli.app_bench import bench
from gradwire.tools.cli.app_lab import lab
from gradwire.tools.cli.app_plan import plan
from gradwire.tools.cli.show import handled

app = typer.Typer(
    name="gradwire",
    help="Data-parallel training over slow links: gradients packed to a few bits per element, for real.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)

app.command()(plan)
app.command()(lab)
app.add_typer(bench, name="bench")

Method = Annotated[str, typer.Option("--method", "-m", metavar="SPEC", help=o.METHOD_HELP)]
TaskMethod = Annotated[
    str | None,
    typer.Option("--method", "-m", metavar="SPEC", help=o.METHOD_HELP, show_default="terngrad; for graph fp32"),
]
Methods = Annotated[
    list[str] | None, typer.Option("--method", "-m", metavar="SPEC", help=f"{o.METHOD_HELP}. Repeatable")
]


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


def _plan(task: str, method: str | None, settings: dict[str, Any], **fields: Any) -> Any:
    from gradwire.tools.experiments.config import RunConfig
    from gradwire.tools.experiments.tasks import build

    built, exclude = build(task, **settings), tuple(fields.pop("exclude") or ())
    return RunConfig(task=built, method=method or built.usual_method, exclude=exclude, **fields)


@app.command()
def train(
    context: typer.Context,
    task: o.TaskName = "digits",
    method: TaskMethod = None,
    workers: o.Workers = 4,
    simulate: o.Simulate = False,
    lab: o.Lab = None,
    data: o.Data = None,
    steps: o.Steps = None,
    batch: o.Batch = None,
    lr: o.LearningRate = None,
    optimizer: o.Optimizer = None,
    momentum: o.Momentum = None,
    schedule: o.Schedule = None,
    weight_decay: o.WeightDecay = None,
    seed: o.Seed = 0,
    eval_every: o.EvalEvery = None,
    ema: o.Ema = None,
    l2: o.L2 = None,
    l1: o.L1 = None,
    split: o.Split = None,
    model: o.Model = None,
    crop: o.Crop = None,
    graph: o.GraphName = None,
    layers: o.Layers = None,
    partition: o.PartitionRule = None,
    halo: o.HaloSpec = None,
    threads: o.Threads = 1,
    exclude: o.Exclude = None,
    min_numel: o.MinNumel = None,
    warmup_steps: o.WarmupSteps = 0,
    collective: o.Collective = "auto",
    fallback: o.Fallback = None,
    fallback_limit: o.FallbackLimit = None,
    check_every: o.CheckEvery = None,
    out: o.Out = None,
    overwrite: o.Overwrite = False,
    resume: Annotated[Path | None, typer.Option(metavar="RUN", help="Continue this run; all else is as it was")] = None,
    checkpoint_every: Annotated[
        int, typer.Option(help="Steps between checkpoints; 0: by time, and at the end", rich_help_panel=o.OUTPUT)
    ] = 0,
    checkpoint_minutes: Annotated[
        float, typer.Option(help="Minutes of training between checkpoints; 0: none by time", rich_help_panel=o.OUTPUT)
    ] = 10.0,
    stop_after: Annotated[
        int | None, typer.Option(help="Stop after this step, to be resumed", rich_help_panel=o.OUTPUT)
    ] = None,
    log_every: o.LogEvery = 10,
    as_json: o.AsJson = False,
    debug: o.Debug = False,
) -> None:
    """Train a built-in task data-parallel, on local workers, simulated ones, or those that torchrun started.

    With --lab the workers run on the hosts of an emulated cluster.

    Example: [cyan]gradwire train digits --method terngrad --workers 4[/cyan]
    """
    with handled(debug):
        from gradwire.tools.cli import commands

        if resume is not None:
            o.refuse_beside(context, "--resume", {"resume", "stop_after", "as_json", "debug"})
            commands.resume(resume, stop_after=stop_after, as_json=as_json, debug=debug)
            return
        settings = {"data": data, "steps": steps, "batch": batch, "lr": lr, "optimizer": optimizer}
        settings |= {"momentum": momentum, "eval_every": eval_every, "ema": ema, "l2": l2, "l1": l1, "split": split}
        settings |= {"model": model, "crop": crop, "schedule": schedule, "weight_decay": weight_decay}
        settings |= {"graph": graph, "layers": layers, "partition": partition, "halo": halo}
        plan = _plan(
            task,
            method,
            settings,
            workers=workers,
            simulate=simulate,
            lab=lab,
            seed=seed,
            exclude=exclude,
            min_numel=min_numel,
            warmup_steps=warmup_steps,
            collective=collective,
            fallback=fallback,
            fallback_limit=fallback_limit,
            check_every=check_every,
            threads=threads,
            checkpoint_every=checkpoint_every,
            checkpoint_minutes=checkpoint_minutes,
            log_every=log_every,
        )
        commands.train(plan, out, overwrite=overwrite, stop_after=stop_after, as_json=as_json, debug=debug)


@app.command()
def compare(
    task: o.TaskName = "digits",
    method: Methods = None,
    workers: o.Workers = 4,
    simulate: o.Simulate = False,
    lab: o.Lab = None,
    data: o.Data = None,
    steps: o.Steps = None,
    batch: o.Batch = None,
    lr: o.LearningRate = None,
    optimizer: o.Optimizer = None,
    momentum: o.Momentum = None,
    schedule: o.Schedule = None,
    weight_decay: o.WeightDecay = None,
    seed: o.Seed = 0,
    eval_every: o.EvalEvery = None,
    ema: o.Ema = None,
    l2: o.L2 = None,
    l1: o.L1 = None,
    split: o.Split = None,
    model: o.Model = None,
    crop: o.Crop = None,
    graph: o.GraphName = None,
    layers: o.Layers = None,
    partition: o.PartitionRule = None,
    halo: o.HaloSpec = None,
    threads: o.Threads = 1,
    exclude: o.Exclude = None,
    min_numel: o.MinNumel = None,
    warmup_steps: o.WarmupSteps = 0,
    collective: o.Collective = "auto",
    fallback: o.Fallback = None,
    fallback_limit: o.FallbackLimit = None,
    check_every: o.CheckEvery = None,
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

        settings = {"data": data, "steps": steps, "batch": batch, "lr": lr, "optimizer": optimizer}
        settings |= {"momentum": momentum, "eval_every": eval_every, "ema": ema, "l2": l2, "l1": l1, "split": split}
        settings |= {"model": model, "crop": crop, "schedule": schedule, "weight_decay": weight_decay}
        settings |= {"graph": graph, "layers": layers, "partition": partition, "halo": halo}
        plan = _plan(
            task,
            "fp32",
            settings,
            workers=workers,
            simulate=simulate,
            lab=lab,
            seed=seed,
            exclude=exclude,
            min_numel=min_numel,
            warmup_steps=warmup_steps,
            collective=collective,
            fallback=fallback,
            fallback_limit=fallback_limit,
            check_every=check_every,
            threads=threads,
            log_every=log_every,
        )
        chosen = method or ["fp32", "terngrad"]
        commands.compare(plan, chosen, out, overwrite=overwrite, as_json=as_json, debug=debug)


RENDEZVOUS = "torchrun"


@app.command(context_settings={"allow_interspersed_args": False})
def run(
    script: Annotated[Path, typer.Argument(metavar="SCRIPT", help="A DDP script, unchanged")],
    arguments: Annotated[list[str] | None, typer.Argument(metavar="[ARGS]...", help="Its arguments")] = None,
    method: Method = "terngrad",
    exclude: o.Exclude = None,
    min_numel: o.MinNumel = None,
    warmup_steps: o.WarmupSteps = 0,
    collective: o.Collective = "auto",
    fallback: o.Fallback = None,
    fallback_limit: o.FallbackLimit = None,
    check_every: o.CheckEvery = None,
    seed: o.Seed = 0,
    lab: o.Lab = None,
    nproc_per_node: Annotated[
        str | None,
        typer.Option("--nproc-per-node", "--nproc_per_node", help="Workers", rich_help_panel=RENDEZVOUS),
    ] = None,
    nnodes: Annotated[str | None, typer.Option("--nnodes", help="Machines", rich_help_panel=RENDEZVOUS)] = None,
    node_rank: Annotated[
        str | None,
        typer.Option("--node-rank", "--node_rank", help="Of this machine", rich_help_panel=RENDEZVOUS),
    ] = None,
    master_addr: Annotated[
        str | None,
        typer.Option("--master-addr", "--master_addr", help="Of machine 0", rich_help_panel=RENDEZVOUS),
    ] = None,
    master_port: Annotated[
        str | None,
        typer.Option("--master-port", "--master_port", help="Of machine 0", rich_help_panel=RENDEZVOUS),
    ] = None,
    rdzv_backend: Annotated[
        str | None,
        typer.Option("--rdzv-backend", "--rdzv_backend", help="Such as c10d", rich_help_panel=RENDEZVOUS),
    ] = None,
    rdzv_endpoint: Annotated[
        str | None,
        typer.Option("--rdzv-endpoint", "--rdzv_endpoint", help="HOST:PORT", rich_help_panel=RENDEZVOUS),
    ] = None,
    rdzv_id: Annotated[
        str | None, typer.Option("--rdzv-id", "--rdzv_id", help="Name of the job", rich_help_panel=RENDEZVOUS)
    ] = None,
    max_restarts: Annotated[
        str | None,
        typer.Option("--max-restarts", "--max_restarts", help="Of the workers", rich_help_panel=RENDEZVOUS),
    ] = None,
    log_dir: Annotated[
        str | None,
        typer.Option("--log-dir", "--log_dir", help="For the workers' output", rich_help_panel=RENDEZVOUS),
    ] = None,
    standalone: Annotated[bool, typer.Option("--standalone", help="One machine", rich_help_panel=RENDEZVOUS)] = False,
    debug: o.Debug = False,
) -> None:
    """Run your own, unchanged DDP script under torchrun, with the method on every DDP module it builds.

    With --lab, on every host of an emulated cluster.

    Example: [cyan]gradwire run --nproc-per-node 4 --method terngrad train.py --epochs 3[/cyan]
    """
    with handled(debug):
        import gradwire as gw
        from gradwire.tools.cli.app_lab import run_on_lab
        from gradwire.tools.cli.torchrun import command, replace_process
        from gradwire.tools.experiments.config import LinkSettings

        flags = {"nproc-per-node": nproc_per_node, "nnodes": nnodes, "node-rank": node_rank}
        flags |= {"master-addr": master_addr, "master-port": master_port, "max-restarts": max_restarts}
        flags |= {
            "rdzv-backend": rdzv_backend,
            "rdzv-endpoint": rdzv_endpoint,
            "rdzv-id": rdzv_id,
            "log-dir": log_dir,
        }
        settings = LinkSettings(
            method=repr(gw.method(method)),
            exclude=tuple(exclude or ()),
            min_numel=min_numel,
            warmup_steps=warmup_steps,
            collective=collective,
            fallback=fallback,
            fallback_limit=fallback_limit,
            check_every=check_every,
            seed=seed,
        )
        gw.check_options(settings.method, **settings.link_options())
        if lab is not None:
            run_on_lab(lab, settings, flags, standalone, script, arguments or [])
            return
        words = command(flags, standalone, script, arguments or [])
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
        from gradwire.tools.cli.show import method_rows, print_json, print_methods

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
        from gradwire.tools.cli import commands

        commands.report(runs, out, as_json=as_json)
