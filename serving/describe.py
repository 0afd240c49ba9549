"""What the server reports about itself and its models: metadata, configuration, statistics."""

from __future__ import annotations

from typing import Any

from paellapy.instrument.versions import versions
from paellapy.scheduler.core.manage import weights_state
from paellapy.scheduler.engine.engine import Engine
from paellapy.scheduler.engine.remote import RemoteEngine
from paellapy.scheduler.engine.stats import sizes_state
from paellapy.scheduler.models.model import Model
from paellapy.serving.counters import ModelCounters
from paellapy.serving.datatypes import datatype
from paellapy.serving.protocol import DEFAULT_LEVEL, PRIORITY_LEVELS
from paellapy.serving.registry import VERSION, Catalogue

PLATFORM = "paellapy"
EXTENSIONS = [
    "binary_tensor_data",
    "classification",
    "model_configuration",
    "model_repository",
    "parameters",
    "schedule_policy",
    "statistics",
]


def server_metadata() -> dict[str, Any]:
    return {"name": "paellapy", "version": versions()["paellapy"], "extensions": EXTENSIONS}


def model_metadata(model: Model) -> dict[str, Any]:
    """Metadata of a model. Its shapes have -1 for the batch, as clients expect."""
    return {
        "name": model.name,
        "versions": [VERSION],
        "platform": PLATFORM,
        **{
            key: [
                {"name": name, "datatype": datatype(spec.dtype), "shape": [-1, *spec.shape]}
                for name, spec in specs.items()
            ]
            for key, specs in (("inputs", model.inputs), ("outputs", model.outputs))
        },
    }


def model_config(model: Model, engine: Engine | RemoteEngine) -> dict[str, Any]:
    """A model's configuration in the format that Triton's clients read."""
    tensors = {
        key: [
            {"name": name, "data_type": f"TYPE_{datatype(spec.dtype)}", "dims": list(spec.shape)}
            for name, spec in specs.items()
        ]
        for key, specs in (("input", model.inputs), ("output", model.outputs))
    }
    lanes = engine.stats()["models"].get(model.name, {}).get("lanes", 0)
    own = {"priority": model.priority, "share": model.share, "target_ms": model.target_ms, "policy": engine.policy}
    return {
        "name": model.name,
        "platform": PLATFORM,
        "backend": PLATFORM,
        "version_policy": {"latest": {"num_versions": 1}},
        "max_batch_size": model.max_batch,
        **tensors,
        "instance_group": [{"name": model.name, "kind": "KIND_GPU", "count": lanes}],
        "dynamic_batching": {
            "preferred_batch_size": list(model.batch),
            "max_queue_delay_microseconds": 0,
            "priority_levels": PRIORITY_LEVELS,
            "default_priority_level": DEFAULT_LEVEL,
        },
        "parameters": {key: {"string_value": str(value)} for key, value in own.items() if value is not None},
    }


def model_statistics(name: str, counters: ModelCounters) -> dict[str, Any]:
    """A model's statistics in the format of Triton's extension. Times are sums in nanoseconds."""

    def total(count: int, ns: int) -> dict[str, int]:
        return {"count": count, "ns": ns}

    n, nothing = counters.items, {"count": 0, "ns": 0}
    return {
        "name": name,
        "version": VERSION,
        "last_inference": counters.last_ms,
        "inference_count": n,
        "execution_count": counters.batches,
        "inference_stats": {
            "success": total(counters.answered, counters.answered_ns),
            "fail": total(counters.failed, counters.failed_ns),
            "queue": total(n, counters.queue_ns),
            # Copies to and from the GPU are part of the model's program, and so count in compute_infer.
            "compute_input": total(n, 0),
            "compute_infer": total(n, counters.compute_ns),
            "compute_output": total(n, 0),
            "cache_hit": nothing,
            "cache_miss": nothing,
        },
        "batch_stats": [
            {
                "batch_size": size,
                "compute_input": total(count, 0),
                "compute_infer": total(count, ns),
                "compute_output": total(count, 0),
            }
            for size, (count, ns) in sorted(counters.by_batch.items())
        ],
    }


def repository_index(registry: Catalogue, ready_only: bool) -> list[dict[str, Any]]:
    """All configured models. For loaded ones it says where the weights are (resident, loading 43 %, leaving, host,
    disk), and, if not all batch sizes are captured, which are, which come later, and which failed.
    """
    state = registry.engine.state
    more: dict[str, dict[str, Any]] = {}
    for row, model in registry.by_row.items():
        more[model.name] = {"weights": weights_state(state, row)}
        sizes = sizes_state(state, row)
        if sizes["later"] or sizes["failed"]:
            more[model.name]["batch_sizes"] = sizes
    return [
        {"name": e.name, "version": VERSION, "state": e.state, "reason": e.reason} | more.get(e.name, {})
        for e in registry.entries.values()
        if e.state == "READY" or not ready_only
    ]
