"""The steps of a decoder: the launches that compute the next tokens, over given memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from triton import next_power_of_2
from triton.tools.tensor_descriptor import TensorDescriptor

from paellapy.instrument.device.base import Device
from paellapy.scheduler.language import kernels as _kernels
from paellapy.scheduler.language.config import DecoderConfig
from paellapy.scheduler.language.pages import PAGE
from paellapy.scheduler.language.sampling import choose

kernels: Any = _kernels  # launched as kernel[grid](…)

Arrays = Mapping[str, Any]
Shape = tuple[int, ...]
_FEWEST_HEADS = 16  # rows of a product on tensor cores
_MOST_PARTS = 16  # blocks that share one row's tokens


@dataclass(frozen=True, slots=True)
class State:
    """What stays on the GPU between steps: of each sequence its last token, its pages and the counts of its tokens; and
    all keys and values. Sequences and pages count from 1.
    """

    tokens: Any  # (sequences)
    table: Any  # (sequences, pages of the longest)
    seen: Any  # (sequences, vocabulary): how often each token was chosen, for penalties
    mask: Any  # (sequences, vocabulary / 32): a bit for each token that may be chosen, where rows ask for it
    keys: Any  # (layers, pages, heads, PAGE, elements)
    values: Any

    @staticmethod
    def shapes(config: DecoderConfig, sequences: int, context: int, pages: int) -> dict[str, tuple[Shape, Any]]:
        """Shape and element type of each array, for this many sequences and pages."""
        n, whole, dtype = sequences + 1, np.dtype(np.int32), element_type(config.dtype)
        cache = (config.layers, pages + 1, config.kv_heads, PAGE, config.head_width), dtype
        widths = {"table": -(-context // PAGE), "seen": config.vocabulary, "mask": -(-config.vocabulary // 32)}
        rows = {name: ((n, width), whole) for name, width in widths.items()}
        return {"tokens": ((n,), whole), **rows, "keys": cache, "values": cache}

    @classmethod
    def on(cls, device: Device, config: DecoderConfig, sequences: int, context: int, pages: int) -> State:
        shapes = cls.shapes(config, sequences, context, pages)
        cache = {name: device.empty(*shapes[name]) for name in ("keys", "values")}
        rest = {name: device.array(np.zeros(*shapes[name])) for name in ("tokens", "table", "seen", "mask")}
        return cls(**rest, **cache)


def element_type(name: str) -> np.dtype[Any]:
    import ml_dtypes

    return np.dtype(getattr(ml_dtypes, name, name))


class Decoder:
    """Launches the steps of one model. `weights` are its tensors by the names of the hub, with `qkv`, `gate_up` joined,
    and the rotary table."""

    def __init__(self, config: DecoderConfig, weights: Arrays, state: State, empty: Any) -> None:
        self.config, self.weights, self.state, self._empty = config, weights, state, empty
        self._precision = "ieee" if config.dtype == "float32" else "tf32"
        self._between: dict[Shape, Any] = {}  # results between two kernels, by shape: all layers use the same memory

    # -- steps

    def decode(self, rows: Any, out: Any) -> Any:
        """One token for each row: its last one enters, the next is chosen. Returns the logits."""
        c, w, state = self.config, self.weights, self.state
        batch, pages = rows.shape[0], state.table.shape[1]
        x = self._new(batch, c.width)
        kernels.embed[(batch,)](
            rows, state.tokens, w["embed"], x, state.table, pages, D=c.width, BLOCK=next_power_of_2(c.width)
        )  # fmt: skip
        attend, mixed = self.attention(rows), self._new(batch, c.heads * c.head_width)
        qkv, wide = self._new(batch, c.qkv_width), None
        for k in range(c.layers):
            self._product(x, w[f"{k}.qkv"], qkv, norm=w[f"{k}.norm1"])
            attend(qkv, k, mixed)
            self._product(mixed, w[f"{k}.out"], x, residual=x)
            wide = self._gated(x, k, wide)
            self._product(wide, w[f"{k}.down"], x, residual=x)
        return self._choose(x, rows, out, None)

    def prefill(self, chunk: Arrays, rows: Any, out: Any) -> Any:
        """A chunk of tokens enters; for each of `rows`, whose sequence's last token it has, the next is chosen.

        `chunk` has tokens, positions, slots and tiles, as in `batcher.Chunk`.
        """
        c, w, state = self.config, self.weights, self.state
        tokens, tiles = chunk["tokens"], chunk["tiles"]
        count, pages = tokens.shape[0], state.table.shape[1]
        block = min(4096, next_power_of_2(c.vocabulary))
        kernels.forget_tokens[tiles.shape[0], -(-c.vocabulary // block)](
            tiles, state.seen, V=c.vocabulary, BLOCK=block
        )  # fmt: skip
        kernels.count_tokens[(tiles.shape[0],)](
            tokens, tiles, state.seen, V=c.vocabulary, BLOCK=next_power_of_2(tile_tokens(c))
        )  # fmt: skip
        x = self._new(count, c.width)
        kernels.embed_chunk[(count,)](tokens, w["embed"], x, D=c.width, BLOCK=next_power_of_2(c.width))
        qkv, mixed, wide = self._new(count, c.qkv_width), self._new(count, c.heads * c.head_width), None
        for k in range(c.layers):
            self._product(x, w[f"{k}.qkv"], qkv, norm=w[f"{k}.norm1"])
            kernels.turn_and_store[(count,)](
                qkv, w.get(f"{k}.qkv_bias"), w.get(f"{k}.q_norm"), w.get(f"{k}.k_norm"), w["cosines"], w["sines"],
                chunk["positions"], chunk["slots"], state.keys[k], state.values[k], H=c.heads,
                KV=c.kv_heads, HD=c.head_width, PAGE=PAGE, EPS=c.norm_eps, HP=next_power_of_2(c.heads), launch_pdl=True,
            )  # fmt: skip
            kernels.attend_chunk[tiles.shape[0], c.kv_heads](
                qkv, tiles, state.table, state.keys[k], state.values[k], mixed, pages, SCALE=c.head_width**-0.5,
                WINDOW=c.window, PRECISION=self._precision, H=c.heads, KV=c.kv_heads, HD=c.head_width, PAGE=PAGE,
                G=c.group, BM=tile_rows(c), BN=64, launch_pdl=True,
            )  # fmt: skip
            self._product(mixed, w[f"{k}.out"], x, residual=x)
            wide = self._gated(x, k, wide)
            self._product(wide, w[f"{k}.down"], x, residual=x)
        return self._choose(x, rows, out, rows)

    # -- parts of a step

    def attention(self, rows: Any) -> Callable[[Any, int, Any], None]:
        """Launches a layer's attention of one new token per row: takes queries, keys and values, the layer, and where
        the results go.
        """
        c, w, state, batch = self.config, self.weights, self.state, rows.shape[0]
        parts, heads = self._parts(batch), max(_FEWEST_HEADS, next_power_of_2(c.group))
        of_parts = batch * c.kv_heads * parts * heads
        partial, sums = self._new(of_parts, c.head_width, dtype=np.float32), self._new(of_parts, 2, dtype=np.float32)
        arrived = self._zeros(batch * c.kv_heads)

        def attend(qkv: Any, k: int, mixed: Any) -> None:
            kernels.attend[batch, c.kv_heads, parts](
                qkv, w.get(f"{k}.qkv_bias"), w.get(f"{k}.q_norm"), w.get(f"{k}.k_norm"), w["cosines"], w["sines"], rows,
                state.table, state.keys[k], state.values[k], partial, sums, arrived, mixed, state.table.shape[1],
                EPS=c.norm_eps, SCALE=c.head_width**-0.5, WINDOW=c.window, PRECISION=self._precision, H=c.heads,
                KV=c.kv_heads, HD=c.head_width, PAGE=PAGE, G=c.group, GP=heads, S=parts, BN=64,
                num_stages=2, launch_pdl=True,
            )  # fmt: skip

        return attend

    def _choose(self, x: Any, rows: Any, out: Any, picked: Any) -> Any:
        c, w, batch = self.config, self.weights, rows.shape[0]
        logits = self._new(batch, c.vocabulary)
        self._product(x, w["head"], logits, norm=w["norm"], rows=picked)
        state = self.state
        choose(logits, rows, state.mask, state.seen, state.tokens, out, c.dtype, self._empty)
        return logits

    def _gated(self, x: Any, k: int, wide: Any) -> Any:
        c, w, batch = self.config, self.weights, x.shape[0]
        wide = self._new(batch, c.ffn_width) if wide is None else wide
        if batch == 1:
            self._row_product(x, w[f"{k}.gate_up"], wide, w[f"{k}.norm2"], None, gated=True)
            return wide
        both = self._reused(batch, 2 * c.ffn_width)
        self._product(x, w[f"{k}.gate_up"], both, norm=w[f"{k}.norm2"])
        block = min(1024, next_power_of_2(c.ffn_width))
        kernels.gate[batch, -(-c.ffn_width // block)](both, wide, F=c.ffn_width, BLOCK=block, launch_pdl=True)
        return wide

    def _product(
        self, x: Any, weight: Any, y: Any, *, norm: Any = None, residual: Any = None, rows: Any = None
    ) -> None:
        """y = f(x) @ weight.T + residual, where f norms, and picks rows."""
        if y.shape[0] == x.shape[0] == 1:
            self._row_product(x, weight, y, norm, residual, gated=False)
            return
        if norm is not None:
            normed = self._reused(y.shape[0], x.shape[1])
            kernels.norm[(y.shape[0],)](
                x, norm, normed, rows, EPS=self.config.norm_eps, D=x.shape[1], BLOCK=next_power_of_2(x.shape[1]),
                launch_pdl=True,
            )  # fmt: skip
            x = normed
        m, (n, k) = x.shape[0], weight.shape
        tile = product_tile(m, n, weight.dtype.itemsize)
        kernels.product[(-(-m // tile.rows) * -(-n // tile.columns),)](
            _blocks(x, tile.rows, tile.depth), _blocks(weight, tile.columns, tile.depth), residual, y, m, n, k,
            PRECISION=self._precision, BM=tile.rows, BN=tile.columns, BK=tile.depth, TURNED=tile.turned,
            STAGES=tile.stages, launch_pdl=True,
        )  # fmt: skip

    def _row_product(self, x: Any, weight: Any, y: Any, norm: Any, residual: Any, *, gated: bool) -> None:
        n, k = y.shape[1], weight.shape[1]
        bn, bk, warps = row_blocks(n, k, gated)
        kernels.row_product[(-(-n // bn),)](
            x, norm, weight, residual, y, EPS=self.config.norm_eps, N=n, K=k, NORM=norm is not None, GATED=gated,
            BN=bn, BK=bk, num_warps=warps, launch_pdl=True,
        )  # fmt: skip

    def _parts(self, batch: int) -> int:
        """Blocks that share one row's tokens: as many as give each SM four."""
        wanted = max(1, min(_MOST_PARTS, 4 * _SMS // (batch * self.config.kv_heads)))
        return 1 << (wanted.bit_length() - 1)

    def _new(self, *shape: int, dtype: Any = None) -> Any:
        return self._empty(shape, element_type(self.config.dtype) if dtype is None else np.dtype(dtype))

    def _reused(self, *shape: int) -> Any:
        if shape not in self._between:
            self._between[shape] = self._new(*shape)
        return self._between[shape]

    def _zeros(self, count: int) -> Any:
        made = self._empty((count,), np.dtype(np.int32))
        kernels.clear[(1,)](made, count, BLOCK=next_power_of_2(count))
        return made


def _blocks(array: Any, rows: int, columns: int) -> TensorDescriptor:
    """A descriptor by which the GPU's copy engine loads blocks of a matrix, with zeros outside it."""
    return TensorDescriptor(array, list(array.shape), [array.shape[1], 1], [rows, columns])


class ProductTile(NamedTuple):
    """What a block of `product` computes, and in which steps."""

    rows: int
    columns: int
    depth: int
    turned: bool
    stages: int


_STAGED_BYTES = 200 << 10  # of weights and inputs on their way to a block; an SM has 227 KiB
_SMS = 132


def product_tile(m: int, n: int, itemsize: int) -> ProductTile:
    """The tile for m rows and n columns.

    Chosen on an H200 for products of 0.6B and 8B shapes in bf16: up to 64 rows take the time that cuBLAS takes, more
    rows up to a third more.
    """
    if m <= 256:
        rows, columns, turned = max(16, next_power_of_2(m)), 64, True
    else:
        rows, columns, turned = 128, 128, False
        if -(-m // rows) * -(-n // columns) < _SMS:
            rows = 64
    depth = (256 if rows + columns <= 192 else 128) // itemsize
    return ProductTile(rows, columns, depth, turned, min(6, _STAGED_BYTES // ((rows + columns) * depth * itemsize)))


def row_blocks(n: int, k: int, gated: bool) -> tuple[int, int, int]:
    """Rows and columns of a block's tile, and its warps, in `row_product`.

    Measured on an H200 (products of 0.6B, 1B and 8B shapes, bf16, alone in a graph): a warp reads 2 to 4 KiB of a row
    ahead; the long, gated products want many small blocks.
    """
    if gated:
        return (1, min(1024, next_power_of_2(k)), 2) if n * k >= 1 << 24 else (2, min(1024, next_power_of_2(k)), 2)
    columns = min(2048 if k <= 4096 else 4096, next_power_of_2(k))
    return (8, columns, 8) if n * k >= 1 << 24 else (4, columns, 4)


def tile_rows(config: DecoderConfig) -> int:
    """Rows of a tile of `attend_chunk`: tokens times the heads that share keys."""
    return max(64, int(next_power_of_2(config.group)))


def tile_tokens(config: DecoderConfig) -> int:
    return tile_rows(config) // config.group

