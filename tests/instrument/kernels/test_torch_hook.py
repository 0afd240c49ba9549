"""Kernels that Triton compiles itself: instrumented through its hook, never confused with plain ones in its cache."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import triton
import triton.language as tl
from failing import failing
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import _allocation

from paellapy.instrument.errors import InstrumentError
from paellapy.instrument.kernels import torch_hook
from paellapy.instrument.kernels.decorator import kernel
from paellapy.instrument.kernels.torch_hook import instrument_torch
from paellapy.instrument.kernels.triton_source import TRITON_VERSION
from paellapy.instrument.ptx.descriptor import pass_version


@triton.jit
def double(x, out, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(out + i, tl.load(x + i, mask=i < n) * 2, mask=i < n)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    yield
    instrument_torch(False)


def compiled(target: int = 90) -> Any:
    """Compiles as Inductor does, by calling `triton.compile`."""
    signature = {"x": "*fp32", "out": "*fp32", "n": "i32", "B": "constexpr"}
    source = ASTSource(fn=double, signature=signature, constexprs={"B": 64})
    return triton.compile(source, target=GPUTarget("cuda", target, 32), options={"enable_fp_fusion": True})


def is_instrumented(built: Any) -> bool:
    reported = "%paellapy" in built.asm["ptx"]
    assert bool(built.metadata.profile_scratch_size) == reported, "asked for a descriptor exactly where one is read"
    return reported


@pytest.mark.parametrize("target", [80, 90, 100])
def test_kernels_compiled_while_enabled_are_instrumented(target: int) -> None:
    instrument_torch()
    built = compiled(target)
    assert is_instrumented(built)
    assert built.metadata.profile_scratch_size == 1
    assert built.asm["cubin"]
    entry = built.asm["ptx"].split(".entry", 1)[1].split("{")[0]
    assert "paellapy" not in entry, "the signature is Triton's"


def test_disabling_gives_plain_kernels_again() -> None:
    instrument_torch()
    assert is_instrumented(compiled())
    instrument_torch(False)
    assert not is_instrumented(compiled())
    assert knobs.runtime.add_stages_inspection_hook is None


def test_the_cache_never_mixes_the_two() -> None:
    plain = compiled()
    assert not is_instrumented(plain)
    for _ in range(2):  # the second time from the cache
        instrument_torch()
        assert is_instrumented(compiled())
        instrument_torch(False)
        again = compiled()
        assert not is_instrumented(again)
        assert again.asm["ptx"] == plain.asm["ptx"]


def test_kernels_of_our_own_stay_plain_underneath() -> None:
    before = kernel(double).compile("*fp32", "*fp32", "i32", B=64, target="sm_90")
    instrument_torch()
    meanwhile = kernel(double).compile("*fp32", "*fp32", "i32", B=64, target="sm_90")
    assert meanwhile.original_ptx == before.original_ptx
    assert meanwhile.cubin == before.cubin
    # Also where nothing is in the cache yet; and they leave nothing there that Triton would take for something else.
    other = kernel(double).compile("*fp16", "*fp16", "i32", B=64, target="sm_90")
    assert "%paellapy" not in other.original_ptx
    assert is_instrumented(compiled())


def test_enabling_twice_is_enabling_once() -> None:
    instrument_torch()
    hook = knobs.runtime.add_stages_inspection_hook
    instrument_torch()
    assert knobs.runtime.add_stages_inspection_hook == hook
    instrument_torch(False)
    instrument_torch(False)
    assert knobs.runtime.add_stages_inspection_hook is None


def test_somebody_elses_hook_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def theirs(*args: Any) -> Any:
        return None if args else ("key", "hash")

    monkeypatch.setattr(knobs.runtime, "add_stages_inspection_hook", theirs)
    for _ in range(2):
        with failing(InstrumentError, field="hook"):
            instrument_torch()
    instrument_torch(False)
    assert knobs.runtime.add_stages_inspection_hook is theirs


def test_everything_is_put_back() -> None:
    def state() -> list[Any]:
        # Of the launch hook only our own entry is looked at: Triton keeps an empty chain where there was none.
        hooks = (knobs.runtime.launch_enter_hook, knobs.runtime.kernel_load_end_hook)
        chains = [list(getattr(hook, "calls", [])) for hook in hooks]
        return [_allocation._profile_allocator.get(), knobs.compilation.instrumentation_mode, *chains]

    before = state()
    instrument_torch()
    assert state() != before
    instrument_torch(False)
    assert state() == before


def test_a_kernel_that_cannot_be_instrumented_still_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> str:
        raise InstrumentError("not this one")

    monkeypatch.setattr(torch_hook.passes, "apply", refuse)
    instrument_torch()
    assert not is_instrumented(compiled())


def test_a_kernel_that_proton_instruments_is_left_to_it() -> None:
    hook = torch_hook._Hook()
    stages = {"ptx": lambda source, metadata: "its PTX"}
    hook.stages(None, stages, None, None, None)
    assert stages["ptx"](None, {"profile_scratch_size": 128}) == "its PTX"


@pytest.mark.skipif(TRITON_VERSION < (3, 7), reason="Triton 3.6 does not ask")
def test_the_key_of_the_cache_changes_with_the_passes() -> None:
    key, digest = torch_hook._Hook().stages()
    assert pass_version() in key
    assert len(digest) == 64


def test_the_caches_of_torch_compile_tell_instrumented_kernels_from_plain_ones() -> None:
    pytest.importorskip("torch")
    from torch._inductor import config as inductor
    from torch.compiler import config

    before = config.cache_key_tag, inductor.compile_threads, inductor.use_static_cuda_launcher
    instrument_torch()
    assert "paellapy" in config.cache_key_tag
    assert inductor.compile_threads == 1
    assert not inductor.use_static_cuda_launcher
    instrument_torch(False)
    assert (config.cache_key_tag, inductor.compile_threads, inductor.use_static_cuda_launcher) == before


def test_inductor_asks_for_other_entries_of_its_disk_cache() -> None:
    torch = pytest.importorskip("torch")
    from torch._inductor.codecache import FxGraphCachePickler, FxGraphHashDetails

    graph = torch.fx.symbolic_trace(torch.nn.Linear(2, 2))

    def key() -> str:
        return FxGraphCachePickler(graph).get_hash(FxGraphHashDetails(graph, [torch.ones(2)], {}, []))

    plain = key()
    instrument_torch()
    assert key() != plain
    instrument_torch(False)
    assert key() == plain
