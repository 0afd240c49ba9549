"""`paellapy tune`: chooses batch sizes and placement of models together, by simulated runs."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from paellapy.cli_simulate import batch_sizes


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
    from paellapy.output_path import check_output
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
