"""PyTorch under our captures: on our stream, with memory from a pool that belongs to the instance.

Memory that a captured graph writes to must stay in place, and must not be shared with another instance that may run at
the same time. So every instance has its own pool of PyTorch's allocator; its batch sizes share the pool, since only one
of them runs at a time. cuBLAS keeps a workspace per stream, which is dropped before and after each capture; otherwise
all instances would share one.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import logging
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from paellapy.instrument.device.driver import driver
from paellapy.instrument.errors import PaellaError
from paellapy.scheduler.core.errors import CaptureError

# PyTorch's own captures, begun without a kernel on the stream that is captured.
#
# PyTorch writes the seed and offset of its random generators when a capture begins, by kernels on the stream to be
# captured. A few kernels launched individually on a second stream lengthen the gaps between the kernels of all graphs
# in the process, for good. Whoever replays our graphs writes these words before (`torch_random.py`), so they are left
# alone.


def begin_capture(graph: Any, **options: Any) -> None:
    """`graph.capture_begin`, on the current stream, for the calls of this thread."""
    torch: Any = sys.modules["torch"]
    from torch.utils._python_dispatch import TorchDispatchMode

    class LeaveWords(TorchDispatchMode):  # type: ignore[misc]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return args[0] if func is torch.ops.aten.fill_.Scalar else func(*args, **(kwargs or {}))

    with LeaveWords():
        graph.capture_begin(capture_error_mode="thread_local", **options)


def torch_in_use(wanted: bool) -> bool:
    """Whether a model's function may call PyTorch: it was made from PyTorch, or PyTorch is already in use on the GPU.
    """
    torch: Any = sys.modules.get("torch")
    return wanted or (torch is not None and bool(torch.cuda.is_initialized()) and hasattr(torch.cuda, "MemPool"))


_in_use: list[Any] = []  # pools that a graph holds, or of a lost GPU: PyTorch ends the process when one is deleted
_NO_CONTEXT = (0, 3, 4, 201)  # the driver's status if nothing failed, or if this thread has no context


class TorchPool:
    """One instance's memory in PyTorch's allocator."""

    def __init__(self, index: int) -> None:
        torch: Any = sys.modules["torch"]
        self.index = index
        with torch.cuda.device(index):  # a pool belongs to the device that is current at its creation
            self._pool: Any = torch.cuda.MemPool()
        self._first: Any = None

    @property
    def nbytes(self) -> int:
        """GPU memory that the pool holds.

        Counted among all segments, because the pool's own `snapshot()` releases references that it does not own (to the
        numbers in the pool's id), so that the process would crash after some pools.
        """
        if self._pool is None:
            return 0
        torch: Any = sys.modules["torch"]
        mine = tuple(self._pool.id)
        return sum(int(s["total_size"]) for s in torch.cuda.memory_snapshot() if tuple(s["segment_pool_id"]) == mine)

    def begin(self, graph: Any) -> None:
        """Begins a capture by PyTorch itself, on the current stream, with memory from the pool.

        PyTorch gives up a pool when the last graph that was captured with it is deleted, and captures with it fail from
        then on. So a first small graph is kept.
        """
        if self._first is None:
            torch: Any = sys.modules["torch"]
            first = torch.cuda.CUDAGraph(keep_graph=True)
            self._begin(first)
            torch.zeros(1, device=f"cuda:{self.index}")
            first.capture_end()
            self._first = first
        self._begin(graph)

    def _begin(self, graph: Any) -> None:
        try:
            begin_capture(graph, pool=self._pool.id)
        except RuntimeError:
            self.stop_recording()
            raise

    def stop_recording(self) -> None:
        """Ends the allocator's recording: PyTorch leaves it on after a failed capture, and would abort later."""
        if self._pool is None:
            return
        torch: Any = sys.modules["torch"]
        with contextlib.suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(self.index, self._pool.id)  # noqa: SLF001  PyTorch's own

    @contextlib.contextmanager
    def stream_only(self, stream: int) -> Iterator[None]:
        """Sends PyTorch's calls to the stream; memory comes from the pool through a capture by PyTorch itself."""
        torch: Any = sys.modules["torch"]
        ours = torch.cuda.ExternalStream(stream, self.index)
        with _own_workspaces(torch), torch.cuda.device(self.index), torch.cuda.stream(ours):
            yield

    @contextlib.contextmanager
    def on(self, stream: int | None) -> Iterator[None]:
        """Takes PyTorch's memory in this thread from the pool, and sends its calls to the stream if one is given."""
        torch: Any = sys.modules["torch"]
        cuda, index = torch.cuda, self.index
        chosen = cuda.current_stream(index) if stream is None else cuda.ExternalStream(stream, index)
        with _own_workspaces(torch), cuda.device(index), cuda.stream(chosen), cuda.use_mem_pool(self._pool, index):
            yield

    def keep(self) -> None:
        """Keeps the pool for ever: the GPU is lost, and nothing can be freed on it any more."""
        _in_use.append((self._pool, self._first))
        self._pool = self._first = None

    def free(self) -> None:
        if _is_lost():
            self.keep()
            return
        self._first = None
        pool, self._pool = self._pool, None
        if pool is not None and pool.use_count() > 1:
            gc.collect()  # a graph that the traceback of a failed load still holds
            if pool.use_count() > 1:
                _in_use.append(pool)
        del pool
        torch: Any = sys.modules["torch"]
        torch.cuda.empty_cache()


