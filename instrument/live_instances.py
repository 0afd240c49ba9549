"""The live objects of a class, found without a list of all objects.

`gc.get_objects` also returns objects that are not finished. CPython cannot finish a tuple that it makes of a generator
while anybody else holds the tuple: the thread that makes it gets a SystemError.
"""

from __future__ import annotations

import gc
from typing import Any


def live_instances(kind: type) -> list[Any]:
    """The objects of this class and of its subclasses, except those that were spared by `gc.freeze`.

    Every object that the collector knows refers to its class, if the class was made in Python.
    """
    kinds, waiting = {kind}, [kind]
    while waiting:
        below: list[type] = type.__subclasses__(waiting.pop())
        waiting += [each for each in below if each not in kinds]
        kinds.update(below)
    # By its type: an object's own __class__ may be a property with side effects.
    return [each for each in gc.get_referrers(*kinds) if issubclass(type(each), kind)]
