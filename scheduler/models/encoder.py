"""Encoders from folders of the hub: `Model.from_pretrained`. A text becomes a vector, or two texts a score.

`transformers` has the class that the folder names, so each family of encoders is computed by its own code. The files
of sentence-transformers say how a vector comes from the tokens' vectors. Texts become tokens before the model, in
threads or processes of its own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from paellapy.instrument.env import install_line
from paellapy.scheduler.models.model_folder import LanguageModelError, read_json, read_tokenizer
from paellapy.scheduler.models.text_reader import TextReader

EMBEDDING, RERANK = "embedding", "rerank"  # kinds of models
_INPUTS = ("input_ids", "attention_mask", "token_type_ids")
# Families whose first position is that behind the padding token's number
_SHIFTED = ("roberta", "xlm-roberta", "camembert", "mpnet", "xlm-roberta-xl", "roberta-prelayernorm")
_LONGEST = 512  # tokens, of a folder that does not say


@dataclass(frozen=True, slots=True)
class Encoder:
    """An encoder, ready for `Model.from_torch`."""

    name: str
    module: torch.nn.Module
    example: dict[str, Any]
    reader: TextReader
    takes: dict[str, Any]
    task: dict[str, Any]
    lengths: dict[str, dict[int, tuple[int, ...]]] | None


def read_encoder(
    path: str | Path, length: int | Sequence[int] | None = None, truncate: bool = False, prompt: str | None = None
) -> Encoder:
    """See `Model.from_pretrained`."""
    folder = Path(path)
    parts = _parts(folder)
    kind, inner_at = parts[0]
    inner_folder = folder / inner_at
    config = read_json(inner_folder / "config.json")
    lower, longest = _limits(folder, inner_folder, config)
    if length is None:
        length = [*(n for n in (32 << k for k in range(12)) if n < longest), longest]
    sizes = (length,) if isinstance(length, int) else tuple(length)
    if not sizes or not all(isinstance(n, int) and 1 <= n <= longest for n in sizes):
        raise LanguageModelError(
            f"{folder}: length={length!r}; give sizes from 1 to {longest} tokens, or one", path=folder, field="length",
            given=length, limit=longest,
        )  # fmt: skip
    inner = _load(inner_folder, kind)
    accepted = inspect.signature(inner.forward).parameters
    names = [name for name in _INPUTS if name in accepted]
    if (config.get("type_vocab_size") or 0) < 1 and "token_type_ids" in names:
        names.remove("token_type_ids")
    fixed = isinstance(length, int)
    pad = int(config.get("pad_token_id") or 0) if fixed else None
    if kind == RERANK:
        module: torch.nn.Module = Scorer(folder, inner, config)
    else:
        module = Embedder(inner, [_PARTS[name](folder / at) for name, at in parts[1:]])
    example = {name: torch.zeros(1, sizes[-1], dtype=torch.int64) for name in names}
    example["attention_mask"] += 1
    reader = TextReader(
        read_tokenizer(inner_folder), names, sizes[-1], pad, truncate, lower,
        _prompt(folder, prompt) if kind == EMBEDDING else "",
    )  # fmt: skip
    takes = {"text": str} if kind == EMBEDDING else {"query": str, "document": str}
    task = {"kind": kind, "inputs": names, "length": sizes[-1], "pad": pad}
    lengths = None if fixed else {"input_ids": {1: sizes}}
    return Encoder(folder.resolve().name, module, example, reader, takes, task, lengths)


# -- the folder's files


def _parts(folder: Path) -> list[tuple[str, str]]:
    """The model's kind and the folder of its encoder; then the parts behind it, each with its folder."""
    path = folder / "modules.json"
    if not path.exists():
        names = read_json(folder / "config.json").get("architectures") or ["?"]
        if names[0].endswith("ForSequenceClassification"):
            return [(RERANK, "")]
        if names[0].endswith(("ForCausalLM", "LMHeadModel")):
            raise LanguageModelError(
                f"{folder} holds {names[0]}, which writes texts; this takes encoders", path=folder,
                field="architectures", given=names[0],
            )  # fmt: skip
        return [(EMBEDDING, ""), ("Pooling", "")]
    found = [(str(each["type"]).rpartition(".")[2], str(each["path"])) for each in read_json(path, list)]
    given = [name for name, _ in found]
    if given == ["Transformer"]:
        return [(RERANK, found[0][1])]
    if given[:1] != ["Transformer"] or not set(given[1:]) <= _PARTS.keys() or "Pooling" not in given:
        raise LanguageModelError(
            f"{path}: its parts are {', '.join(given)}; supported are Transformer, then {', '.join(_PARTS)}",
            path=path, field="modules", given=given, limit=list(_PARTS),
        )  # fmt: skip
    return [(EMBEDDING, found[0][1]), *found[1:]]


