"""Training beside serving: resnet50 at 250 requests per second and training jobs beside it, in one run.

    python benchmarks/background.py                 on a GPU, about eight minutes
    python benchmarks/background.py --device virtual:h200 --small --folder DIR     to try it

Every way to share the GPU is measured in the same run and stored in one file: our policies, stream priorities, streams,
and NVIDIA MPS. For MPS the run starts a daemon of its own and stops it in the end. Every seed has its own arrivals,
which a compiled client sends whether or not earlier requests are answered.

The run has parts, each in a process of its own, so that no other process has work or memory on the GPU meanwhile:

    first   jobs in segments of the default length, and as one graph
    mps     jobs in processes of their own under MPS
    rest    paused jobs, the plain loop, jobs in shorter segments, and losses

Results are written after every point. `--resume` goes on with the points of a run that was stopped; `--part` measures
one part alone.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import mps
from common import RESULTS

PARTS = ("first", "mps", "rest")
MOST_S = {"first": 300.0, "mps": 150.0, "rest": 400.0}  # a part that takes longer is ended, so that the next ones run


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="tiny networks, to try the script")
    parser.add_argument("--seconds", type=float, default=1.0, help="seconds of each point and seed")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--loss-seeds", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=10, help="comparisons of a paused job with none")
    parser.add_argument("--jobs", default="resnet18,transformer")
    parser.add_argument("--ways", default="priority,tally", help="policies that hold a job back; also reef, orion")
    parser.add_argument(
        "--quanta", default="100,50", help="lengths of a job's segments, µs; the first is in part first"
    )
    parser.add_argument("--folder", type=Path, default=RESULTS)
    parser.add_argument("--name", default="background")
    parser.add_argument("--part", choices=PARTS, default=None, help="measure this part alone, and keep stored points")
    parser.add_argument("--resume", action="store_true", help="keep the stored points of a run that was stopped")
    return parser.parse_args()


def run_part(name: str, env: dict[str, str]) -> bool:
    """Measures one part in a new process, with its children in a group of their own; whether it went well."""
    began = time.monotonic()
    print(f"-- {name}", flush=True)
    line = [sys.executable, __file__, *sys.argv[1:], "--part", name]
    process = subprocess.Popen(line, env={**os.environ, **env}, start_new_session=True)
    try:
        status = process.wait(MOST_S[name])
    except subprocess.TimeoutExpired:
        print(f"-- {name}: not done in {MOST_S[name]:.0f} s, ended", flush=True)
        status = 1
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    print(f"-- {name}: status {status}, {time.monotonic() - began:.0f} s", flush=True)
    return status == 0


def under_mps(args: argparse.Namespace) -> bool:
    if args.device.startswith("virtual"):
        print("-- a virtual GPU has no MPS: its part runs without it, to try it", flush=True)
        return run_part("mps", {})
    if not mps.available():
        print(f"-- no rows of MPS: {mps.MISSING}", flush=True)
        return True
    with mps.daemon() as env:
        return run_part("mps", env)


def main() -> None:
    args = arguments()
    if args.part == "mps":
        import background_mps

        background_mps.measure_all(args)
    elif args.part is not None:
        import background_parts

        background_parts.measure_all(args)
    elif args.small and args.folder == RESULTS:
        raise SystemExit("tiny networks would replace the stored results: give a --folder")
    else:
        if not args.resume:
            (args.folder / f"{args.name}.json").unlink(missing_ok=True)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that parts and daemon are ended too
        done = [under_mps(args) if part == "mps" else run_part(part, {}) for part in PARTS]
        if not all(done):
            raise SystemExit("not every part was measured to its end: `--resume` goes on")


if __name__ == "__main__":
    main()
