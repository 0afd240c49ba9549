"""Commands that run a script (`paellapy run`, `paellapy trace`) or show a trace of one (`paellapy view`)."""

from __future__ import annotations

import gc
import json
import os
import runpy
import sys
import traceback
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from paellapy.instrument.errors import PaellaError, TraceError

if TYPE_CHECKING:
    from paellapy.instrument.traces.trace import Trace

_INTERRUPTED = 130  # exit code that shells expect after Ctrl-C
_WHAT_REPORTS = (
    "traced are kernels made by pp.kernel, on the device given by --device, and on a GPU also Triton kernels that the "
    "script's own process compiles"
)


class RunError(PaellaError):
    """`paellapy run` was given a script or an option that it cannot use."""


class OutputError(PaellaError):
    """A command cannot write its output to `path`."""

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(f"{path} {why}")
        self.path = path


def check_output(path: Path) -> None:
    """Raises OutputError unless a file can be written there. Commands check before they do the work."""
    folder = path.parent
    if path.is_dir():
        raise OutputError(path, "is a folder: give the name of a file in it")
    if not folder.is_dir():
        raise OutputError(path, f"cannot be written: the folder {folder} does not exist; create it or choose another")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise OutputError(path, "cannot be written: permission denied; choose another folder")


def check_picture(path: Path, what: str) -> None:
    """The same for a picture, which also needs matplotlib and a supported file name extension."""
    from paellapy.viz.palette import need

    check_output(path)
    endings = need("matplotlib.backend_bases", what).FigureCanvasBase.get_supported_filetypes()
    if path.suffix[1:].lower() not in endings:
        raise OutputError(path, f"cannot hold a picture: give a name that ends in .{', .'.join(sorted(endings))}")


def run(
    context: typer.Context,
    script: Annotated[str, typer.Argument(help="Python script to run; it gets the arguments that follow")],
    best_effort: Annotated[
        bool, typer.Option("--best-effort", help="required: launches and copies wait while the engine needs the GPU")
    ] = False,
    share: Annotated[float, typer.Option(help="part of the time in which it may launch, from 0.01 to 1")] = 1.0,
    priority: Annotated[int, typer.Option(help="priority of the script: it waits for jobs of higher priority")] = -1,
    engine: Annotated[
        str | None, typer.Option(help="process id or socket of the engine  [dim](this user's newest)[/dim]")
    ] = None,
    in_flight: Annotated[
        int, typer.Option(help="queued kernels after which it waits for the GPU; 0: no limit")
    ] = 0,
    name: Annotated[str | None, typer.Option(help="name of the script in the engine  [dim](file name)[/dim]")] = None,
) -> None:
    """Run a script beside an engine that holds its GPU work back while requests need the GPU.

    The script needs no change. If the engine ends, the script continues without it.
    """
    from paellapy.cli.guest import Guest
    from paellapy.instrument.device.launch_hook import LEAST_SHARE

    if not best_effort:
        said = "`paellapy run` needs --best-effort: write `paellapy run --best-effort script.py`"
        raise RunError(said, field="best_effort")
    if not LEAST_SHARE <= share <= 1:
        said = f"--share is {share}: give a part of the time, from {LEAST_SHARE} to 1"
        raise RunError(said, field="share", given=share)
    if in_flight < 0:
        raise RunError(f"--in-flight is {in_flight}: give a number of kernels, or 0 for no limit", field="in_flight")
    path = Path(script)
    if not path.is_file():
        raise RunError(f"there is no script {script}: check its path", field="script", given=script)
    _warn_of_own_options(context)
    Guest(name or path.stem, priority, share, engine, in_flight).join()
    gc.collect()
    gc.freeze()  # the collector need not search the modules imported for the gate
    sys.argv = [script, *context.args]
    sys.path[0] = str(path.resolve().parent)
    sys.exit(run_as_main(path.absolute()))


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
    dark: Annotated[bool, typer.Option("--dark", help="dark report  [dim](as the browser asks)[/dim]")] = False,
    explain: Annotated[bool, typer.Option(help="print what limits each kernel, a line each, after the table")] = True,
    as_json: Annotated[
        bool, typer.Option("--json", help="print the table and the limits as the last line of standard output, in JSON")
    ] = False,
) -> None:
    """Run a script and trace every pp.kernel it launches, and on a GPU every Triton kernel, also in replays of CUDA
    graphs. Writes the trace and an HTML report.

    Its exit status is that of the script, or 1 if nothing was recorded.
    """
    check_output(out)
    report = out.with_suffix(".html")
    if report == out:
        raise OutputError(out, "would be overwritten by the report: give the trace a name that ends in .pptrace")
    check_output(report)
    _warn_of_own_options(context)
    trace, exit_code = run_traced(script, context.args, device, records_per_sm)
    console = Console(stderr=True)  # standard output belongs to the script
    if len(trace.blocks):
        trace.save(out)
        console.print(trace.summary())
        if explain:
            console.print(trace.explain().brief(), markup=False, highlight=False, soft_wrap=True)
            trace.save(out)  # now the work of its launches is known
        console.print(f"trace: {out}", highlight=False, soft_wrap=True)
        _write_report(trace, report, script.name, dark, console)
        if as_json:
            limits = json.loads(trace.explain(json=True))
            facts = {"trace": str(out), "summary": asdict(trace.summary()), "limits": limits}
            typer.echo(json.dumps(facts, default=float))
    else:
        # An earlier run's trace is worth more than an empty one, so nothing is written.
        why = f"the script ended with exit code {exit_code}" if exit_code else _WHAT_REPORTS
        console.print(f"nothing was recorded, so no trace is written: {why}", highlight=False, soft_wrap=True)
    if exit_code or not len(trace.blocks):
        raise typer.Exit(exit_code or 1)