@contextlib.contextmanager
def _own_workspaces(torch: Any) -> Iterator[None]:
    """Drops the workspaces of cuBLAS before and after."""
    clear = torch._C._cuda_clearCublasWorkspaces  # noqa: SLF001  PyTorch's own
    clear()
    try:
        yield
    finally:
        clear()


def _is_lost() -> bool:
    """Whether a fault has ended the thread's context: then every call of the driver fails with it."""
    with contextlib.suppress(PaellaError):  # no driver
        return int(driver().cuMemGetInfo()[0]) not in _NO_CONTEXT
    return False


# Random numbers in captured graphs: the preparation that PyTorch does before it replays a graph of its own.
#
# Kernels of a captured graph read the generator's seed and offset from two words of GPU memory that belong to the
# generator while a graph is registered with it. Before a step of a background job is replayed, the host writes these
# words, as PyTorch does. The graph of a served model runs without the host, and advances the offset itself.


_GOLDEN = 0x9E3779B97F4A7C15  # multiplier that keeps the seeds of instances far apart
_MARK = 1 << 20  # a distinctive offset by which its word is found

WordsOf = Callable[[Any], list[int]]  # the 8-byte numbers in the launch arguments of a graph's kernels, in order


class _Words:
    """The two words of a generator. A graph with one draw keeps them allocated, and writes them when it is replayed."""

    def __init__(self, torch: Any, index: int, generator: Any) -> None:
        self._torch, self._index, self.generator = torch, index, generator
        self._graph = torch.cuda.CUDAGraph(keep_graph=True)
        self._offset: Any = None
        before = generator.get_state()
        self._graph.register_generator_state(generator)
        with torch.cuda.device(index):
            torch.rand(4, device="cuda", generator=generator)  # lets PyTorch load its kernels outside the capture
            torch.cuda.synchronize(index)
        # Only the capture uses a second stream: kernels there would slow all graphs of the process.
        with torch.cuda.device(index), torch.cuda.stream(torch.cuda.Stream(index)):
            begin_capture(self._graph)
            try:
                torch.rand(4, device="cuda", generator=generator)
            finally:
                self._graph.capture_end()
        self._graph.instantiate()
        generator.set_state(before)

    def write(self) -> None:
        """Lets replays from now on draw the numbers that the generator would draw next."""
        offset = self.generator.get_offset()
        with self._torch.cuda.device(self._index):
            self._graph.replay()
        self.generator.set_offset(offset)

    def wait(self) -> None:
        self._torch.cuda.current_stream(self._index).synchronize()

    def offset(self, words_of: WordsOf) -> Any:
        """The word of the offset as a tensor; None if it cannot be found. It is the second of two addresses that the
        kernel of a draw is given; the first is the seed's.
        """
        if self._offset is None:
            before = self.generator.get_state()
            self.generator.set_offset(_MARK)
            self.write()
            self.wait()
            self.generator.set_state(before)
            words = [word for word in words_of(self._graph) if word % 8 == 0 and word > _MARK]
            for pair in itertools.pairwise(words):
                found = [_word(self._torch, self._index, each) for each in pair]
                if [each and each[1] for each in found] == [self.generator.initial_seed() % (1 << 64), _MARK]:
                    self._offset = found[1][0]  # type: ignore[index]
                    break
        return self._offset