def _load(folder: Path, kind: str) -> Any:
    try:
        import transformers
    except ImportError as e:
        said = f"encoders need the package transformers ({e}): {install_line('encoders')}"
        raise LanguageModelError(said, path=folder, field="transformers") from None
    known = transformers.AutoModel if kind == EMBEDDING else transformers.AutoModelForSequenceClassification
    shows = transformers.utils.logging.is_progress_bar_enabled()
    logging: Any = transformers.utils.logging
    logging.disable_progress_bar()
    try:
        # Neither code nor pickles of a folder are run
        safely = {"local_files_only": True, "trust_remote_code": False, "use_safetensors": True}
        return known.from_pretrained(folder, **safely).eval()
    except Exception as e:
        said = f"{folder} cannot be loaded by transformers {transformers.__version__} ({type(e).__name__}: {e})"
        raise LanguageModelError(f"{said}: give the folder of an encoder with *.safetensors", path=folder) from e
    finally:
        if shows:
            logging.enable_progress_bar()


def _limits(folder: Path, inner: Path, config: Mapping[str, Any]) -> tuple[bool, int]:
    """Whether texts are turned to lower case, and the most tokens of a text, special ones included."""
    positions = config.get("max_position_embeddings") or _LONGEST
    if config.get("model_type") in _SHIFTED:
        positions -= int(config.get("pad_token_id") or 0) + 1
    about, tokenizer = (read_json(at) if at.exists() else {} for at in (
        folder / "sentence_bert_config.json", inner / "tokenizer_config.json"
    ))  # fmt: skip
    longest = about.get("max_seq_length") or tokenizer.get("model_max_length") or positions
    return bool(about.get("do_lower_case")), int(min(positions, longest))


def _prompt(folder: Path, given: str | None) -> str:
    """The text before every text: given, or the folder's own."""
    path = folder / "config_sentence_transformers.json"
    about = read_json(path) if path.exists() else {}
    named = about.get("prompts") or {}
    if given is None:
        return str(named.get(about.get("default_prompt_name"), ""))
    return str(named.get(given, given))


# -- from the tokens' vectors to the result


def _mean(x: Tensor, mask: Tensor) -> Tensor:
    weights = mask.unsqueeze(-1).to(x.dtype)
    return (x * weights).sum(1) / weights.sum(1).clamp(min=1e-9)


def _mean_sqrt(x: Tensor, mask: Tensor) -> Tensor:
    weights = mask.unsqueeze(-1).to(x.dtype)
    return (x * weights).sum(1) / weights.sum(1).clamp(min=1e-9).sqrt()


def _weighted_mean(x: Tensor, mask: Tensor) -> Tensor:
    return _mean(x, mask.cumsum(1) * mask)


def _max(x: Tensor, mask: Tensor) -> Tensor:
    return x.masked_fill(mask.unsqueeze(-1) == 0, torch.finfo(x.dtype).min).max(1).values


def _last(x: Tensor, mask: Tensor) -> Tensor:
    at = (mask.sum(1) - 1).clamp(min=0).view(-1, 1, 1).expand(-1, 1, x.shape[-1])
    return x.gather(1, at).squeeze(1)


# By their names in the files of sentence-transformers, and by those of older files
_POOLINGS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cls": lambda x, mask: x[:, 0],
    "max": _max,
    "mean": _mean,
    "mean_sqrt_len_tokens": _mean_sqrt,
    "weightedmean": _weighted_mean,
    "lasttoken": _last,
}
_OLDER = ("cls_token", "max_tokens", "mean_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken")


