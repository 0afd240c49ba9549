"""Operators of ten installed packages with Triton kernels, each with a reference in PyTorch.

Nothing of these packages is copied: operators are imported from the installed packages (extra `public`), and references
are written with PyTorch's own functions. Sizes are small, since a reference computes time step by time step.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import itertools
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

Operator = Callable[..., Any]
Inputs = Callable[[torch.Generator], dict[str, Any]]


@dataclass(frozen=True)
class PublicCase:
    """An operator, its reference and inputs. Gradients of floating inputs are compared too, where `grad` says so."""

    name: str
    operator: Callable[[], Operator]  # imports when called: a package that fails to import fails its cases alone
    reference: Operator
    inputs: Inputs
    grad: bool = True
    constant: tuple[str, ...] = ()  # inputs that the operator gives no gradient of
    tolerance: float = 2e-3  # of the largest value: products of fp32 on tensor cores have 10 bits


def _first(out: Any) -> Any:
    return out[0] if isinstance(out, (tuple, list)) else out


def _normal(**shapes: tuple[int, ...]) -> Inputs:
    return lambda g: {name: torch.randn(shape, generator=g) for name, shape in shapes.items()}


# -- liger-kernel


def _rms_norm(x: Tensor, w: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * w


def _add_rms_norm(x: Tensor, r: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    return _rms_norm(x + r, w), x + r


def _group_norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.group_norm(x, 4, w, b, 1e-6)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x * cos.unsqueeze(1) + torch.cat((-x[..., half:], x[..., :half]), -1) * sin.unsqueeze(1)


def _rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return _rotated(q, cos, sin), _rotated(k, cos, sin)


def _angles(g: torch.Generator, *, heads: int = 4, width: int = 32) -> dict[str, Any]:
    angle = torch.arange(16)[None, :, None] * torch.rand(width // 2, generator=g)
    angle = torch.cat((angle, angle), -1)
    q, k = (torch.randn((2, h, 16, width), generator=g) for h in (heads, heads // 2))
    return {"q": q, "k": k, "cos": angle.cos(), "sin": angle.sin()}


def _labels(g: torch.Generator) -> dict[str, Any]:
    return {"x": torch.randn((24, 301), generator=g), "target": torch.randint(0, 301, (24,), generator=g)}


def _hidden_labels(g: torch.Generator) -> dict[str, Any]:
    target = torch.randint(0, 301, (24,), generator=g)
    return {"x": torch.randn((24, 64), generator=g), "w": torch.randn((301, 64), generator=g), "target": target}


def _log_probabilities(g: torch.Generator) -> dict[str, Any]:
    x = torch.randn((24, 301), generator=g).log_softmax(-1)
    return {"x": x, "target": torch.randn((24, 301), generator=g).softmax(-1)}


def _pairs(of: Callable[[Tensor], Tensor]) -> Inputs:
    return lambda g: {name: of(torch.randn((24, 301), generator=g)) for name in ("x", "target")}


def _jsd(x: Tensor, target: Tensor) -> Tensor:
    middle = torch.log((x.exp() + target.exp()) / 2)
    sides = [F.kl_div(middle, p, reduction="sum", log_target=True) for p in (x, target)]
    return (sides[0] + sides[1]) / 2 / len(x)


def _sparsemax(x: Tensor) -> Tensor:
    ordered = x.sort(-1, descending=True).values
    rank = torch.arange(1, x.shape[-1] + 1, device=x.device)
    inside = 1 + rank * ordered > ordered.cumsum(-1)
    count = inside.sum(-1, keepdim=True)
    level = ((ordered * inside).sum(-1, keepdim=True) - 1) / count
    return (x - level).clamp(min=0)


def _poly_norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    powers = [x**n / torch.sqrt((x**n).square().mean(-1, keepdim=True) + 1e-6) for n in (3, 2, 1)]
    return w[0] * powers[0] + w[1] * powers[1] + w[2] * powers[2] + b


def _indexed(g: torch.Generator) -> dict[str, Any]:
    return {"w": torch.randn((77, 48), generator=g), "index": torch.randint(0, 77, (3, 11), generator=g)}


def _liger(
    module: str, name: str, reference: Operator, inputs: Inputs, *rest: Any, only_first: bool = False,
    constant: tuple[str, ...] = (),
) -> PublicCase:  # fmt: skip
    """Its `Function.apply` takes arguments by position; `only_first`: it returns more than its loss."""

    def find() -> Operator:
        function = getattr(importlib.import_module(f"liger_kernel.ops.{module}"), f"Liger{name}Function")
        operator = lambda **given: function.apply(*given.values(), *rest)  # noqa: E731
        return (lambda **given: _first(operator(**given))) if only_first else operator

    return PublicCase(module.rpartition(".")[2], find, reference, inputs, constant=constant)


_ROWS, _PAIR = {"x": (12, 3, 200), "w": (200,)}, {"a": (24, 200), "b": (24, 200)}
LIGER = [
    _liger("rms_norm", "RMSNorm", _rms_norm, _normal(**_ROWS), 1e-6),
    _liger("layer_norm", "LayerNorm", lambda x, w, b: F.layer_norm(x, (200,), w, b, 1e-6),
           _normal(**_ROWS, b=(200,)), 1e-6),
    _liger("group_norm", "GroupNorm", _group_norm, _normal(x=(3, 16, 40), w=(16,), b=(16,)), 16, 4, 1e-6),
    _liger("fused_add_rms_norm", "FusedAddRMSNorm", _add_rms_norm, _normal(x=(24, 200), r=(24, 200), w=(200,)), 1e-6),
    _liger("geglu", "GELUMul", lambda a, b: F.gelu(a, approximate="tanh") * b, _normal(**_PAIR)),
    _liger("swiglu", "SiLUMul", lambda a, b: F.silu(a) * b, _normal(**_PAIR)),
    _liger("relu_squared", "ReLUSquared", lambda x: F.relu(x).square(), _normal(x=(24, 200))),
    _liger("rope", "Rope", _rope, _angles, constant=("cos", "sin")),
    _liger("softmax", "Softmax", lambda x: x.softmax(-1), _normal(x=(24, 301))),
    _liger("sparsemax", "Sparsemax", _sparsemax, _normal(x=(24, 301)), -1),
    _liger("dyt", "DyT", lambda x, alpha, gamma, beta: gamma * torch.tanh(alpha * x) + beta,
           _normal(x=(24, 200), alpha=(1,), gamma=(200,), beta=(200,))),
    _liger("poly_norm", "PolyNorm", _poly_norm, _normal(x=(24, 200), w=(3,), b=()), 1e-6, False),
    _liger("cross_entropy", "CrossEntropy", lambda x, target: F.cross_entropy(x, target), _labels, None,
           only_first=True),
    _liger("fused_linear_cross_entropy", "FusedLinearCrossEntropy",
           lambda x, w, target: F.cross_entropy(x @ w.T, target), _hidden_labels, only_first=True),
    _liger("kl_div", "KLDivLoss", lambda x, target: F.kl_div(x, target, reduction="batchmean"), _log_probabilities,
           constant=("target",)),
    _liger("jsd", "JSD", _jsd, _pairs(lambda x: x.log_softmax(-1)), constant=("target",)),
    _liger("tvd", "TVDLoss", lambda x, target: (x - target).abs().sum() / 2 / len(x), _pairs(lambda x: x.softmax(-1)),
           constant=("target",)),
    _liger("experimental.embedding", "Embedding", lambda w, index: F.embedding(index, w), _indexed),
]  # fmt: skip


# -- flash-linear-attention

_T, _H, _D = 96, 2, 32


def _heads(*extra: str, gate: str = "") -> Inputs:
    """q, k and v; a logarithm of decay named `gate` per key ("gk…") or per head; and strengths in (0, 1)."""

    def make(g: torch.Generator) -> dict[str, Any]:
        given: dict[str, Any] = {n: torch.randn((2, _T, _H, _D), generator=g) for n in "qkv"}
        given["q"], given["k"] = (F.normalize(given[n], dim=-1) for n in "qk")
        if gate:
            shape = (2, _T, _H, _D) if gate.endswith("+") else (2, _T, _H)
            given[gate.rstrip("+")] = F.logsigmoid(torch.randn(shape, generator=g) + 3) * 0.1
        for name in extra:
            given[name] = torch.rand((2, _T, _H), generator=g)
        return given

    return make


def _fla(module: str, name: str, by_name: bool = True, **options: Any) -> Callable[[], Operator]:
    def find() -> Operator:
        operator = getattr(importlib.import_module(f"fla.{module}"), name)
        if by_name:
            return lambda **given: _first(operator(**given, **options))
        return lambda **given: _first(operator(*given.values()))

    return find


def _attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out: Tensor = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True)
    return out.transpose(1, 2)


def _linear_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.einsum("bthd,bshd->bhts", q, k) * q.shape[-1] ** -0.5
    return torch.einsum("bhts,bshd->bthd", scores.tril(), v)


def _gated_linear(q: Tensor, k: Tensor, v: Tensor, gk: Tensor) -> Tensor:
    state = q.new_zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3])
    outs = []
    for t in range(q.shape[1]):
        state = state * gk[:, t].exp()[..., None] + k[:, t][..., None] * v[:, t][..., None, :]
        outs.append(torch.einsum("bhd,bhdv->bhv", q[:, t] * q.shape[-1] ** -0.5, state))
    return torch.stack(outs, 1)


def _gated_by_g(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    return _gated_linear(q, k, v, g if g.dim() == 4 else g[..., None].expand_as(q))


def _gated_delta(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """Also with a decay per key: then it is Kimi's delta attention."""
    decay = (g if g.dim() == 4 else g[..., None].expand_as(k)).exp()
    state = q.new_zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3])
    outs = []
    for t in range(q.shape[1]):
        state = state * decay[:, t][..., None]
        seen = torch.einsum("bhd,bhdv->bhv", k[:, t], state)
        new = beta[:, t][..., None] * (v[:, t] - seen)
        state = state + k[:, t][..., None] * new[..., None, :]
        outs.append(torch.einsum("bhd,bhdv->bhv", q[:, t] * q.shape[-1] ** -0.5, state))
    return torch.stack(outs, 1)