class _Own:
    """A state of PyTorch's default generator that belongs to one job or instance. Two that run at once use different
    words, and captures by other code do not write to them.
    """

    def __init__(self, torch: Any, index: int) -> None:
        self.default = torch.cuda.default_generators[index]
        self.generator = torch.Generator(f"cuda:{index}")
        self.generator.set_state(self.default.get_state())
        self._state = self.generator.graphsafe_get_state()
        with self.drawing():
            self.words = _Words(torch, index, self.generator)

    @contextlib.contextmanager
    def drawing(self) -> Iterator[None]:
        """Makes draws without a named generator use this one."""
        before = self.default.graphsafe_get_state()
        self.default.graphsafe_set_state(self._state)
        try:
            yield
        finally:
            self.default.graphsafe_set_state(before)


class Draws:
    """Random numbers of a step, from PyTorch's default generator of one GPU and from generators that the step names."""

    def __init__(self, torch: Any, named: list[Any], index: int) -> None:
        self._own = _Own(torch, index)
        self._named = named
        self._generators = [self._own.default, *named]
        with self._own.drawing():
            self._words = [self._own.words, *(_Words(torch, index, each) for each in named)]
        self.drawn = [0] * len(self._words)  # numbers drawn by one step, per generator
        self.recording = self._own.drawing  # the context for a capture of the step

    def register(self, graph: Any) -> None:
        """Registers generators before a step is captured. Captures always know the default generator."""
        for generator in self._named:
            graph.register_generator_state(generator)

    def offsets(self) -> list[int]:
        return [each.get_offset() for each in self._generators]

    def note(self, before: list[int]) -> None:
        """Records how much one step drew, given the offsets before it."""
        self.drawn = [now - then for now, then in zip(self.offsets(), before, strict=True)]

    def next_step(self) -> None:
        """Makes the next replay draw the numbers that PyTorch would draw now."""
        if not any(self.drawn):
            return
        self._own.generator.set_state(self._own.default.get_state())
        # The graphs of named generators also refer to the job's own state, which is therefore written last.
        for words, drawn in reversed([*zip(self._words, self.drawn, strict=True)]):
            if drawn:
                words.write()
                words.wait()
        for generator, drawn in zip(self._generators, self.drawn, strict=True):
            if drawn:
                generator.set_offset(generator.get_offset() + drawn)


class InstanceDraws:
    """The random numbers of one instance of a served model, from a seed of its own."""

    def __init__(self, torch: Any, index: int, number: int, words_of: WordsOf) -> None:
        self._own = _Own(torch, index)
        generator = self._own.generator
        generator.manual_seed((self._own.default.initial_seed() + _GOLDEN * (number + 1)) % (1 << 62))
        self._offset = self._own.words.offset(words_of)
        if self._offset is None:
            raise CaptureError(
                f"draws random numbers, but paellapy cannot find where PyTorch {torch.__version__} keeps the generator "
                "state of a captured draw: draw the numbers beforehand and pass them as an input"
            )
        self._own.words.write()
        self._own.words.wait()
        self.drawing = self._own.drawing

    def move_on(self, drawn: int) -> None:
        """Advances the offset; captured behind the draws, so that the next replay draws other numbers."""
        self._offset.add_(drawn)


class _Word:
    def __init__(self, address: int) -> None:
        self.__cuda_array_interface__ = {"shape": (1,), "typestr": "<i8", "data": (address, False), "version": 3}


