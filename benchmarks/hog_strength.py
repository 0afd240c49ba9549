"""How segments fare beside the two hogs that measure a segment's use of the GPU (`cuda_hogs.py`).

    python benchmarks/hog_strength.py [--out DIR]

The models are bound by the tensor units (a kernel of ours, and cuBLAS's, which fills its SMs) and by bandwidth. For
each segment and each hog it reports the segment's slowdown, the pace left to the hog, and the resulting part of the
GPU. `compute` and `memory` are the parts that were measured as the model was loaded. A pace of nan: the segment waited
for the hog's end. The parts of two models are also known: from the arithmetic of the one, and from the bytes that the
other moves. CUDA only, 20 seconds.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from bound_models import BLOCKS, COLUMNS, STEPS, TILE, TIMES, Bound
from common import need_gpu, save

import paellapy as pp
from paellapy.instrument.gpu_model.parts import part
from paellapy.scheduler.backends.contention_probe import ROUND_BYTES, Hogs, part_of_bandwidth, part_of_units
from paellapy.scheduler.backends.cuda import CudaBackend


def alone(hogs: Hogs) -> dict[str, float]:
    return {
        "memory hog alone": hogs.memory.part, "memory hog GB/s": hogs.memory.pace * ROUND_BYTES,
        "tensor hog alone": hogs.tensor.part, "tensor hog pace": hogs.tensor.pace,
    }  # fmt: skip


def beside(hogs: Hogs, handle: int, alone_ns: float, stream: int) -> dict[str, float]:
    stretch, pace = hogs.tensor.look(handle, alone_ns, stream)
    found = {"tensor stretch": stretch, "tensor pace": pace, "tensor part": part_of_units(stretch, pace)}
    stretch, pace = hogs.memory.look(handle, alone_ns, stream)
    used = part_of_bandwidth(stretch, pace, hogs.memory.part)
    return found | {"memory stretch": stretch, "memory pace": pace, "memory part": used}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    out = parser.parse_args().out
    device = need_gpu("hogs contend for a GPU")
    found: dict[str, Any] = {}
    with pp.Engine("cuda", segment_shares=True) as engine:
        for name in ("compute_bound", "memory_bound", "full_bound"):
            engine.load(Bound(name).model((1,), 1, 0, "cuda"))
            (row,) = [each for each in engine.loaded_rows().values() if each.model.name == name]
            launches, backend = row.launches[0][-1], engine.backend
            assert isinstance(backend, CudaBackend)
            assert backend._hogs is not None
            hogs = backend._hogs
            found |= alone(hogs)
            stream = backend._streams.to_capture_on(0).handle
            rows = [
                {"us": segment.time_ns / 1e3, "compute": segment.compute, "memory": segment.memory}
                | beside(hogs, handle, segment.time_ns, stream)
                for handle, segment in zip(launches.handles, row.profiles[0].segments, strict=True)
            ]
            found[name] = rows
            print(name, {k: v for k, v in found.items() if "hog" in k})
            for each in rows:
                print("   ", {key: round(value, 3) for key, value in each.items()}, flush=True)
            ns = row.profiles[0].whole_ns
            if name == "compute_bound":
                per_s = 2.0 * STEPS * TIMES * BLOCKS * TILE**3 / ns / 1e3
                found["compute_bound, by its arithmetic"] = per_s / part("h200").fp16_tensor_tflops
            if name == "memory_bound":  # each step, and the sum before the steps, reads and writes 2 bytes per column
                per_ns = (STEPS + 1) * 4.0 * COLUMNS[name] / ns
                found["memory_bound, by its bytes"] = per_ns / part("h200").bandwidth_gbps
            save("hog_strength", found, device, out)
    print({key: round(value, 3) for key, value in found.items() if ", by its" in key})


if __name__ == "__main__":
    main()
