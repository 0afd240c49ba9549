"""`paellapy simulate`: policies side by side on one workload, in simulated time."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import track


def simulate(
    models: Annotated[str, typer.Argument(help="mix (eight CNNs, measured on an H200), demo, or a JSON file")] = "mix",
    policy: Annotated[list[str] | None, typer.Option("--policy", "-p", help="may be repeated")] = None,
    rate: Annotated[float, typer.Option(help="requests a second, of all models together")] = 4000.0,
    arrivals: Annotated[str, typer.Option(help="poisson, lognormal, or a CSV file: t, model")] = "lognormal",
    sigma: Annotated[float, typer.Option(help="of lognormal gaps")] = 1.5,
    seconds: Annotated[float, typer.Option(help="simulated")] = 1.0,
    batch: Annotated[str, typer.Option(help="captured batch sizes")] = "1",
    device: Annotated[str, typer.Option(help="a virtual part")] = "virtual:h200",
    fidelity: Annotated[str, typer.Option(help="segments (quick) or blocks (every block placed)")] = "segments",
    admission: Annotated[bool, typer.Option(help="refuse what would miss its deadline or target, as a server")] = False,
    seed: int = 0,
    plot: Annotated[Path | None, typer.Option(help="write the last policy's picture here")] = None,
) -> None:
    """Try scheduling policies without a GPU: what each does to latency, slowdown, targets and throughput."""
    from instrument.errors import ArgumentError
    from paellapy.simulation import arrivals as workload_of
    from paellapy.simulation import named_models
    from paellapy.simulation import simulate as run

    console = Console()
    if fidelity not in ("segments", "blocks"):
        raise ArgumentError(f"fidelity is segments or blocks, not {fidelity!r}")
    try:
        sizes = [int(size) for size in batch.split(",")]
    except ValueError:
        raise ArgumentError(f"batch sizes are numbers, as in 1,2,4,8, not {batch!r}") from None
    with console.status("profiles"):
        profiles, shares = named_models(models, sizes, device)
    workload = workload_of(arrivals, rate, shares, seconds, sigma)
    results = []
    for name in track(policy or ["streams", "paella"], description="simulating", console=console, transient=True):
        results.append(run(profiles, workload, name, device, fidelity=fidelity, seed=seed, admission=admission))
    for result in results:
        console.print(result)
    if plot is not None:
        from paellapy.viz import MissingExtraError

        try:
            results[-1].plot().savefig(plot)
        except ImportError:
            raise MissingExtraError("a plot needs matplotlib: pip install 'paellapy[viz]'") from None
        console.print(f"plot: {plot}")
