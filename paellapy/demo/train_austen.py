"""Trains the demo's language model: `python -m paellapy.demo.train_austen`, with the extras `train` and `language`.

It learns from Jane Austen's six novels, which are in the public domain, as Debian's package `r-cran-janeaustenr` has
them:

    apt-get download r-cran-janeaustenr
    dpkg-deb -x r-cran-janeaustenr_*.deb novels
    python -m paellapy.demo.train_austen novels/usr/lib/R/site-library/janeaustenr/data/Rdata.rdb

One chapter in twenty is held out, to measure the loss. The rate of learning falls with the time that is left, so a
faster machine makes a better model in the same time. The result is a folder as the hub has it.
"""

from __future__ import annotations

import json
import math
import re
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import torch.nn.functional as F
import typer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn

from paellapy.demo.models import AUSTEN
from paellapy.scheduler.models.weights import write_weights

SEED = 7
VOCABULARY = 1024
END = "<|endoftext|>"  # before and after each chapter
HELD_OUT = 20  # every 20th chapter

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "dtype": "float16",
    "vocab_size": VOCABULARY, "hidden_size": 128, "intermediate_size": 320, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5, "rope_theta": 10_000.0, "tie_word_embeddings": True, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
GENERATION = {"bos_token_id": 0, "eos_token_id": 0, "temperature": 0.7, "top_p": 0.9, "do_sample": True}
# It was trained on novels, not on chats: an answer goes on from the messages' text.
CHAT = "{{ messages | map(attribute='content') | join('\\n\\n') }}"

# ---- the text --------------------------------------------------------------------------------------------------------


def texts(file: Path) -> Iterator[str]:
    """The novels of a package of R: its file of data has one compressed vector of lines for each."""
    data, at = file.read_bytes(), 0
    while at < len(data):
        unpacker = zlib.decompressobj()
        found = unpacker.decompress(data[at + 4 :])  # behind the length of the vector
        at = len(data) - len(unpacker.unused_data)
        yield "\n".join(_lines(found))


def _lines(vector: bytes) -> Iterator[str]:
    """The texts of R's serialised vector, in its third format: each has four bytes of flags and four of length."""
    at = 23 + int.from_bytes(vector[14 + 4 : 14 + 8], "big")  # behind the name of the encoding
    at = vector.index(b"\0\0\0\x10", 18) + 4
    count, at = int.from_bytes(vector[at : at + 4], "big"), at + 4
    for _ in range(count):
        length = int.from_bytes(vector[at + 4 : at + 8], "big")
        yield vector[at + 8 : at + 8 + length].decode()
        at += 8 + length


def chapters(text: str) -> list[str]:
    """Chapters, whose paragraphs are one line each."""
    text = text.replace("_", "").replace("\r", "")
    found = []
    for part in re.split(r"(?im)^\s*chapter\s+[\divxlc]+\.?\s*$", text)[1:]:
        part = re.sub(r"(?im)^\s*(volume\s+\w+|the end|finis)\.?\s*$", "", part)
        paragraphs = (" ".join(each.split()) for each in re.split(r"\n\s*\n", part))
        found.append("\n\n".join(each for each in paragraphs if each))
    return found


