"""Requests whose completions a test sees itself."""

from __future__ import annotations

import asyncio

from paellapy.scheduler.engine.callbacks import CallbackClient
from paellapy.scheduler.engine.client import pieces_of, submit_one
from paellapy.scheduler.engine.ring_client import Pending


class Told(Pending):
    """A request that calls a function with its completion."""

    def __init__(self, loaded, then) -> None:
        super().__init__(loaded)
        self.then = then

    def finish(self, entry) -> None:
        self.then(entry)

    def fail(self, error) -> None:
        self.then(error)


def post(engine, name, inputs, then) -> Told:
    """Submits a request; `then` is called with its completion by whoever reads that."""
    client, loaded = engine.client, engine.client.find(name)
    told = Told(loaded, then)
    submit_one(client.core.ring, told, pieces_of(inputs.values()), client.terms(loaded, None, None, None))
    return told


class Asked:
    """Who submits through a `CallbackClient`, and awaits the outputs in `answer`."""

    def __init__(self) -> None:
        self.answer = asyncio.get_running_loop().create_future()

    def done_in(self, instance, slot) -> None:
        self.done({key: array[slot : slot + 1] for key, array in instance.outputs.items()})

    def done(self, outputs) -> None:
        if not self.answer.done():
            self.answer.set_result({key: array.copy() for key, array in outputs.items()})

    def failed(self, error: Exception) -> None:
        self.answer.set_exception(error)


async def ask_items(engine, name, x):
    """The outputs of a request of several items, which are one batch on an idle engine."""
    asked = Asked()
    CallbackClient(engine.client).submit(name, {"x": x}, len(x), None, None, None, asked)
    return await asyncio.wait_for(asked.answer, 60)