class Pooling(torch.nn.Module):  # type: ignore[misc]
    """One vector from those of the tokens."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        path = folder / "config.json"
        about = read_json(path) if folder.name.endswith("Pooling") else {}
        older = [name for name, old in zip(_POOLINGS, _OLDER, strict=True) if about.get(f"pooling_mode_{old}")]
        modes = about.get("pooling_mode") or older or "mean"
        self.modes = [modes] if isinstance(modes, str) else list(modes)
        if not set(self.modes) <= _POOLINGS.keys():
            raise LanguageModelError(
                f"{path}: pooling {', '.join(self.modes)} is not supported; supported are {', '.join(_POOLINGS)}",
                path=path, field="pooling_mode", given=self.modes, limit=list(_POOLINGS),
            )  # fmt: skip
        if about.get("include_prompt") is False:
            said = f"{path}: include_prompt=false is not supported"
            raise LanguageModelError(said, path=path, field="include_prompt", given=False)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return torch.cat([_POOLINGS[name](x.float(), mask) for name in self.modes], 1)


class Dense(torch.nn.Module):  # type: ignore[misc]
    """A layer behind the pooling."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        about = read_json(folder / "config.json")
        weights = load_file(folder / "model.safetensors")
        self.linear = torch.nn.Linear(about["in_features"], about["out_features"], bias="linear.bias" in weights)
        self.load_state_dict(weights)
        self.activation = _activation(folder, about.get("activation_function", "Tanh"))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.activation(self.linear(x.to(self.linear.weight.dtype)))


class Normalize(torch.nn.Module):  # type: ignore[misc]
    """Vectors of length one."""

    def __init__(self, folder: Path) -> None:
        super().__init__()

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return torch.nn.functional.normalize(x, dim=-1)


_PARTS = {part.__name__: part for part in (Pooling, Dense, Normalize)}
_ACTIVATIONS = ("Identity", "Tanh", "Sigmoid", "ReLU", "GELU")


def _activation(folder: Path, name: str) -> torch.nn.Module:
    name = name.rpartition(".")[2]
    if name not in _ACTIVATIONS:
        raise LanguageModelError(
            f"{folder}: the activation {name} is not supported; supported are {', '.join(_ACTIVATIONS)}", path=folder,
            field="activation_function", given=name, limit=list(_ACTIVATIONS),
        )  # fmt: skip
    return getattr(torch.nn, name)()


class Embedder(torch.nn.Module):  # type: ignore[misc]
    """An encoder, and the parts that make one vector of its result."""

    def __init__(self, inner: Any, parts: Sequence[torch.nn.Module]) -> None:
        super().__init__()
        self.inner, self.parts = inner, torch.nn.ModuleList(parts)
        self.config = inner.config  # names the padding token

    def forward(self, **inputs: Tensor) -> dict[str, Tensor]:
        x = self.inner(**inputs).last_hidden_state
        for part in self.parts:
            x = part(x, inputs["attention_mask"])
        return {"embedding": x.float(), "tokens": inputs["attention_mask"].sum(1)}


class Scorer(torch.nn.Module):  # type: ignore[misc]
    """A classifier of one class: how well two texts match."""

    def __init__(self, folder: Path, inner: Any, config: Mapping[str, Any]) -> None:
        super().__init__()
        labels = inner.config.num_labels
        if labels != 1:
            raise LanguageModelError(
                f"{folder} has {labels} classes; a reranker has one score. Use pp.Model.from_torch for classifiers",
                path=folder, field="num_labels", given=labels, limit=1,
            )  # fmt: skip
        ours = config.get("sentence_transformers") or {}
        name = ours.get("activation_fn") or config.get("sbert_ce_default_activation_function") or "Sigmoid"
        self.inner, self.activation = inner, _activation(folder, name)
        self.config = inner.config

    def forward(self, **inputs: Tensor) -> dict[str, Tensor]:
        score = self.activation(self.inner(**inputs).logits.float()).squeeze(-1)
        return {"score": score, "tokens": inputs["attention_mask"].sum(1)}
