"""Building a kernel: which ptxas is used and how often, what it reports, what is cached, and how it fails."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from failing import failing
from ptx_pieces import entry, module

from paellapy.instrument.errors import PtxError
from paellapy.instrument.ptx import compiled
from paellapy.instrument.ptx import compiled as assembler
from paellapy.instrument.ptx.compiled import Assembled, Ptxas, assemble, choose_ptxas, find_ptxas
from paellapy.instrument.ptx.descriptor import PassConfig

KERNEL = module(entry(".shared .align 4 .b8 tile[1000]; mov.u32 %r1, %tid.x; st.shared.u32 [tile], %r1; ret;"))


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAELLAPY_CACHE_DIR", str(tmp_path))


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The calls of ptxas that were really made."""
    made: list[tuple[Any, ...]] = []
    run = assembler._run

    def counted(*args: Any) -> Assembled:
        made.append(args)
        return run(*args)

    monkeypatch.setattr(assembler, "_run", counted)
    return made


def has(*releases: tuple[int, int]) -> tuple[Ptxas, ...]:
    return tuple(Ptxas(f"/ptxas-{major}.{minor}", (major, minor)) for major, minor in releases)


@pytest.mark.parametrize(
    ("release", "newest"),
    [
        ((11, 8), (7, 8)), ((12, 0), (8, 0)), ((12, 4), (8, 4)), ((12, 5), (8, 5)), ((12, 6), (8, 5)),
        ((12, 8), (8, 7)), ((12, 9), (8, 8)), ((13, 0), (9, 0)), ((13, 1), (9, 1)),
    ],
)  # fmt: skip
def test_releases_of_cuda_read_ptx_up_to_a_version(release: tuple[int, int], newest: tuple[int, int]) -> None:
    assert Ptxas("ptxas", release).newest_ptx == newest


@pytest.mark.parametrize(
    ("version", "chosen"),
    [((7, 0), (12, 8)), ((8, 7), (12, 8)), ((8, 8), (13, 0)), ((9, 0), (13, 0)), ((9, 1), (13, 1))],
)
def test_the_first_that_reads_the_module_is_chosen(
    version: tuple[int, int], chosen: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(assembler, "find_ptxas", lambda: has((12, 8), (13, 0), (13, 1)))
    assert choose_ptxas(version).release == chosen


def test_the_preferred_one_is_chosen_if_it_can_read_the_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assembler, "find_ptxas", lambda: has((13, 0), (12, 8)))
    assert choose_ptxas((8, 0), "/ptxas-12.8").release == (12, 8)
    assert choose_ptxas((8, 8), "/ptxas-12.8").release == (13, 0)
    assert choose_ptxas((8, 0), "/elsewhere").release == (13, 0)


def test_when_none_fits_the_error_says_what_is_there_and_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assembler, "find_ptxas", lambda: has((12, 8)))
    with failing(PtxError, field="version", given=(9, 0)):
        choose_ptxas((9, 0))
    monkeypatch.setattr(assembler, "find_ptxas", lambda: ())
    with failing(PtxError, field="version", given=(7, 0)):
        choose_ptxas((7, 0))


def test_triton_brings_a_ptxas() -> None:
    assert any("triton" in p.path for p in find_ptxas())
    assert len({p.path for p in find_ptxas()}) == len(find_ptxas())


def script(path: Path, text: str, mode: int = 0o755) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


def test_a_configured_ptxas_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = script(tmp_path / "ptxas", "#!/bin/sh\necho 'Cuda compilation tools, release 13.7, V13.7.1'\n")
    monkeypatch.setenv("PAELLAPY_PTXAS", str(own))
    assert find_ptxas.__wrapped__()[0] == Ptxas(str(own), (13, 7))


@pytest.mark.parametrize("text", [None, "#!/bin/sh\necho hello\n", "not a program"])
def test_a_configured_ptxas_that_is_none_is_an_error(
    text: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if text is not None:
        script(tmp_path / "ptxas", text, 0o755 if text.startswith("#!") else 0o644)
    monkeypatch.setenv("PAELLAPY_PTXAS", str(tmp_path / "ptxas"))
    with failing(PtxError, field="PAELLAPY_PTXAS"):
        find_ptxas.__wrapped__()


def test_tools_that_do_not_run_are_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bin").mkdir()
    script(tmp_path / "bin" / "ptxas", "not a program", 0o644)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert all(str(tmp_path) not in p.path for p in find_ptxas.__wrapped__())


def test_a_tool_that_several_names_lead_to_is_listed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bin").mkdir()
    own = script(tmp_path / "bin" / "ptxas", "#!/bin/sh\necho 'release 13.7, V13.7.1'\n")
    (tmp_path / "link").symlink_to(tmp_path)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path / "link" / "bin"), prepend=":")
    assert [p.path for p in find_ptxas.__wrapped__() if p.release == (13, 7)] == [str(own)]


def test_a_ptxas_that_does_not_end_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = script(tmp_path / "ptxas", "#!/bin/sh\nexec sleep 60\n")
    monkeypatch.setattr(assembler, "_LONGEST_S", 0.1)
    with failing(PtxError, kernel="k", field="time", limit=0.1):
        assembler._run(Ptxas(str(slow), (13, 7)), KERNEL, "sm_80", "k", ())


@pytest.mark.usefixtures("empty_cache")
def test_resources_are_read_from_the_log() -> None:
    built = assemble(KERNEL, "sm_80", "k")
    assert built.cubin.startswith(b"\x7fELF")
    assert 0 < built.registers < 32
    assert built.static_shared_bytes == 1000
    assert (built.spill_bytes, built.stack_bytes) == (0, 0)


