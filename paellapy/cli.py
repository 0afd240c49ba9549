"""The command line: `paellapy …`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from paellapy import cli_bench, cli_cluster, cli_scripts, cli_simulate
from paellapy.instrument.errors import PaellaError
from paellapy.instrument.versions import versions

if TYPE_CHECKING:
    from paellapy.instrument.traces.trace import Trace

# Arguments after a script's name belong to the script.
_SCRIPT = {"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False}
app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode="rich")
app.command()(cli_simulate.simulate)
app.command()(cli_simulate.tune)
app.command()(cli_bench.bench)
app.command(context_settings=_SCRIPT)(cli_scripts.run)
app.command()(cli_cluster.plan)
app.add_typer(cli_cluster.app, name="cluster")


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"paellapy {versions()['paellapy']}")
        raise typer.Exit


@app.callback()
def paellapy(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="show the version and exit")
    ] = False,
) -> None:
    """See and control which block of which GPU kernel runs on which SM.

    Trace kernels and view the traces, serve models under a scheduling policy, and compare policies, with or without a
    GPU.
    """


@app.command()
def doctor(
    verbose: Annotated[bool, typer.Option(help="also print the scheduler's tuning values and their sources")] = False,
) -> None:
    """Show which GPU, driver and tools were found, which features work, and what to install for the others."""
    from paellapy import doctor as examination

    console = Console()
    with console.status("looking around…") as status:
        findings = examination.examine(lambda what: status.update(f"trying to {what}…"))
    console.print(examination.report(findings))
    if verbose:
        console.print(examination.tuning_report(examination.tuning_here()))
    console.print(examination.available())
    needed = ("instrument Triton kernels", "run and trace on the virtual GPU")
    if any(f.works is False and f.name in needed for f in findings):
        raise typer.Exit(1)


@app.command()
def serve(
    config: Annotated[
        Path | None, typer.Argument(help="TOML file with settings; options override it  [dim](demo models)[/dim]")
    ] = None,
    host: Annotated[str | None, typer.Option(help="address to listen on  [dim](127.0.0.1)[/dim]")] = None,
    port: Annotated[int | None, typer.Option(help="port to listen on; 0: any free port  [dim](8000)[/dim]")] = None,
    workers: Annotated[
        int | None, typer.Option(help="HTTP processes in front of the engine's; 0: one process in all  [dim](0)[/dim]")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help='device: "auto", "cuda:0", "virtual:h200", …  [dim](auto)[/dim]')
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option(help='policy: "paella", "edf", …, or "package.module:function"  [dim](paella)[/dim]'),
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(help="""model to add: 'package.module:factory{argument="value"}'; may be repeated"""),
    ] = None,
    setting: Annotated[
        list[str] | None,
        typer.Option("--set", "-s", help="override one setting of the file, as in server.grace_s=2; may be repeated"),
    ] = None,
) -> None:
    """Serve models over HTTP (Open Inference Protocol v2). Ctrl-C or SIGTERM finishes requests in flight and stops."""
    from paellapy import cli_serve
    from paellapy.cli_serve import announce_for
    from paellapy.serving.api import serve_config
    from paellapy.serving.config import load_config

    named = {
        "server.host": host, "server.port": port, "server.workers": workers, "device": device, "policy": policy,
    }  # fmt: skip
    overrides = [f"{key}={value}" for key, value in named.items() if value is not None] + (setting or [])
    with_demo = config is None and not model
    loaded, source = load_config(config, overrides, cli_serve.settings() if with_demo else None, model or ())
    announce = announce_for(loaded, source, cli_serve.announce if with_demo else None)
    serve_config(loaded, source, announce=announce)


@app.command()
def reload(config: Annotated[Path, typer.Argument(help="settings file of the running server")]) -> None:
    """Make a running server read its settings, its models' code and its certificates again."""
    from paellapy.serving.config import load_config
    from paellapy.serving.errors import ConfigError
    from paellapy.serving.server import ask_to_reload

    load_config(config)  # a wrong file is reported here, and the server is not disturbed
    told = ask_to_reload(config)
    if "error" in told:
        raise ConfigError(f"the server changed nothing: {told['error']}")
    for what, names in told.items():
        shown = "; ".join(f"{k}: {v}" for k, v in names.items()) if isinstance(names, dict) else names
        typer.echo(f"{what}: {', '.join(shown) if isinstance(shown, list) else shown}")
    if not told:
        typer.echo("nothing has changed")
    if "could not be loaded" in told:
        raise typer.Exit(1)


