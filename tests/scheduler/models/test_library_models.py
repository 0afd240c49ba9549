"""Models of transformers with random weights: loaded as they are, and equal; benchmarks/model_corpus.py has all."""

from __future__ import annotations

import numpy as np
import pytest

import paellapy as pp
from paellapy.scheduler.core.errors import CaptureError

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install torch==2.13.0")
transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install transformers")

LENGTH = 12
NARROW = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32}
WORDS = {"vocab_size": 99, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
EXPERTS = {"num_key_value_heads": 2, "head_dim": 8, "moe_intermediate_size": 32, "num_experts": 4,
           "num_experts_per_tok": 2, "use_cache": False}  # fmt: skip


def made(name, **config):
    torch.manual_seed(0)
    settings = getattr(transformers, f"{name.removesuffix('Model')}Config")(**config)
    return getattr(transformers, name)(settings).eval()


def bert():
    return made("BertModel", **NARROW, **WORDS)


def modernbert():
    return made("ModernBertModel", **NARROW, **WORDS, cls_token_id=1, sep_token_id=2)


def experts():
    return made("Qwen3MoeModel", **NARROW, **WORDS, **EXPERTS)


def wav2vec2():
    sizes = {"conv_dim": (16, 16), "conv_kernel": (10, 3), "conv_stride": (5, 2), "num_feat_extract_layers": 2}
    return made("Wav2Vec2Model", **NARROW, **sizes, num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=2)


def detr():
    backbone = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8] * 4, depths=[1] * 4, layer_type="basic", out_features=["stage4"]
    )
    layers = {f"{part}_{what}": n for part in ("encoder", "decoder")
              for what, n in (("layers", 1), ("attention_heads", 4), ("ffn_dim", 32))}  # fmt: skip
    return made("DetrModel", backbone_config=backbone, use_timm_backbone=False, use_pretrained_backbone=False,
                backbone=None, d_model=32, num_queries=5, **layers)  # fmt: skip


def text(padding=4):
    mask = (torch.arange(LENGTH) < LENGTH - padding).long()[None]
    return {"input_ids": torch.randint(3, 99, (1, LENGTH)), "attention_mask": mask}


def image():
    return {"pixel_values": torch.randn(1, 3, 64, 64), "pixel_mask": torch.ones(1, 64, 64, dtype=torch.long)}


@pytest.fixture(scope="module")
def engine():
    with pp.Engine("virtual:h200") as engine:
        yield engine


@pytest.mark.parametrize(("make", "example", "options", "off"), [
    (bert, text, {}, 1e-5), (modernbert, text, {}, 1e-5), (detr, image, {}, 1e-5),
    (wav2vec2, lambda: {"input_values": torch.randn(1, 800)}, {}, 1e-5), (experts, text, {"dtype": "bfloat16"}, 5e-2),
], ids=["bert", "modernbert", "detr", "wav2vec2", "experts"])  # fmt: skip
def test_a_librarys_model_gives_what_it_gives_by_itself(engine, make, example, options, off):
    net, given = make(), example()
    everywhere = {key: torch.ones_like(t) if "mask" in key else t for key, t in given.items()}
    engine.load(pp.Model.from_torch(net, everywhere, name="net", batch=(1, 2), **options))
    try:
        dtypes = {key: spec.dtype for key, spec in engine.models["net"].inputs.items()}
        for request in (given, everywhere):
            found = engine.infer_sync("net", {key: t[0].numpy().astype(dtypes[key]) for key, t in request.items()})
            with torch.no_grad():
                wanted = net.float()(**request)
            words = request.get("attention_mask", torch.ones(1, 1))[0] > 0
            for key, value in found.items():
                a, b = value.astype(np.float32), wanted[key][0].float().numpy()
                if key == "last_hidden_state" and len(words) == len(b):  # where there is padding, anything may be
                    a, b = a[words], b[words]
                np.testing.assert_allclose(a, b, atol=off * np.abs(b).max())
    finally:
        engine.unload("net")


def test_experts_in_float16_are_refused_with_remedies_that_help(engine):
    with pytest.raises(CaptureError) as caught:
        engine.load(pp.Model.from_torch(experts(), text(0), name="net", batch=(1,), dtype="float16"))
    assert [remedy.partition("(")[0][:25] for remedy in caught.value.remedies[:2]] == [
        "dtype=torch.bfloat16, for", "set_experts_implementatio"
    ]  # fmt: skip
    net = experts()
    net.set_experts_implementation("batched_mm")
    engine.load(pp.Model.from_torch(net, text(0), name="net", batch=(1,), dtype="float16"))
    engine.unload("net")


class Clamped(torch.nn.Linear):
    """As layers of BART and others, which check for numbers that float16 cannot hold."""

    def forward(self, x):
        x = super().forward(x)
        if x.dtype == torch.float16 and not torch.isfinite(x).all():
            x = x.clamp(-6e4, 6e4)
        return x


def test_checks_of_float16_are_refused_with_a_type_that_needs_none(engine):
    with pytest.raises(CaptureError) as caught:
        engine.load(pp.Model.from_torch(Clamped(4, 4), torch.zeros(1, 4), name="net", batch=(1,), dtype="float16"))
    dtype = caught.value.remedies[0].partition(",")[0].removeprefix("dtype=torch.")
    engine.load(pp.Model.from_torch(Clamped(4, 4), torch.zeros(1, 4), name="net", batch=(1,), dtype=dtype))
    engine.unload("net")
