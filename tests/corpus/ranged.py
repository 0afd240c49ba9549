"""Kernels with ranges inserted: around the whole body, and around each round of every outermost loop, for each warp."""

from __future__ import annotations

import ast
import copy
import re
from typing import Any

from triton.runtime.jit import JITFunction

import paellapy as pp

_NAMES = {"_pp_range_begin": pp.range_begin, "_pp_range_end": pp.range_end}


def with_ranges(fn: Any) -> Any:
    """The same kernel with ranges; autotuners and heuristics around it stay around it."""
    if not isinstance(fn, JITFunction):
        outer = copy.copy(fn)
        outer.fn = with_ranges(fn.fn)
        return outer
    ranged = copy.copy(fn)
    ranged.fn.__globals__.update(_NAMES)
    ranged._unsafe_update_src(inserted(fn.src))
    return ranged


def without_ranges(fn: Any) -> Any:
    """A kernel whose `with pp.range(…)` blocks are opened up."""
    plain = copy.copy(fn)
    plain._unsafe_update_src(ast.unparse(_Open().visit(ast.parse(fn.src))))
    return plain


class _Open(ast.NodeTransformer):
    def visit_With(self, node: ast.With) -> Any:
        self.generic_visit(node)
        return node.body


def inserted(source: str) -> str:
    """The text of a kernel, with ranges.

    >>> print(inserted("def f(n):\\n    for i in range(n):\\n        g(i)"))
    def f(n):
        _pp_range_begin('body')
        for i in range(n):
            _pp_range_begin('round', per_warp=True)
            g(i)
            _pp_range_end('round', per_warp=True)
        _pp_range_end('body')
    """
    tree = ast.parse(source)
    (kernel,) = (node for node in tree.body if isinstance(node, ast.FunctionDef))
    _wrap_loops(kernel.body)
    kernel.body = [*_mark("begin", "'body'"), *kernel.body]
    if not isinstance(kernel.body[-1], ast.Return):
        kernel.body += _mark("end", "'body'")
    return ast.unparse(tree)


def _wrap_loops(body: list[ast.stmt]) -> None:
    for node in body:
        if isinstance(node, ast.For | ast.While) and not _unrolled(node):
            node.body = [*_mark("begin", "'round', per_warp=True"), *node.body, *_mark("end", "'round', per_warp=True")]
        elif isinstance(node, ast.If):
            _wrap_loops(node.body)
            _wrap_loops(node.orelse)


def _unrolled(node: ast.stmt) -> bool:
    return isinstance(node, ast.For) and "static_range" in ast.unparse(node.iter)


def _mark(which: str, arguments: str) -> list[ast.stmt]:
    return ast.parse(f"_pp_range_{which}({arguments})").body


def inserted_cuda(source: str, entry: str) -> str:
    """CUDA C source with ranges in one of its kernels. The source has no comments, and braces in pairs.

    >>> print(inserted_cuda("__global__ void f(int n)\\n{while (n)\\n --n;}", "f"))
    __global__ void f(int n)
    {pp_range_begin("body"); while (n) {pp_warp_range_begin("round");
     --n; pp_warp_range_end("round");} pp_range_end("body");}
    """
    head = re.search(rf"__global__[^{{}};]*\b{entry}\s*\([^{{}};]*\)\s*(?={{)", source)
    if head is None:
        raise SystemExit(f"the source has no kernel {entry}")
    end = _closing(source, head.end(), "{}")
    body = _cuda_loops(source[head.end() + 1 : end - 1])
    return f'{source[: head.end()]}{{pp_range_begin("body"); {body} pp_range_end("body");}}{source[end:]}'


def _cuda_loops(body: str) -> str:
    """The statements with a range around each round of the outermost loops."""
    loop = re.search(r"\b(?:for|while) (?=\()", body)
    if loop is None:
        return body
    begin = _closing(body, loop.end(), "()")
    end = _closing(body, begin + 1, "{}") if body[begin:].startswith(" {") else body.index(";", begin) + 1
    around = f'{{pp_warp_range_begin("round");{body[begin:end]} pp_warp_range_end("round");}}'
    return f"{body[:begin]} {around}{_cuda_loops(body[end:])}"


def _closing(text: str, opening: int, pair: str) -> int:
    """The place after the bracket that closes the one at `opening`."""
    depth = 0
    for place in range(opening, len(text)):
        depth += (text[place] == pair[0]) - (text[place] == pair[1])
        if depth == 0:
            return place + 1
    raise SystemExit(f"the source ends before a {pair[1]}")
