"""How segments fare beside the two hogs that measure a segment's use of the GPU (`cuda_hogs.py`).

    python benchmarks/hog_strength.py [--out DIR]

The models are bound by the tensor units (a kernel of ours, and cuBLAS's, which fills its SMs) and by bandwidth. For
each segment it reports its slowdown beside the tensor-unit hog, the pace left to that hog, and the resulting parts of
the GPU. The first model's part is also known from its arithmetic. CUDA only, 20 seconds.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from bound_models import BLOCKS, STEPS, TILE, TIMES, Bound
from common import need_gpu, save

import paellapy as pp
from paellapy.instrument.device.parts import part
from paellapy.scheduler.backends.cuda import CudaBackend


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
            hog = backend._hogs.tensor
            found |= {"memory hog alone": backend._hogs.part, "tensor hog alone": hog.part, "tensor hog pace": hog.pace}
            stream = backend._streams.to_capture_on(0).handle
            rows = []
            for handle, segment in zip(launches.handles, row.profiles[0].segments, strict=True):
                stretch, pace = hog.look(handle, segment.time_ns, stream)
                rows.append({
                    "us": segment.time_ns / 1e3, "stretch": stretch, "pace": pace, "compute": segment.compute,
                    "memory": segment.memory,
                })  # fmt: skip
            found[name] = rows
            print(name, {k: v for k, v in found.items() if "hog" in k})
            for each in rows:
                print("   ", {key: round(value, 3) for key, value in each.items()}, flush=True)
            if name == "compute_bound":
                flop = 2.0 * STEPS * TIMES * BLOCKS * TILE**3
                per_s = flop / row.profiles[0].whole_ns / 1e3
                found["compute_bound, by its arithmetic"] = per_s / part("h200").fp16_tensor_tflops
            save("hog_strength", found, device, out)
    print(found["compute_bound, by its arithmetic"])


if __name__ == "__main__":
    main()
