"""Models for servers in separate processes: a configuration or a command names these functions."""

from __future__ import annotations

import os
import signal
import tempfile
import threading
from pathlib import Path

from encoder_families import encoder
from engine_models import lookup_model, lose_the_gpu_on_faults, scale_model
from serving_server import echo_model
from step_functions import GIVES, TAKES, count, read, say

from paellapy import demo
from paellapy.scheduler.models.model import Model, TensorSpec
from paellapy.serving.tensors import DTYPES

SMALL = ("BOOL", "UINT8", "UINT16", "INT8", "INT16", "FP16", "BF16")


def pair() -> list[Model]:
    """A model that doubles x; and one that returns x after many kernels, one request at a time."""
    return [scale_model(batch=(1, 4)), scale_model("long", factor=1.0, steps=300, batch=(1,), instances=1)]


def losing_the_gpu() -> list[Model]:
    """A model whose fault ends the engine, as on a real GPU."""
    lose_the_gpu_on_faults()
    return [lookup_model(batch=(1, 4)), scale_model(batch=(1,))]


def every_datatype() -> list[Model]:
    return [
        demo.load("mlp", batch=(1, 4)),
        echo_model("small", SMALL, batch=(1, 2)),
        echo_model("large", [name for name in DTYPES if name not in SMALL], batch=(1, 2)),
        scale_model("wide", n=4096, batch=(1, 2)),
    ]


def plain() -> Model:
    return scale_model(batch=(1,))


def spare() -> Model:
    return scale_model("spare", batch=(1,))


def broken() -> Model:
    raise ValueError("its weights are gone")


def crashing() -> Model:
    """Kills its process while a file tells it to."""
    if Path(os.environ["PAELLAPY_TEST_CRASH"]).exists():
        os.kill(os.getpid(), signal.SIGKILL)
    return scale_model(batch=(1,))


def endless() -> None:
    """Loads longer than any first start that compiles."""
    threading.Event().wait()


def words() -> list[Model]:
    """Takes a text of numbers, and says their doubles; and one that gives them as an encoder does."""
    gives = {"embedding": TensorSpec(64), "tokens": "int64"}
    vector = scale_model("vector", batch=(1, 4), before=read, takes=TAKES, after=count, gives=gives)
    vector.task = {"kind": "embedding", "inputs": ["x"], "length": 64, "pad": 0}
    return [scale_model("words", batch=(1, 4), before=read, after=say, takes=TAKES, gives=GIVES), vector]


def encoders() -> list[Model]:
    """An encoder and a reranker with random weights."""
    made = []
    for head, name in (("Model", "embed"), ("ForSequenceClassification", "rank")):
        with tempfile.TemporaryDirectory() as folder:
            encoder("Bert", Path(folder), head, num_labels=1)
            made.append(Model.from_pretrained(folder, name=name, length=(8, 16), batch=(1, 4)))
    return [*made, scale_model(batch=(1, 4))]


def double() -> Model:
    return scale_model("double", batch=(1, 4))


def triple() -> Model:
    return scale_model("triple", factor=3.0, batch=(1, 4))