def _write_report(trace: Trace, path: Path, title: str, dark: bool, console: Console) -> None:
    from paellapy import viz

    try:
        viz.to_html(trace, path, title, theme="dark" if dark else None)
    except viz.MissingExtraError as error:
        # The trace is saved and can be viewed later.
        console.print(f"no report: {error}", markup=False, highlight=False)
    else:
        console.print(f"report: {path}", highlight=False, soft_wrap=True)


def view(
    file: Annotated[Path, typer.Argument(help="trace file, written by Trace.save or paellapy trace")],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="HTML page to write  [dim](beside the trace)[/dim]")
    ] = None,
    open_: Annotated[bool, typer.Option("--open/--no-open", help="open the page in the browser")] = True,
    dark: Annotated[bool, typer.Option("--dark", help="dark page  [dim](as the browser asks)[/dim]")] = False,
) -> None:
    """Make one HTML page of a trace file, which works offline, and open it."""
    import webbrowser

    from paellapy import viz
    from paellapy.instrument.traces.trace import Trace

    trace = Trace.load(file)
    page = out or file.with_suffix(".html")
    check_output(page)
    viz.to_html(trace, page, file.name, theme="dark" if dark else None)
    typer.echo(page)
    if open_ and not webbrowser.open(page.resolve().as_uri()):
        typer.echo("no browser was found: open the page yourself", err=True)


def _warn_of_own_options(context: typer.Context) -> None:
    """Warns of options behind the script that this command has too: the script gets them, and the command does not."""
    own = {name for parameter in context.command.params for name in parameter.opts}
    for name in dict.fromkeys(each.partition("=")[0] for each in context.args):
        if name.startswith("-") and name in own:
            said = f"warning: {name} stands behind the script, so the script gets it; `paellapy {context.info_name}` "
            typer.echo(f"{said}reads its own options before the script", err=True)


# -- a script as `__main__`


def run_traced(
    script: Path, arguments: Sequence[str] = (), device: str | None = None, records_per_sm: int = 1 << 14
) -> tuple[Trace, int]:
    """Runs a script as `__main__` inside `trace()`. Returns the trace, and the exit code of `python script.py`."""
    from paellapy.instrument.device import CudaDevice, Device
    from paellapy.instrument.kernels.torch_hook import instrument_torch
    from paellapy.instrument.traces.session import trace

    if not script.is_file():
        raise TraceError(f"there is no script {script}: check its path", field="script", given=script)
    before = sys.argv, sys.path[:]
    sys.argv, sys.path[:] = [str(script), *arguments], [str(script.resolve().parent), *sys.path]
    try:
        with Device.open(device) if device else nullcontext():
            if isinstance(Device.current(), CudaDevice):
                instrument_torch()
            with trace(records_per_sm) as t:
                exit_code = run_as_main(script)
    finally:
        instrument_torch(False)
        sys.argv, sys.path[:] = before
    return t, exit_code


def run_as_main(script: Path) -> int:
    """Runs a script as `python script.py` would, and returns the exit code. Prints its exceptions as Python does."""
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as leaving:
        if leaving.code is None or isinstance(leaving.code, int):
            return leaving.code or 0
        print(leaving.code, file=sys.stderr)
        return 1
    except BaseException as error:
        traceback.print_exception(error.with_traceback(_from_script(error.__traceback__, script)))
        return _INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1
    return 0


def _from_script(frames: TracebackType | None, script: Path) -> TracebackType | None:
    """The traceback without the frames that led into the script; empty for a script that does not compile."""
    while frames is not None and frames.tb_frame.f_code.co_filename != str(script):
        frames = frames.tb_next
    return frames