def trained_tokenizer(text: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=[END], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator(text, trainer)
    return tokenizer


def tokens_of(tokenizer: Tokenizer, text: list[str]) -> Any:
    end = tokenizer.token_to_id(END)
    return torch.tensor([t for each in tokenizer.encode_batch(text) for t in (end, *each.ids)])


# ---- the model, with the names of transformers' Llama ----------------------------------------------------------------

_HEADS, _KV = CONFIG["num_attention_heads"], CONFIG["num_key_value_heads"]
_WIDTH, _HEAD, _FFN = CONFIG["hidden_size"], CONFIG["head_dim"], CONFIG["intermediate_size"]


def _turned(x: Any, cosines: Any, sines: Any) -> Any:
    first, second = x.chunk(2, -1)
    return torch.cat([first * cosines - second * sines, second * cosines + first * sines], -1)


class _Attention(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(_WIDTH, _HEADS * _HEAD, bias=False)
        self.k_proj = nn.Linear(_WIDTH, _KV * _HEAD, bias=False)
        self.v_proj = nn.Linear(_WIDTH, _KV * _HEAD, bias=False)
        self.o_proj = nn.Linear(_HEADS * _HEAD, _WIDTH, bias=False)

    def forward(self, x: Any, cosines: Any, sines: Any) -> Any:
        q, k, v = (
            product(x).unflatten(-1, (-1, _HEAD)).transpose(1, 2) for product in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = _turned(q, cosines, sines), _turned(k, cosines, sines)
        k, v = (each.repeat_interleave(_HEADS // _KV, 1) for each in (k, v))
        return self.o_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class _Mlp(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(_WIDTH, _FFN, bias=False)
        self.up_proj = nn.Linear(_WIDTH, _FFN, bias=False)
        self.down_proj = nn.Linear(_FFN, _WIDTH, bias=False)

    def forward(self, x: Any) -> Any:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class _Layer(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(_WIDTH, CONFIG["rms_norm_eps"])
        self.self_attn = _Attention()
        self.post_attention_layernorm = nn.RMSNorm(_WIDTH, CONFIG["rms_norm_eps"])
        self.mlp = _Mlp()

    def forward(self, x: Any, cosines: Any, sines: Any) -> Any:
        x = x + self.self_attn(self.input_layernorm(x), cosines, sines)
        return x + self.mlp(self.post_attention_layernorm(x))


class _Decoder(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCABULARY, _WIDTH)
        self.layers = nn.ModuleList(_Layer() for _ in range(CONFIG["num_hidden_layers"]))
        self.norm = nn.RMSNorm(_WIDTH, CONFIG["rms_norm_eps"])
        angles = CONFIG["rope_theta"] ** (-torch.arange(0, _HEAD, 2) / _HEAD)
        angles = torch.arange(CONFIG["max_position_embeddings"])[:, None] * angles
        self.turns = angles.cos(), angles.sin()
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                deep = 2 * CONFIG["num_hidden_layers"] if name.endswith(("o_proj.weight", "down_proj.weight")) else 1
                nn.init.normal_(parameter, std=0.04 / math.sqrt(deep))

    def forward(self, tokens: Any) -> Any:
        x, n = self.embed_tokens(tokens), tokens.shape[1]
        for layer in self.layers:
            x = layer(x, *(each[:n] for each in self.turns))
        return self.norm(x) @ self.embed_tokens.weight.T


# ---- training --------------------------------------------------------------------------------------------------------


def loss_of(model: Any, rows: Any) -> Any:
    return F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


def held_out_loss(model: Any, tokens: Any, length: int) -> float:
    """Mean loss of a token of the held-out chapters."""
    rows = tokens[: len(tokens) // (length + 1) * (length + 1)].reshape(-1, length + 1)
    with torch.no_grad():
        return float(np.mean([float(loss_of(model, part)) for part in rows.split(16)]))


def store(model: Any, tokenizer: Tokenizer, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    tensors = {f"model.{name}": p.detach().numpy().astype(np.float16) for name, p in model.named_parameters()}
    write_weights(folder / "model.safetensors", tensors)
    about = {"bos_token": END, "eos_token": END, "chat_template": CHAT}
    for name, value in (("config", CONFIG), ("generation_config", GENERATION), ("tokenizer_config", about)):
        (folder / f"{name}.json").write_text(json.dumps(value, indent=2) + "\n")


def main(
    novels: Annotated[Path, typer.Argument(help="Rdata.rdb of the package r-cran-janeaustenr.")],
    minutes: Annotated[float, typer.Option(help="How long to train.")] = 45.0,
    out: Annotated[Path, typer.Option(help="Folder of the model.")] = AUSTEN,
    rows: Annotated[int, typer.Option(help="Texts per step.")] = 4,
    length: Annotated[int, typer.Option(help="Tokens of a text.")] = 256,
    peak_rate: float = 4e-3,
) -> None:
    """Train the demo's language model and store it."""
    torch.manual_seed(SEED)
    found = [chapter for text in texts(novels) for chapter in chapters(text)]
    kept = [each for k, each in enumerate(found) if k % HELD_OUT]
    tokenizer = trained_tokenizer(kept)
    tokens, test = tokens_of(tokenizer, kept), tokens_of(tokenizer, found[::HELD_OUT])
    model = _Decoder()
    size = sum(p.numel() for p in model.parameters())
    print(f"{len(found)} chapters, {len(tokens):,} tokens, {size:,} parameters", flush=True)
    matrices = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() != 2]
    optimiser = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], peak_rate,
        betas=(0.9, 0.97),
    )  # fmt: skip
    began, stored, steps = time.monotonic(), time.monotonic(), 0
    while (part := (time.monotonic() - began) / (60 * minutes)) < 1:
        rate = peak_rate * min(1.0, (steps + 1) / 100) * (0.02 + 0.98 * (1 + math.cos(math.pi * part)) / 2)
        for group in optimiser.param_groups:
            group["lr"] = rate
        starts = torch.randint(len(tokens) - length, (rows, 1))
        loss = loss_of(model, tokens[starts + torch.arange(length + 1)])
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        steps += 1
        if time.monotonic() - stored > 120:
            stored = time.monotonic()
            store(model, tokenizer, out)
            print(f"{part:4.0%}  step {steps:,}  loss {loss:.3f}  {steps * rows * length:,} tokens", flush=True)
    store(model, tokenizer, out)
    print(f"{steps:,} steps; loss of held-out chapters {held_out_loss(model, test, length):.3f}", flush=True)


if __name__ == "__main__":
    typer.run(main)
