"""PyTorch on the virtual GPU: the CPU computes, and every operation takes an estimated number of SMs and time.

An operation counts as one kernel. Its bytes and multiplications are counted exactly; the tiling that a library would
choose and the waiting time of its blocks are rough estimates. For reliable times, use a `ModelProfile` of the model
loaded on a real GPU; the estimates let a model be tested, scheduled and served without one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from paellapy.instrument.device.base import Device
from paellapy.instrument.gpu_model.costs import BlockCost
from paellapy.scheduler.models.capture import Counting, Recording
from paellapy.scheduler.models.program import Node
from paellapy.scheduler.models.sync_guard import Waits
from paellapy.scheduler.models.torch_state import watching
from paellapy.scheduler.models.torch_tensors import schema_of, tensors_in

TILE = 64 * 64  # outputs of one block of a matrix product
STRIP = 1024  # elements of one block of any other operation
BLOCK_WAIT_NS = 1500.0  # a load, arithmetic, a store: about the time of such blocks in the calibrated profile
STEP_WAIT_NS = 40.0  # per 32 elements of a matrix product's depth, for each block


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation, represented as one kernel."""

    node: Node
    cost: BlockCost


def count_operations(torch: Any, run: Callable[[], Any], memory: Iterable[int]) -> list[Operation]:
    """Runs a function on the CPU and lists the operations that a GPU would launch; raises if it would wait.

    `memory` has the addresses of the model's inputs and weights.
    """
    from torch.utils.flop_counter import flop_registry

    found: list[Operation] = []
    waits = Waits(torch, memory)

    def see(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        waits.before(func, args, kwargs)
        out = func(*args, **kwargs)
        waits.after(args, kwargs, out)
        if not _only_a_view(func):
            formula = flop_registry.get(func.overloadpacket)
            flops = float(formula(*args, **kwargs, out_val=out)) if formula is not None else 0.0
            operation = _operation(torch, str(func), args, kwargs, out, flops)
            if operation is not None:
                found.append(operation)
        return out

    with watching(see), waits.refusing_copies():
        run()
    return found


def _only_a_view(func: Any) -> bool:
    returns = schema_of(func).returns
    return any(r.alias_info is not None and not r.alias_info.is_write for r in returns) or not returns


def _operation(torch: Any, name: str, args: Any, kwargs: Any, out: Any, flops: float) -> Operation | None:
    tensors, results = list(tensors_in(torch, (args, kwargs))), list(tensors_in(torch, out))
    written = sum(t.numel() for t in results)
    if not written or name.startswith("aten.empty"):
        return None
    nbytes = float(sum(t.numel() * t.element_size() for t in [*tensors, *results]))
    largest = max(results, key=lambda t: t.numel())
    if flops:
        blocks = max(1, math.ceil(written / TILE))
        depth = flops / (2.0 * written)
        half = largest.dtype in (torch.float16, torch.bfloat16)
        cost = BlockCost(
            bytes=nbytes / blocks,
            tensor_flops=flops * (1.0 if half else 2.0) / blocks,  # fp32 counts as tf32
            wait_ns=BLOCK_WAIT_NS + STEP_WAIT_NS * depth / 32,
        )
        return Operation(Node("kernel", name, blocks, 128, 128, 48 * 1024), cost)
    blocks = max(1, math.ceil(written / STRIP))
    cost = BlockCost(bytes=nbytes / blocks, flops=2.0 * written / blocks, wait_ns=BLOCK_WAIT_NS)
    return Operation(Node("kernel", name, blocks, 128, 32, 0), cost)


def record_or_run(operations: Callable[[], list[Operation]], run: Callable[[], None]) -> None:
    """On the virtual GPU: adds operations to the current recording, whose data `run` computes; computes now if there is
    none.
    """
    capture = Device.current().capture
    if isinstance(capture, Recording):
        capture.compute([(each.node, each.cost) for each in operations()], run)
        return
    if isinstance(capture, Counting):
        capture.launches += 1
        if not capture.computes:
            return
    run()