def _delta(q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    return _gated_delta(q, k, v, torch.zeros_like(beta), beta)


def _forgetting(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    total = g.cumsum(1).transpose(1, 2)
    scores = torch.einsum("bthd,bshd->bhts", q, k) * q.shape[-1] ** -0.5 + total[..., :, None] - total[..., None, :]
    future = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool, device=q.device).triu(1)
    return torch.einsum("bhts,bshd->bthd", scores.masked_fill(future, float("-inf")).softmax(-1), v)


def _hgrn(x: Tensor, g: Tensor) -> Tensor:
    state, outs = torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        state = g[:, t].exp() * state + x[:, t]
        outs.append(state)
    return torch.stack(outs, 1)


def _hgrn_inputs(g: torch.Generator) -> dict[str, Any]:
    return {"x": torch.randn((2, _T, 64), generator=g), "g": F.logsigmoid(torch.randn((2, _T, 64), generator=g))}


def _retention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    heads = torch.arange(q.shape[2], device=q.device, dtype=torch.float32)
    g = torch.log(1 - 2.0 ** (-5 - heads)).expand(q.shape[:3])
    return _gated_by_g(q, k, v, g)


def _l2norm(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def _short_conv(x: Tensor, weight: Tensor) -> Tensor:
    y = F.conv1d(x.transpose(1, 2), weight[:, None], padding=weight.shape[1] - 1, groups=weight.shape[0])
    return F.silu(y[..., : x.shape[1]].transpose(1, 2))


def _norm_gate(x: Tensor, g: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * weight * F.silu(g)


def _path_of_stick(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.einsum("bthd,bshd->bhts", q, k) * q.shape[-1] ** -0.5
    past = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool, device=q.device).tril(-1)
    keep = F.logsigmoid(-scores).masked_fill(~past, 0)
    after = keep.flip(-1).cumsum(-1).flip(-1) - keep
    weights = (F.logsigmoid(scores) + after).exp().masked_fill(~past, 0)
    return torch.einsum("bhts,bshd->bthd", weights, v)


def _halved(inputs: Inputs) -> Inputs:
    return lambda g: {name: value.bfloat16() for name, value in inputs(g).items()}


def _ops(name: str, folder: str, reference: Operator, inputs: Inputs, **about: Any) -> PublicCase:
    return PublicCase(name, _fla(f"ops.{folder}", name), reference, inputs, **about)


def _chunk_and_recurrent(stem: str, reference: Operator, inputs: Inputs) -> list[PublicCase]:
    return [_ops(f"{kind}_{stem}", stem, reference, inputs) for kind in ("chunk", "fused_recurrent")]


FLA = [
    *(PublicCase(f"{kind}_linear_attn", _fla("ops.linear_attn", f"{kind}_linear_attn", normalize=False),
                 _linear_attention, _heads()) for kind in ("chunk", "fused_recurrent", "fused_chunk")),
    *_chunk_and_recurrent("simple_gla", _gated_by_g, _heads(gate="g")),
    _ops("chunk_delta_rule", "delta_rule", _delta, _halved(_heads("beta")), tolerance=0.03),  # it takes no fp32
    _ops("fused_recurrent_delta_rule", "delta_rule", _delta, _heads("beta")),
    _ops("chunk_gated_delta_rule", "gated_delta_rule", _gated_delta, _heads("beta", gate="g")),
    _ops("fused_recurrent_gated_delta_rule", "gated_delta_rule", _gated_delta, _heads("beta", gate="g"),
         grad=False),  # it has no backward pass
    *_chunk_and_recurrent("retention", _retention, _heads()),
    _ops("chunk_kda", "kda", _gated_delta, _heads("beta", gate="g+")),
    _ops("fused_recurrent_kda", "kda", _gated_delta, _heads("beta", gate="g+"), grad=False),
    _ops("chunk_gla", "gla", _gated_by_g, _heads(gate="g+")),
    _ops("fused_recurrent_gla", "gla", _gated_linear, _heads(gate="gk+")),
    _ops("parallel_retention", "retention", _retention, _heads()),
    _ops("parallel_simple_gla", "simple_gla", _gated_by_g, _heads(gate="g")),
    _ops("parallel_attn", "attn", _attention, _heads()),
    _ops("parallel_forgetting_attn", "forgetting_attn", _forgetting, _heads(gate="g")),
    _ops("parallel_stickbreaking_attn", "stickbreaking_attn", _path_of_stick, _heads()),
    _ops("fused_recurrent_hgrn", "hgrn", _hgrn, _hgrn_inputs),
    PublicCase("l2norm", _fla("modules.l2norm", "l2norm"), _l2norm, _normal(x=(24, 3, 64))),
    PublicCase("rms_norm_gated", _fla("modules.fused_norm_gate", "rms_norm_gated", bias=None, activation="swish",
               eps=1e-5), _norm_gate, _normal(x=(24, 128), g=(24, 128), weight=(128,))),
    PublicCase("causal_conv1d", _fla("modules.convolution", "causal_conv1d", activation="silu"), _short_conv,
               _normal(x=(2, 48, 64), weight=(64, 4))),
    PublicCase("swiglu", _fla("modules.activations", "swiglu", by_name=False), lambda x, y: F.silu(x) * y,
               _normal(x=(24, 200), y=(24, 200))),
]  # fmt: skip


# -- smaller packages: mlstm-kernels, accelerated-scan, lightning-attn, cut-cross-entropy, sageattention,
# jvp-flash-attention, torchao


def _imported(path: str, *rest: Any, **options: Any) -> Callable[[], Operator]:
    """The function at "module:name", called with all inputs by position."""

    def find() -> Operator:
        module, _, name = path.partition(":")
        found = functools.reduce(getattr, name.split("."), importlib.import_module(module))
        return lambda **given: found(*given.values(), *rest, **options)

    return find


def _mlstm(q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor, sigmoid: bool = False) -> Tensor:
    """Gates weigh the past of each step: the input's exponentially, or by a sigmoid, which needs no maximum.

    Its gradients take the maximum and the divisor for constants, as the package's own reference does.
    """
    total = F.logsigmoid(f).cumsum(-1)
    weight = total[..., :, None] - total[..., None, :] + (F.logsigmoid(i) if sigmoid else i)[..., None, :]
    future = torch.ones(weight.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    weight = weight.masked_fill(future, float("-inf"))
    most = torch.zeros_like(weight[..., :1]) if sigmoid else weight.amax(-1, keepdim=True).detach()
    scores = (q @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5 * (weight - most).exp()
    below = torch.maximum(scores.sum(-1, keepdim=True).abs(), (-most).exp()) + 1e-6
    return scores / below.detach() @ v


def _mlstm_inputs(g: torch.Generator) -> dict[str, Any]:
    given = {name: torch.randn((2, 2, 128, 64), generator=g) for name in "qkv"}
    return {**given, "i": torch.randn((2, 2, 128), generator=g), "f": torch.randn((2, 2, 128), generator=g) + 3}


def _mlstm_step(
    q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor, c: Tensor, n: Tensor, m: Tensor
) -> tuple[Tensor, ...]:
    keep = F.logsigmoid(f) + m
    most = torch.maximum(keep, i)
    old, new = (keep - most).exp(), (i - most).exp()
    c = old[..., None] * c + new[..., None] * k[..., :, None] * v[..., None, :]
    n, q = old * n + new * k, q * q.shape[-1] ** -0.5
    below = torch.maximum((q * n).sum(-1, keepdim=True).abs(), (-most).exp()) + 1e-6
    return torch.einsum("bhd,bhdv->bhv", q, c) / below, c, n, most


def _mlstm_step_operator() -> Operator:
    step = _imported("mlstm_kernels.torch.recurrent.triton_step:mlstm_recurrent_step__triton")()

    def operator(**given: Tensor) -> Any:
        out, states = step(**given)
        return out, *states

    return operator


def _mlstm_step_inputs(g: torch.Generator) -> dict[str, Any]:
    shapes = dict.fromkeys("qkv", (2, 2, 32)) | dict.fromkeys("if", (2, 2, 1))
    shapes |= {"c": (2, 2, 32, 32), "n": (2, 2, 32), "m": (2, 2, 1)}
    return {name: torch.randn(shape, generator=g) for name, shape in shapes.items()}


def _scan(forget: Tensor, x: Tensor) -> Tensor:
    state, outs = torch.zeros_like(x[..., 0]), []
    for t in range(x.shape[-1]):
        state = forget[..., t] * state + x[..., t]
        outs.append(state)
    return torch.stack(outs, -1)


def _scan_inputs(kind: torch.dtype) -> Inputs:
    def make(g: torch.Generator) -> dict[str, Any]:
        # With a length that is no multiple of 2,048, the backward pass reads beyond the last row.
        forget, x = (torch.randn((1, 3, 2048), generator=g, dtype=kind) for _ in range(2))
        return {"forget": forget / (1 + forget.abs()), "x": x}

    return make


def _decayed(q: Tensor, k: Tensor, v: Tensor, s: Tensor | None = None) -> Tensor:
    ago = torch.arange(q.shape[2], device=q.device)
    ago = ago[:, None] - ago
    decay = torch.ones_like(ago, dtype=q.dtype) if s is None else torch.exp(-s * ago)
    return ((q @ k.transpose(-1, -2)) * decay).tril() @ v


def _decayed_inputs(*, slopes: bool) -> Inputs:
    def make(g: torch.Generator) -> dict[str, Any]:
        given: dict[str, Any] = {name: torch.randn((2, 2, 100, 32), generator=g) * 0.3 for name in "qkv"}
        return given | ({"s": torch.tensor([0.25, 0.0625]).reshape(2, 1, 1)} if slopes else {})

    return make


def _cut_inputs(g: torch.Generator) -> dict[str, Any]:
    e, c = (torch.randn(shape, generator=g).bfloat16() * 0.3 for shape in ((150, 64), (700, 64)))
    return {"e": e, "c": c, "targets": torch.randint(0, 700, (150,), generator=g)}


def _cut(cap: float | None = None) -> Operator:
    def reference(e: Tensor, c: Tensor, targets: Tensor) -> Tensor:
        logits = e.float() @ c.float().T
        return F.cross_entropy(cap * torch.tanh(logits / cap) if cap else logits, targets)

    return reference


def _cut_case(name: str, cap: float | None = None) -> PublicCase:
    options = {"softcap": cap, "filter_eps": None, "impl": "cce"}
    operator = _imported("cut_cross_entropy:linear_cross_entropy", **options)
    return PublicCase(name, operator, _cut(cap), _cut_inputs, tolerance=0.02)  # bfloat16


def _sage(kind: str, width: int) -> PublicCase:
    """Attention with products of 8-bit integers: their error is the tolerance. Lengths are whole tiles, as it wants."""
    causal, short = kind == "causal", "h96_" if width == 96 else ""
    name = f"per_block_{short}{kind}".removesuffix("_full")

    def find() -> Operator:
        quantized = importlib.import_module("sageattention.quant_per_block" + ("_hd96" if short else ""))
        attention = importlib.import_module(f"sageattention.attn_qk_int8_{name}")

        def operator(q: Tensor, k: Tensor, v: Tensor) -> Any:
            q8, q_scale, k8, k_scale = getattr(quantized, "per_block_int8" + ("_hd96" if short else ""))(q, k)
            return attention.forward(q8, k8, v, q_scale, k_scale, output_dtype=q.dtype)

        return operator

    def inputs(g: torch.Generator) -> dict[str, Any]:
        return {n: torch.randn((2, h, 256, width), generator=g).half() for n, h in (("q", 4), ("k", 2), ("v", 2))}

    def reference(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (x.repeat_interleave(2, 1) for x in (k, v))
        return F.scaled_dot_product_attention(q.float(), k.float(), v.float(), is_causal=causal)

    return PublicCase(name, find, reference, inputs, grad=False, tolerance=0.03)


def _sage_varlen(causal: bool) -> PublicCase:
    ends = (0, 128, 384)

    def find() -> Operator:
        quantized = importlib.import_module("sageattention.quant_per_block_varlen").per_block_int8
        module = "per_block_causal_varlen" if causal else "block_varlen"
        forward = importlib.import_module(f"sageattention.attn_qk_int8_{module}").forward

        def operator(q: Tensor, k: Tensor, v: Tensor, at: Tensor) -> Any:
            q8, q_scale, k8, k_scale, q_at, k_at = quantized(q, k, at, at, 256, 256)
            return forward(q8, k8, v, at, at, 256, q_scale, k_scale, q_at, k_at)

        return operator

    def inputs(g: torch.Generator) -> dict[str, Any]:
        given: dict[str, Any] = {n: torch.randn((384, 2, 64), generator=g).half() for n in "qkv"}
        return given | {"at": torch.tensor(ends, dtype=torch.int32)}

    def reference(q: Tensor, k: Tensor, v: Tensor, at: Tensor) -> Tensor:
        parts = [[x[a:b].float().transpose(0, 1) for x in (q, k, v)] for a, b in itertools.pairwise(ends)]
        return torch.cat([F.scaled_dot_product_attention(*p, is_causal=causal).transpose(0, 1) for p in parts])

    name = "varlen_causal" if causal else "varlen"
    return PublicCase(name, find, reference, inputs, grad=False, tolerance=0.03)


def _jvp(causal: bool) -> PublicCase:
    options = {"causal": causal, "USE_TMA": False, "warp_specialize": False}
    reference = functools.partial(F.scaled_dot_product_attention, is_causal=causal)
    inputs = _normal(q=(1, 2, 128, 32), k=(1, 2, 128, 32), v=(1, 2, 128, 32))
    return PublicCase("attention_causal" if causal else "attention",
                      _imported("jvp_flash_attention.jvp_attention:attention", **options),
                      lambda q, k, v: reference(q, k, v), inputs)  # fmt: skip


def _blocks_of_128(x: Tensor) -> Tensor:
    return x.unflatten(-1, (-1, 128))


def _fp8_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = _blocks_of_128(x).abs().amax(-1) / 448
    return (_blocks_of_128(x) / scale[..., None]).flatten(-2).to(torch.float8_e4m3fn).float(), scale


def _fp8_squares(x: Tensor) -> tuple[Tensor, Tensor]:
    tiles = x.unflatten(0, (-1, 128)).unflatten(-1, (-1, 128))
    scale = tiles.abs().amax((1, 3)) / 448
    tiles = (tiles / scale[:, None, :, None]).to(torch.float8_e4m3fn).float()
    return tiles.flatten(2, 3).flatten(0, 1), scale


def _ao(name: str, reference: Operator, inputs: Inputs) -> PublicCase:
    def find() -> Operator:
        found = getattr(importlib.import_module("torchao.kernel.blockwise_quantization"), name)

        def operator(**given: Any) -> Any:
            out = found(*given.values())
            return tuple(o.float() for o in out) if isinstance(out, tuple) else out.float()

        return operator

    return PublicCase(name, find, reference, inputs, grad=False, tolerance=0.02)


def _fp8_product_inputs(g: torch.Generator) -> dict[str, Any]:
    a, a_scale = _fp8_rows(torch.randn((48, 256), generator=g))
    b, b_scale = _fp8_squares(torch.randn((128, 256), generator=g))
    return {"a": a.to(torch.float8_e4m3fn), "a_scale": a_scale, "b": b.to(torch.float8_e4m3fn), "b_scale": b_scale}


def _fp8_product(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> Tensor:
    return _fp8_whole(a, a_scale, 1) @ _fp8_whole(b, b_scale, 128).T


def _fp8_whole(x: Tensor, scale: Tensor, rows: int) -> Tensor:
    return x.float() * scale.repeat_interleave(rows, 0).repeat_interleave(128, 1)


_CHUNKED = "mlstm_kernels.torch.chunkwise.triton_"
SMALLER = {
    "mlstm_kernels": [
        PublicCase("limit_chunk", _imported(f"{_CHUNKED}limit_chunk:mlstm_chunkwise__limit_chunk"), _mlstm,
                   _mlstm_inputs),
        PublicCase("xl_chunk", _imported(f"{_CHUNKED}xl_chunk:mlstm_chunkwise__xl_chunk"), _mlstm, _mlstm_inputs),
        PublicCase("xl_chunk_siging", _imported(f"{_CHUNKED}xl_chunk_siging:mlstm_siging_chunkwise__xl_chunk"),
                   functools.partial(_mlstm, sigmoid=True), _mlstm_inputs),
        PublicCase("limit_headdim", _imported("mlstm_kernels.torch.parallel.triton_limit_headdim:"
                                              "mlstm_parallel__limit_headdim"), _mlstm, _mlstm_inputs),
        PublicCase("step", _mlstm_step_operator, _mlstm_step, _mlstm_step_inputs, grad=False),
    ],
    "accelerated_scan": [
        PublicCase("scalar", _imported("accelerated_scan.scalar:scan"), _scan, _scan_inputs(torch.float32)),
        PublicCase("complex", _imported("accelerated_scan.complex:scan"), _scan, _scan_inputs(torch.complex64),
                   grad=False),
    ],
    "lightning_attn": [
        PublicCase("decay", _imported("lightning_attn.ops.triton:lightning_attn2"), _decayed,
                   _decayed_inputs(slopes=True), constant=("s",)),
        PublicCase("no_decay", _imported("lightning_attn.ops.triton:lightning_attn2_no_decay"), _decayed,
                   _decayed_inputs(slopes=False)),
        PublicCase("srmsnorm", _imported("lightning_attn.ops.triton.srmsnorm:_SrmsNorm.apply", 1e-6),
                   lambda x: x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6), _normal(x=(24, 200))),
    ],
    "cut_cross_entropy": [_cut_case("plain"), _cut_case("capped", 20.0)],
    "sageattention": [
        *(_sage(kind, width) for kind in ("full", "causal") for width in (64, 96)), _sage_varlen(False),
        _sage_varlen(True),
    ],
    "jvp_flash_attention": [_jvp(False), _jvp(True)],
    "torchao": [
        _ao("fp8_blockwise_act_quant", _fp8_rows, _normal(x=(48, 256))),
        _ao("fp8_blockwise_weight_quant", _fp8_squares, _normal(x=(128, 256))),
        _ao("fp8_blockwise_weight_dequant", functools.partial(_fp8_whole, rows=128),
            lambda g: dict(zip(("x", "scale"), _fp8_squares(torch.randn((128, 256), generator=g)), strict=True))),
        _ao("blockwise_fp8_gemm", _fp8_product, _fp8_product_inputs),
    ],
}  # fmt: skip


# -- FlagGems: operators of PyTorch's own, with the inputs of PyTorch's own tests


def _gpus() -> int:
    """How many there are, also while torch.cuda answers for the virtual GPU."""
    return getattr(torch._C, "_cuda_getDeviceCount", int)()  # type: ignore[no-any-return]


@functools.cache
def _functions_of_flag_gems() -> dict[str, Any]:
    """By operator and overload. To import it needs a GPU, as the virtual GPU's host code says there is."""
    found = importlib.import_module("flag_gems")
    if not _gpus():  # tensors are on the CPU
        for module in [each for name, each in sys.modules.items() if name.startswith("flag_gems.")]:
            for attribute, value in list(vars(module).items()):
                if isinstance(value, str) and value == "cuda":
                    setattr(module, attribute, "cpu")
        found.runtime.device.name = "cpu"
    config = importlib.import_module("flag_gems.utils.codegen_config_utils").get_codegen_config()
    config.prefer_block_pointer = False  # Triton 3.9 has no block pointers
    return {row[0]: row[1] for row in found._FULL_CONFIG}


class _Gems(TorchDispatchMode):
    """Calls FlagGems' function in the place of each of PyTorch's operators that it has."""

    def __init__(self) -> None:
        super().__init__()
        self._functions = _functions_of_flag_gems()
        self.used: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, overload = func._schema.name.removeprefix("aten::"), func._overloadname
        function = self._functions.get(name if overload == "default" else f"{name}.{overload}")
        if function is not None:
            self.used.add(name)
        return (function or func)(*args, **(kwargs or {}))


_LEFT_OUT = {
    "random numbers": "randn randn_like rand_like normal",
    "its host code asks for CUDA's tensors": "i0 where t_copy special.i0e special.i1",
    "its host code fails on the sample": "linspace polar kron",
    "its kernel reads channels of the next group, also on a GPU": "native_group_norm",
    "the sample calls no function of FlagGems": (
        "clamp_min bitwise_left_shift bitwise_right_shift conj_physical resolve_conj resolve_neg copysign diag "
        "new_full repeat_interleave nn.functional.conv1d nn.functional.conv2d nn.functional.conv3d "
        "nn.functional.logsigmoid nn.functional.relu6"
    ),
}


def flag_gems() -> list[PublicCase]:
    """A case per operator: the first sample of PyTorch's tests with a tensor of more than one dimension."""
    from torch.testing._internal.common_methods_invocations import op_db

    table = {row.partition(".")[0] for row in _names_of_flag_gems()}
    out = {name for names in _LEFT_OUT.values() for name in names.split()}
    infos = [info for info in op_db if not info.variant_test_name and info.name not in out]
    return [_gems(info) for info in infos if {info.name, info.aten_name} & table]


def _names_of_flag_gems() -> list[str]:
    """From its source: to import it needs a GPU."""
    spec = importlib.util.find_spec("flag_gems")
    assert spec is not None
    assert spec.origin is not None
    return re.findall(r'^ +\(?"([\w.]+)",', Path(spec.origin).read_text(), re.MULTILINE)


def _gems(info: Any) -> PublicCase:
    def samples(kind: torch.dtype) -> Any:
        found = list(info.sample_inputs("cpu", kind, requires_grad=False))
        sized = [one for one in found if isinstance(one.input, Tensor) and one.input.dim() > 1 and one.input.numel()]
        return (sized or found)[0]

    kind = next(k for k in (torch.float32, torch.int32, torch.bool) if k in info.dtypes)
    parts: dict[str, Any] = {}

    def inputs(_: torch.Generator) -> dict[str, Any]:
        torch.manual_seed(0)
        one = samples(kind)
        leaves, parts["tree"] = tree_flatten(((one.input, *one.args), one.kwargs))
        parts["leaves"] = ["cuda" if _gpus() and isinstance(leaf, (str, torch.device)) and str(leaf) == "cpu" else leaf
                           for leaf in leaves]  # fmt: skip
        return {f"t{n}": leaf for n, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}

    def reference(**given: Tensor) -> Any:
        leaves = [given.get(f"t{n}", leaf) for n, leaf in enumerate(parts["leaves"])]
        args, kwargs = tree_unflatten(leaves, parts["tree"])
        return info.op(*args, **kwargs)

    def operator(**given: Tensor) -> Any:
        with _Gems() as gems:
            out = reference(**given)
        if not gems.used:
            raise LookupError("its sample calls no function of FlagGems")
        return out

    return PublicCase(info.name, lambda: operator, reference, inputs, grad=False)


def _installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def cases() -> dict[str, PublicCase]:
    """All of them, under the names of their package and operator."""
    groups = [("liger", LIGER), ("fla", FLA), *((name, each) for name, each in SMALLER.items() if _installed(name))]
    if _installed("flag_gems"):
        groups.append(("flag_gems", flag_gems()))
    return {f"{package}.{c.name}": c for package, group in groups for c in group}
