"""`LanguageModel`: a folder as the hub has it, with targets and limits, as a user passes it to the engine."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from paellapy.instrument.device import Device, empty
from paellapy.instrument.device.driver import CudaArray
from paellapy.scheduler.language.batcher import PIECES, Batch, Chunk, most_tiles
from paellapy.scheduler.language.config import DecoderConfig, read_config, token_ids
from paellapy.scheduler.language.decoder import Decoder, State, element_type, tile_tokens
from paellapy.scheduler.language.kernels import ROW, TILE
from paellapy.scheduler.language.pages import PAGE
from paellapy.scheduler.language.sampling import OUT_WORDS
from paellapy.scheduler.language.weights import decoder_weights, read_tensors
from paellapy.scheduler.models.model import Model
from paellapy.scheduler.models.model_folder import LanguageModelError, read_json
from paellapy.scheduler.models.tensors import Arrays, TensorSpec

if TYPE_CHECKING:
    from paellapy.scheduler.language.text import TextCodec

_TYPES = ("bfloat16", "float16", "float32")
_ALIGNED = 16  # bytes, by which the GPU's copy engine takes rows
_SMALLEST_CHUNK = 64  # tokens
_SIZES = 8  # captured sizes of a program
PACED = {"paced": 1.0}  # a step's early end only brings the next step early: see the policy `slack`
_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


class LanguageModel:
    """A language model to be served: `engine.load(pp.LanguageModel("models/Qwen3-0.6B", ttft_ms=200, tbt_ms=20))`.

    The folder has config.json, *.safetensors and tokenizer.json, as downloaded from the hub.
    """

    def __init__(  # noqa: PLR0913  the options of a model
        self,
        path: str | Path,
        *,
        name: str | None = None,
        ttft_ms: float | None = None,
        tbt_ms: float | None = None,
        kv_gb: float | None = None,
        context: int | None = None,
        sequences: int = 64,
        chunk: int = 1024,
        capture: str = "on_demand",
        dtype: str | None = None,
        priority: int = 0,
        share: float = 1.0,
        params: Mapping[str, float] | None = None,
    ) -> None:
        """`ttft_ms` and `tbt_ms` are targets: time to the first token, and between two tokens.

        `kv_gb` is the memory for keys and values; None: as much as `sequences` of full length need, but at most half of
        the engine's free memory. `context`: the longest text, prompt and answer, in tokens; None: the model's own.
        `sequences`: how many texts may be written at once. `chunk`: how many tokens of prompts enter in one step.
        `capture`: when programs for smaller steps are captured, "on_demand" or "ahead", while the model is loaded.
        `dtype`: "bfloat16", "float16" or "float32"; None: the folder's. `priority`, `share` and `params` are those of
        other models.
        """
        self.path = Path(path)
        config = read_config(self.path)
        self.name = name or self.path.resolve().name
        for field, given in (("ttft_ms", ttft_ms), ("tbt_ms", tbt_ms), ("kv_gb", kv_gb)):
            if given is not None and not (_is_number(given) and 0 < given < math.inf):
                raise self._wrong(field, given, "must be a finite number above 0, or None")
        if context is not None and not (_is_whole(context) and PAGE <= context <= config.context):
            raise self._wrong("context", context, f"must be an integer from {PAGE} to the model's {config.context}")
        if not (_is_whole(sequences) and 1 <= sequences <= 1024):
            raise self._wrong("sequences", sequences, "must be an integer from 1 to 1024")
        if not (_is_whole(chunk) and _SMALLEST_CHUNK <= chunk <= 8192):
            raise self._wrong("chunk", chunk, f"must be an integer from {_SMALLEST_CHUNK} to 8192")
        if capture not in ("on_demand", "ahead"):
            raise self._wrong("capture", capture, "must be 'on_demand' or 'ahead'")
        if dtype is not None and dtype not in _TYPES:
            raise self._wrong("dtype", dtype, f"must be one of {', '.join(_TYPES)}, or None")
        self.config: DecoderConfig = config if dtype is None else replace(config, dtype=dtype)
        item = element_type(self.config.dtype).itemsize
        for n in (self.config.width, self.config.heads * self.config.head_width, self.config.ffn_width):
            if n * item % _ALIGNED:
                raise self._wrong("dtype", self.config.dtype, f"gives rows of {n * item} bytes of weights: only "
                                  f"multiples of {_ALIGNED} are supported")  # fmt: skip
        self.ttft_ms, self.tbt_ms, self.kv_gb = ttft_ms, tbt_ms, kv_gb
        self.context, self.sequences, self.capture = context or config.context, sequences, capture
        self.priority, self.share, self.params = priority, share, dict(params or {})
        self.codec = _codec(self.path)
        about = self.path / "generation_config.json"
        said = read_json(about) if about.exists() else {}
        self.defaults = {key: said[key] for key in _DEFAULTS if said.get(key) is not None}
        self.eos = tuple({*config.eos, *token_ids(said.get("eos_token_id"))})
        self.batch_sizes, self.chunk_sizes = step_sizes(sequences), chunk_sizes(chunk)

    def pages(self, free_bytes: int) -> int:
        """Pages of keys and values, where so much memory is free."""
        page = PAGE * self.config.token_bytes
        if self.kv_gb is None:
            count = min(self.sequences * -(-self.context // PAGE), free_bytes // 2 // page)
        else:
            count = int(self.kv_gb * 1e9) // page
        if count < 1:
            limit = self.kv_gb if self.kv_gb is not None else free_bytes * 1e-9
            raise self._wrong("kv_gb", limit, f"is less than one page of {page:,} bytes: give more memory")
        return count

    def state_bytes(self, pages: int) -> int:
        """What its texts take on the GPU, apart from the weights."""
        shapes = State.shapes(self.config, self.sequences, self.context, pages)
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in shapes.values())

    def programs(self, pages: int) -> tuple[Model, Model]:
        """Its prefill and its decode step as models of the engine, over one state."""
        shared = _Shared(self, pages)
        config = self.config
        about: dict[str, Any] = {
            "priority": self.priority, "share": self.share, "params": self.params, "capture": self.capture,
        }  # fmt: skip
        layout = ChunkLayout(config, self.chunk_sizes[0])

        def prefill(weights: Arrays, inputs: Arrays, outputs: Arrays) -> None:
            words = inputs["words"]
            chunk, rows = layout.split(words.reshape(-1), words.shape[0])
            out = outputs["out"].reshape(-1)[: PIECES * OUT_WORDS].reshape(PIECES, OUT_WORDS)
            Decoder(config, weights, state_of(weights), empty).prefill(chunk, rows, out)

        def decode(weights: Arrays, inputs: Arrays, outputs: Arrays) -> None:
            Decoder(config, weights, state_of(weights), empty).decode(inputs["rows"], outputs["out"])

        out_columns = -(-PIECES * OUT_WORDS // self.chunk_sizes[0])
        return (
            Model(
                f"{self.name} prefill", prefill, inputs={"words": TensorSpec((layout.columns,), np.int32)},
                outputs={"out": TensorSpec((out_columns,), np.int32)}, weights=_Program(shared, counts=False),
                batch=self.chunk_sizes, target_ms=self.ttft_ms, instances=1, **about,
            ),
            Model(
                f"{self.name} decode", decode, inputs={"rows": TensorSpec((ROW.itemsize // 4,), np.int32)},
                outputs={"out": TensorSpec((OUT_WORDS,), np.int32)}, weights=_Program(shared, counts=True),
                batch=self.batch_sizes, target_ms=self.tbt_ms, instances=2, **{**about, "params": PACED | self.params},
            ),
        )  # fmt: skip

    def _wrong(self, field: str, given: Any, why: str) -> LanguageModelError:
        return LanguageModelError(f"language model {self.name!r}: {field}={given!r} {why}", model=self.name,
                                  field=field, given=given)  # fmt: skip

    def __repr__(self) -> str:
        return f"<LanguageModel {self.name!r}: {self.config.architecture}, {self.context:,} tokens>"


class ChunkLayout:
    """Where the parts of a chunk lie in its one input, whose rows are the chunk's tokens."""

    def __init__(self, config: DecoderConfig, smallest: int) -> None:
        self._tile = tile_tokens(config)
        self.columns = -(-self._words(smallest) // smallest)

    def split(self, words: Any, size: int) -> tuple[dict[str, Any], Any]:
        """Views of the parts of a flat input: those that `Decoder.prefill` reads, and the rows."""
        tiles = most_tiles(size, self._tile)
        shapes = {"tokens": (size,), "positions": (size,), "slots": (size,), "tiles": (tiles, TILE.value)}
        found, at = {}, 0
        for name, shape in shapes.items():
            n = math.prod(shape)
            found[name] = words[at : at + n].reshape(*shape)
            at += n
        width = ROW.itemsize // 4
        return found, words[at : at + PIECES * width].reshape(PIECES, width)

    def write(self, words: Any, chunk: Chunk, size: int) -> None:
        """Fills the flat input of a program of this size on the host. Zeros are entries that are not used."""
        parts, rows = self.split(words, size)
        for name, part in parts.items():
            given = getattr(chunk, name)
            part[: len(given)], part[len(given) :] = given, 0
        rows[...] = words_of(chunk.rows)

    def _words(self, size: int) -> int:
        return 3 * size + int(TILE.value) * most_tiles(size, self._tile) + PIECES * ROW.itemsize // 4


def words_of(rows: Any) -> Any:
    """Records of `ROW` as words."""
    return rows.view(np.int32).reshape(len(rows), -1)


def write_rows(words: Any, batch: Batch) -> None:
    """Fills the input of a decode step on the host; the rows behind the batch are not used."""
    n = len(batch.rows)
    words[:n] = words_of(batch.rows)
    words[n:] = 0


class _Shared:
    """Weights and state of a language model on a device, for both of its programs."""

    def __init__(self, model: LanguageModel, pages: int) -> None:
        self._model, self._pages = model, pages
        self._tensors = read_tensors(model.path)
        self._placed: Arrays | None = None
        state = model.state_bytes(pages)
        tensors = {name: each for name, each in self._tensors.items() if not (model.config.tied and "lm_head" in name)}
        item = element_type(model.config.dtype).itemsize
        rotary = 4 * model.context * model.config.head_width
        self.nbytes = state + rotary + sum(each.size * item for each in tensors.values())

    def place(self, device: Device) -> Arrays:
        """The arrays, which are made once."""
        if self._placed is None:
            arrays = self._arrays()
            found = {id(array): device.array(array) for array in arrays.values()}
            self._finish(device, {name: found[id(array)] for name, array in arrays.items()})
        return dict(self._placed or {})

    def parts(self) -> list[Any]:
        """The bytes of each array."""
        unique = {id(array): array for array in self._arrays().values()}
        return [array.reshape(-1).view(np.uint8) for array in unique.values()]

    def place_over(self, device: Device, at: Callable[[int, int], Any]) -> Arrays:
        """As `place`, with the weights in given memory, and the state in memory of its own."""
        arrays = self._arrays()
        places = {key: k for k, key in enumerate({id(array): None for array in arrays.values()})}
        found = {
            name: viewed(at(places[id(array)], array.nbytes), array.shape, array.dtype)
            for name, array in arrays.items()
        }
        self._finish(device, found)
        return dict(self._placed or {})

    def _arrays(self) -> Arrays:
        """The weights on the host; arrays that are the same have two names."""
        model, dtype = self._model, element_type(self._model.config.dtype)
        arrays = decoder_weights(self._tensors, model.config, model.context)
        made: dict[int, Any] = {}
        for name, array in arrays.items():
            if id(array) not in made:
                table = name in ("cosines", "sines")
                made[id(array)] = np.ascontiguousarray(array, array.dtype if table else dtype)
        return {name: made[id(array)] for name, array in arrays.items()}

    def _finish(self, device: Device, weights: Arrays) -> None:
        model = self._model
        state = State.on(device, model.config, model.sequences, model.context, self._pages)
        self._placed = weights | {f"state.{name}": getattr(state, name) for name in state.__slots__}
        self._tensors = {}


def viewed(raw: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
    """Device memory of bytes as an array of this shape and type."""
    if isinstance(raw, CudaArray):
        return CudaArray.over(raw.device, raw.ptr, shape, dtype, raw)
    return raw.view(dtype).reshape(shape)


class _Program:
    """The weights of one of the two programs: both are given the same arrays, and one counts their bytes."""

    uses_torch = keeps_state = False
    stateful = whole_batches = True

    def __init__(self, shared: _Shared, counts: bool) -> None:
        self._shared = shared
        self.nbytes = shared.nbytes if counts else 0

    def place(self, model: str, device: Device) -> Arrays:
        return self._shared.place(device)

    def parts(self) -> list[Any]:
        """The program that counts the bytes holds the weights, where they come and go."""
        return self._shared.parts() if self.nbytes else []

    def place_over(self, model: str, device: Device, at: Callable[[int, int], Any]) -> Arrays:
        return self._shared.place_over(device, at)

    def preserved(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()  # inputs of zeros are rows that are not used


def state_of(weights: Arrays) -> State:
    """The state among the arrays of a program."""
    return State(**{name: weights[f"state.{name}"] for name in State.__slots__})


def _codec(folder: Path) -> TextCodec:
    try:
        from paellapy.scheduler.language.text import TextCodec
    except ModuleNotFoundError as e:
        raise LanguageModelError(
            f"language models need the package {e.name!r}: install paellapy with the extra 'language'", field="extra",
            given=e.name,
        ) from None  # fmt: skip
    return TextCodec(folder)


def step_sizes(sequences: int) -> tuple[int, ...]:
    """The captured sizes of decode steps, in texts. A product of up to 16 rows takes the time of one of 16.

    >>> step_sizes(4), step_sizes(256)
    ((1, 4), (1, 4, 16, 32, 64, 128, 256))
    """
    doubled = [1 << k for k in range((sequences - 1).bit_length() - 1, 3, -1)]
    wanted = [sequences, 1, *doubled, 4][:_SIZES]
    return tuple(sorted({size for size in wanted if size <= sequences}))


def chunk_sizes(chunk: int) -> tuple[int, ...]:
    """The captured sizes of chunks, in tokens: they double, with as many between the largest as a program may have.

    >>> chunk_sizes(1024)
    (64, 128, 192, 256, 384, 512, 768, 1024)
    """
    sizes = [-(-chunk // PAGE) * PAGE]
    while sizes[-1] > _SMALLEST_CHUNK:
        sizes.append(max(_SMALLEST_CHUNK, 1 << ((sizes[-1] - 1).bit_length() - 1)))
    found = {_SMALLEST_CHUNK, *sizes[: _SIZES - 1]}
    between = [-(-3 * size // 4 // PAGE) * PAGE for size in sizes if size >= 4 * _SMALLEST_CHUNK]
    return tuple(sorted(found | {*between[: _SIZES - len(found)]}))


def _is_number(given: Any) -> bool:
    return isinstance(given, int | float) and not isinstance(given, bool)


def _is_whole(given: Any) -> bool:
    return isinstance(given, int) and not isinstance(given, bool)
