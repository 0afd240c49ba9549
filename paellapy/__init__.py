"""See which block of which kernel ran on which SM. Decide which work enters the GPU next.

    import paellapy as pp

    @pp.kernel
    @triton.jit
    def add(x, y, out, n, B: tl.constexpr): ...

    with pp.trace() as t:
        add[(grid,)](x, y, out, n, B=1024)
    print(t.summary())
"""

from __future__ import annotations

import lazy_loader as _lazy_loader

from paellapy.instrument.env import ask_for_all_queues as _ask_for_all_queues
from paellapy.instrument.kernels.driver_search import prepare_search as _prepare_search

_ask_for_all_queues()
_prepare_search()

# `__init__.pyi` maps each public name to its module. A module is imported when one of its names is first used, so that
# `import paellapy` is quick and a script pays for Triton, Numba or the server only if it uses them.
__getattr__, __dir__, __all__ = _lazy_loader.attach_stub(__name__, __file__)
