"""`paellapy simulate` compares policies on one workload; `paellapy tune` chooses batch sizes and GPUs for models."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import track

from paellapy.cli.scripts import OutputError, check_output, check_picture
from paellapy.instrument.errors import ArgumentError


def simulate(
    models: Annotated[str, typer.Argument(help="mix (eight CNNs), demo, or a JSON file of profiles")] = "mix",
    policy: Annotated[
        list[str] | None,
        typer.Option("--policy", "-p", help='name or "module:function"; may be repeated  [dim](streams, paella)[/dim]'),
    ] = None,
    chats: Annotated[
        list[str] | None,
        typer.Option(
            help='a language model (0.6B, 1B, 8B) and its texts, such as "8B rate=4 prompt=500 answer=100 tbt_ms=20" '
            'or "8B trace=chats.csv"; may be repeated'
        ),
    ] = None,
    rate: Annotated[float, typer.Option(help="requests per second of all models together")] = 4000.0,
    arrivals: Annotated[str, typer.Option(help="poisson, lognormal, or a CSV file (t in s, model)")] = "lognormal",
    sigma: Annotated[float, typer.Option(help="spread of lognormal gaps; larger values give heavier bursts")] = 1.5,
    seconds: Annotated[float, typer.Option(help="length of the workload in simulated seconds")] = 1.0,
    batch: Annotated[
        str | None,
        typer.Option(help="batch sizes, such as 1,2,4; mix allows 1,2,4,8,16,32  [dim](1)[/dim]"),
    ] = None,
    device: Annotated[str, typer.Option(help="virtual GPU to simulate")] = "virtual:h200",
    fidelity: Annotated[str, typer.Option(help="segments (fast), or blocks (places every block)")] = "segments",
    admission: Annotated[bool, typer.Option(help="refuse requests that would be late, as a server does")] = False,
    sm_partitions: Annotated[
        int, typer.Option(help="SM partitions, for policies with `place` and profiles with a measured demand; 0: none")
    ] = 0,
    seed: Annotated[int, typer.Option(help="random seed of the arrivals")] = 0,
    plot: Annotated[
        Path | None, typer.Option(help="picture file (.png, .svg, .pdf): latencies under every policy")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="file (.csv, .json) for the figures of every policy")] = None,
) -> None:
    """Compare scheduling policies on simulated requests, without a GPU: latency, slowdown, targets, throughput."""
    from paellapy.scheduler.policies.policy import find_policy
    from paellapy.simulation import arrivals as workload_of
    from paellapy.simulation import caveat, chats_of, named_models
    from paellapy.simulation import simulate as run

    console = Console()
    if plot is not None:
        check_picture(plot, "a plot")
    if out is not None:
        check_output(out)
        if out.suffix not in (".csv", ".json"):
            raise OutputError(out, "cannot hold figures: give a name that ends in .csv or .json")
    policies = [find_policy(name) for name in policy or ["streams", "paella"]]
    with console.status("profiles"):
        profiles, shares = named_models(models, batch_sizes(batch), device)
    workload, simulated = workload_of(arrivals, rate, shares, seconds, sigma), list[Any](profiles)
    for text in chats or ():
        language, load = chats_of(text, seconds)
        simulated.append(language)
        workload += load
    about = caveat(models, device)
    options: dict[str, Any] = {"fidelity": fidelity, "seed": seed, "admission": admission}
    options["sm_partitions"] = sm_partitions
    results = []
    # Without a terminal, rich would print an empty line in place of the bar.
    for each in track(policies, "simulating", console=console, transient=True, disable=not console.is_interactive):
        results.append(run(simulated, workload, each, device, **options))
    compared = results[0].compare(*results[1:])
    for result in results:
        console.print(result)
    if len(results) > 1:
        console.print(compared)
    if about is not None:
        console.print(about, highlight=False, soft_wrap=True)
    if admission and not results[0].has_limits:
        console.print("--admission has no effect: no model has a target and no request has a deadline", highlight=False)
    if plot is not None:
        shown = compared if len(results) > 1 else results[0]
        shown.plot().figure.savefig(plot, dpi=150)
        console.print(f"plot: {plot}", highlight=False, soft_wrap=True)
    if out is not None:
        compared.to_csv(out) if out.suffix == ".csv" else compared.to_json(out)
        console.print(f"written: {out}", highlight=False, soft_wrap=True)


def batch_sizes(batch: str | None) -> list[int] | None:
    """The sizes in the text of `--batch`."""
    try:
        return None if batch is None else [int(size) for size in batch.split(",")]
    except ValueError:
        said = f"--batch is {batch!r}: give whole numbers, as in 1,2,4,8"
        raise ArgumentError(said, field="batch", given=batch) from None


def tune(
    models: Annotated[str, typer.Argument(help="mix (eight CNNs measured on an H200), demo, or a JSON file")] = "mix",
    rate: Annotated[float, typer.Option(help="requests per second of all models together")] = 8000.0,
    gpus: Annotated[int, typer.Option(help="number of GPUs to spread the models over")] = 1,
    batch: Annotated[
        str | None, typer.Option(help="batch sizes to choose from; a JSON file has its own  [dim](1,2,4,8,16)[/dim]")
    ] = None,
    policy: Annotated[str, typer.Option("--policy", "-p", help='"hrrn", … or "package.module:function"')] = "hrrn",
    seconds: Annotated[float, typer.Option(help="length of each simulation in simulated seconds")] = 0.5,
    seed: Annotated[int, typer.Option(help="random seed of the arrivals")] = 0,
    out: Annotated[Path | None, typer.Option(help="JSON file to write the result to")] = None,
) -> None:
    """Choose batch sizes and GPUs for models by at most 50 simulations, without a GPU."""
    from paellapy.scheduler.policies.policy import find_policy
    from paellapy.scheduler.sim.tune import tune as search
    from paellapy.simulation import named_models

    console = Console()
    if out is not None:
        check_output(out)
    sizes = batch_sizes(batch)
    if sizes is None and not Path(models).is_file():
        sizes = [1, 2, 4, 8, 16]
    chosen = find_policy(policy)
    with console.status("profiles"):
        profiles, shares = named_models(models, sizes, "virtual:h200")
    total = sum(shares.values())
    rates = {name: rate * share / total for name, share in shares.items()}
    with console.status("simulating"):
        found = search(profiles, rates, gpus, policy=chosen, seconds=seconds, seed=seed)
    console.print(found)
    if out is not None:
        facts = {name: asdict(each) for name, each in found.choices.items()}
        written = {"choices": facts, "cost": found.cost, "first_cost": found.first_cost}
        out.write_text(json.dumps(written, indent=1) + "\n")
        console.print(f"written: {out}", highlight=False, soft_wrap=True)