@pytest.mark.usefixtures("empty_cache")
def test_stack_and_spills_are_reported() -> None:
    stack = entry(".local .align 4 .b8 depot[64]; mov.u32 %r1, %tid.x; shl.b32 %r1, %r1, 2; mov.u32 %r2, depot; "
                  "add.u32 %r2, %r2, %r1; st.local.u32 [%r2], %r1; ld.local.u32 %r3, [depot+4]; "
                  "cvta.to.global.u64 %rd1, %rd1; st.global.u32 [%rd1], %r3; ret;")  # fmt: skip
    assert assemble(module(stack), "sm_80", "k").stack_bytes >= 64


@pytest.mark.usefixtures("empty_cache")
def test_each_entry_has_its_own_resources() -> None:
    two = KERNEL + entry("ret;", name="other")
    assert assemble(two, "sm_80", "k").static_shared_bytes == 1000
    assert assemble(two, "sm_80", "other").static_shared_bytes == 0
    with failing(PtxError, kernel="third", field="resources"):
        assemble(two, "sm_80", "third")


@pytest.mark.usefixtures("empty_cache")
@pytest.mark.parametrize(
    ("ptx", "named"),
    [
        (module(entry("\tno.such %r1;\n\tret;")), "line 11"),
        (module(entry("mov.u32 %undeclared, 1; ret;")), "undeclared"),
        (module(entry("ret;"), header=".version 8.0\n.target sm_90\n.address_size 64\n"), ".target"),
    ],
)
def test_bad_ptx_shows_the_log_of_ptxas(ptx: str, named: str) -> None:
    with failing(PtxError, kernel="k", field="ptx", limit="sm_80") as raised:
        assemble(ptx, "sm_80", "k")
    assert named in raised.value.log
    assert raised.value.log in str(raised.value)


def test_a_module_without_a_version_is_refused() -> None:
    with failing(PtxError, field=".version"):
        assemble(entry("ret;"), "sm_80", "k")


@pytest.mark.usefixtures("empty_cache")
def test_a_second_call_is_answered_from_disk(runs: list[Any]) -> None:
    first, second = assemble(KERNEL, "sm_80", "k"), assemble(KERNEL, "sm_80", "k")
    assert first == second
    assert len(runs) == 1


@pytest.mark.usefixtures("empty_cache")
def test_whatever_changes_the_result_changes_the_key(runs: list[Any]) -> None:
    other = next(p.path for p in find_ptxas() if p.path != choose_ptxas((8, 0)).path)
    assemble(KERNEL, "sm_80", "k")
    assemble(KERNEL + "\n", "sm_80", "k")
    assemble(KERNEL, "sm_90", "k")
    assemble(KERNEL, "sm_80", "k", ("-lineinfo",))
    assemble(KERNEL, "sm_80", "k", ("-O0",))
    assemble(KERNEL, "sm_80", "k", (), other)
    assert len(runs) == 6


@pytest.mark.usefixtures("empty_cache")
def test_a_damaged_result_is_assembled_again(runs: list[Any], tmp_path: Path) -> None:
    first = assemble(KERNEL, "sm_80", "k")
    for path in tmp_path.rglob("*"):
        if path.is_file():
            path.write_bytes(path.read_bytes()[:-1])
    assert assemble(KERNEL, "sm_80", "k") == first
    assert len(runs) == 2


def test_without_a_writable_cache_kernels_still_assemble(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("PAELLAPY_CACHE_DIR", str(tmp_path / "file"))
    assert assemble(KERNEL, "sm_80", "k").cubin


@pytest.mark.parametrize(
    ("directives", "times"),
    [(".reqntid 128", 3), (".maxntid 128", 3), ("", 3), (".maxnreg 64", 1), (".minnctapersm 2", 1)],
)
def test_fewer_registers_are_asked_for_unless_the_kernel_limits_them(
    monkeypatch: pytest.MonkeyPatch, directives: str, times: int
) -> None:
    asked: list[str] = []

    def assemble(ptx: str, arch: str, name: str, options: tuple[str, ...], path: str | None) -> Assembled:
        asked.append(ptx)
        return Assembled(b"", 54 if "paellapy" in ptx and ".maxnreg 48" not in ptx else 48, 0, 0, 0)

    monkeypatch.setattr(compiled, "assemble", assemble)
    ptx = module(entry("ret;", directives=directives))
    made = compiled.Source("k", ptx, "sm_80", "", 128).build(PassConfig("trace"))
    assert len(asked) == times
    assert made.registers == (48 if times == 3 else 54)
    assert made.ptx == asked[-1 if times == 3 else 0]  # the text that the machine code was made of


def test_a_refused_limit_of_registers_is_dropped_and_products_of_warp_groups_have_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []

    def assemble(ptx: str, arch: str, name: str, options: tuple[str, ...], path: str | None) -> Assembled:
        asked.append(ptx)
        if ".maxnreg" in ptx:
            raise PtxError("refused")
        return Assembled(b"", 54 if "paellapy" in ptx else 48, 0, 0, 0)

    monkeypatch.setattr(compiled, "assemble", assemble)
    made = compiled.Source("k", module(entry("ret;")), "sm_80", "", 128).build(PassConfig("trace"))
    assert len(asked) == 3
    assert made.registers == 54
    assert made.ptx == asked[0]
    asked.clear()
    ptx = module(entry("wgmma.fence.sync.aligned;\n ret;"))
    assert compiled.Source("k", ptx, "sm_90a", "", 128).build(PassConfig("trace")).registers == 54
    assert len(asked) == 1