def _word(torch: Any, index: int, address: int) -> tuple[Any, int] | None:
    """A word of GPU memory as a tensor, and its value; None if the address is not valid."""
    try:
        tensor = torch.as_tensor(_Word(address), device=f"cuda:{index}")
    except (RuntimeError, ValueError):
        return None
    return tensor, int(tensor.item()) % (1 << 64)


# PyTorch's libraries on a GPU, loaded in a thread of their own while a model is made.
#
# The first convolution of a process loads cuDNN, and the first product cuBLAS, which takes longer than the other runs
# of a small network. `Model.from_torch` runs its example on the CPU meanwhile, so an engine that is open loads them
# then. A load that comes before the end waits for one layer at most.


Step = Callable[[Any], None]  # runs a layer on a device of PyTorch's
Runner = Callable[[Sequence[Step]], None]
_log = logging.getLogger("paellapy.load")
_lock = threading.Lock()
_open: dict[int, tuple[int, Runner, list[threading.Thread]]] = {}  # engines: GPU, how to run steps there, threads
_wanted: dict[Any, list[Step]] = {}  # by models that were made: each kind of layers once
_begun: set[tuple[int, Any]] = set()  # GPU, kind


def opened(engine: int, gpu: int, run: Runner) -> None:
    """An engine is open on a GPU: `run` takes the steps there one by one, as long as no model is loaded."""
    with _lock:
        _open[engine] = (gpu, run, [])
        _begin()


def closed(engine: int) -> None:
    """The engine closes; waits for the steps that were begun for it."""
    with _lock:
        *_, threads = _open.pop(engine, (0, None, []))
    for each in threads:
        each.join()


def want(torch: Any, module: Any, dtype: Any) -> None:
    """A model is made from a module: loads the libraries that its layers need, on every GPU with an open engine."""
    if not isinstance(module, torch.nn.Module):
        return
    kinds = (torch.nn.Conv2d, torch.nn.Linear)
    convolves, multiplies = (any(isinstance(part, kind) for part in module.modules()) for kind in kinds)
    own = dtype or next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.float32)
    with _lock:
        steps = [*(_convolutions(torch, own) if convolves else ()), *(_products(torch, own) if multiplies else ())]
        _wanted.setdefault((own, convolves, multiplies), steps)
        _begin()


def _begin() -> None:
    """Starts the steps that were not begun; the caller holds the lock."""
    for gpu, run, threads in _open.values():
        for kind, steps in _wanted.items():
            if steps and (gpu, kind) not in _begun:
                _begun.add((gpu, kind))
                threads.append(threading.Thread(target=_tried, args=(run, steps), name="paellapy-libraries"))
                threads[-1].start()


def _tried(run: Runner, steps: Sequence[Step]) -> None:
    try:
        run(steps)
    except Exception as e:  # the model itself will fail likewise, and say so to its user
        _log.debug("PyTorch's libraries could not be loaded ahead: %s", e)


def _convolutions(torch: Any, dtype: Any) -> Iterator[Step]:
    """Typical convolutions with the layers around them, on zeros."""
    f = torch.nn.functional

    def layer(channels: int, made: int, extent: int, stride: int, size: int) -> Step:
        def run(device: Any) -> None:
            zeros = partial(torch.zeros, dtype=dtype, device=device)
            x = f.conv2d(
                zeros(1, channels, size, size), zeros(made, channels, extent, extent), None, stride, extent // 2
            )
            x = f.batch_norm(x, zeros(made), zeros(made) + 1, zeros(made), zeros(made)).relu_()
            f.adaptive_avg_pool2d(f.max_pool2d(x + x, 3, 2, 1), 1)

        return run

    yield layer(3, 64, 7, 2, 224)
    yield layer(64, 64, 3, 1, 56)
    yield layer(64, 128, 3, 2, 56)
    yield layer(64, 128, 1, 2, 56)
    yield layer(512, 512, 3, 1, 7)


def _products(torch: Any, dtype: Any) -> Iterator[Step]:
    def run(device: Any) -> None:
        zeros = partial(torch.zeros, dtype=dtype, device=device)
        torch.nn.functional.linear(zeros(1, 512), zeros(1000, 512), zeros(1000))

    yield run