_WHAT_REPORTS = "only kernels made by pp.kernel are traced, and only on the device given by --device"


@app.command(
    name="trace",
    context_settings=_SCRIPT,
)
def trace_script(
    context: typer.Context,
    script: Annotated[Path, typer.Argument(help="Python script to run; arguments after it are passed to it")],
    out: Annotated[
        Path, typer.Option("--out", "-o", help="trace file to write; the report goes beside it")
    ] = Path("trace.pptrace"),
    device: Annotated[
        str | None, typer.Option(help='device: "cuda:0", "virtual:h200", …  [dim](the GPU if any, else virtual)[/dim]')
    ] = None,
    records_per_sm: Annotated[int, typer.Option(help="most records kept per SM, a power of two")] = 1 << 14,
    dark: Annotated[bool, typer.Option("--dark", help="use dark colours in the report")] = False,
    explain: Annotated[bool, typer.Option(help="print what limits each kernel, a line each, after the table")] = True,
) -> None:
    """Run a script and trace every pp.kernel it launches. Writes the trace and an HTML report."""
    from paellapy.cli_scripts import OutputError, check_output, run_script

    check_output(out)
    report = out.with_suffix(".html")
    if report == out:
        raise OutputError(f"{out} would be overwritten by the report: give the trace a name that ends in .pptrace")
    check_output(report)
    cli_scripts.warn_of_own_options(context)
    ran = run_script(script, context.args, device, records_per_sm)
    console = Console(stderr=True)  # standard output belongs to the script
    if len(ran.trace.blocks):
        ran.trace.save(out)
        console.print(ran.trace.summary())
        if explain:
            console.print(ran.trace.explain().brief(), markup=False, highlight=False, soft_wrap=True)
            ran.trace.save(out)  # now the work of its launches is known
        console.print(f"trace: {out}", highlight=False, soft_wrap=True)
        _write_report(ran.trace, report, script.name, dark, console)
    else:
        # An earlier run's trace is worth more than an empty one, so nothing is written.
        why = f"the script ended with exit code {ran.exit_code}" if ran.exit_code else _WHAT_REPORTS
        console.print(f"nothing was recorded, so no trace is written: {why}", highlight=False, soft_wrap=True)
    if ran.exit_code:
        raise typer.Exit(ran.exit_code)


@app.command()
def view(
    file: Annotated[Path, typer.Argument(help="trace file, written by Trace.save or paellapy trace")],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="HTML page to write  [dim](beside the trace)[/dim]")
    ] = None,
    open_: Annotated[bool, typer.Option("--open/--no-open", help="open the page in the browser")] = True,
    dark: Annotated[bool, typer.Option("--dark", help="use dark colours")] = False,
) -> None:
    """Make one HTML page of a trace file, which works offline, and open it."""
    import webbrowser

    from paellapy import viz
    from paellapy.cli_scripts import check_output
    from paellapy.instrument.traces.trace import Trace

    trace = Trace.load(file)
    page = out or file.with_suffix(".html")
    check_output(page)
    viz.to_html(trace, page, file.name, theme="dark" if dark else "light")
    typer.echo(page)
    if open_ and not webbrowser.open(page.resolve().as_uri()):
        typer.echo("no browser was found: open the page yourself", err=True)


def _write_report(trace: Trace, path: Path, title: str, dark: bool, console: Console) -> None:
    from paellapy import viz

    try:
        viz.to_html(trace, path, title, theme="dark" if dark else "light")
    except viz.MissingExtraError as error:
        # The trace is saved and can be viewed later.
        console.print(f"no report: {error}", markup=False, highlight=False)
    else:
        console.print(f"report: {path}", highlight=False, soft_wrap=True)


@app.command()
def version() -> None:
    """Show the versions of paellapy and of the packages it uses."""
    for name, number in versions().items():
        typer.echo(f"{name} {number}")


def main() -> None:
    """Runs the command line. Errors of paellapy are printed in one line, without a traceback."""
    try:
        app()
    except PaellaError as e:
        typer.secho(f"paellapy: {e}", fg="red", err=True)
        sys.exit(1)
