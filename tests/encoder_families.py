"""Small encoders with random weights, in folders as libraries write them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

SIZES = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 64,
    "max_position_embeddings": 40, "pad_token_id": 1,
}  # fmt: skip
FAMILIES = {
    "Bert": {},
    "Roberta": {"type_vocab_size": 1},
    "XLMRoberta": {"type_vocab_size": 1},
    "MPNet": {},
    "ModernBert": {"local_attention": 8, "global_attn_every_n_layers": 2, "cls_token_id": 2, "sep_token_id": 3},
}
WORDS = ["[UNK]", "[PAD]", "[CLS]", "[SEP]", *(f"w{k}" for k in range(60))]


def tokenizer() -> Any:
    """Words as tokens, between [CLS] and [SEP]."""
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: k for k, word in enumerate(WORDS)}, "[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return made


def encoder(family: str, folder: Path, head: str = "Model", **config: Any) -> Any:
    """A model of transformers, also written to the folder, with a tokenizer."""
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    torch.manual_seed(len(family))
    about = getattr(transformers, f"{family}Config")(**{**SIZES, **FAMILIES[family], **config})
    made = getattr(transformers, f"{family}{head}")(about).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    made.save_pretrained(folder)
    tokenizer().save(str(folder / "tokenizer.json"))
    return made


def sentence_files(folder: Path, pooling: dict[str, Any], *parts: str, prompts: Any = None, **settings: Any) -> None:
    """The files of sentence-transformers beside an encoder."""
    kinds = ["Transformer", "Pooling", *parts]
    listed = [{"type": f"sentence_transformers.models.{kind}", "path": f"{k}_{kind}" if k else ""}
              for k, kind in enumerate(kinds)]  # fmt: skip
    (folder / "modules.json").write_text(json.dumps(listed))
    for each in listed[1:]:
        (folder / str(each["path"])).mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    (folder / "sentence_bert_config.json").write_text(json.dumps(settings))
    if prompts is not None:
        (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts))
