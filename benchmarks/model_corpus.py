"""Which models of transformers, torchvision and timm load, and whether they answer as PyTorch does.

    python benchmarks/model_corpus.py [--device virtual:h200] [--dtype float16] [--only NAME,NAME]

A family of transformers has its default configuration with random weights, two layers, 1000 words and images of 224
pixels; torchvision and timm have one small network per module. Models that are refused are tried again with the
remedies of their error. Results are stored after each model; models that were stored at this commit are skipped.

    python benchmarks/model_corpus.py --loading --device cuda [--seconds 30]

How long do the models of LOADED take to load, in fp16, beside a plain capture of the same two batch sizes?
torch.compile, with empty caches, is given as many of the models, in order, as it begins within the seconds.
"""

from __future__ import annotations

import ast
import gc
import inspect
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from harness import arguments, commit, save, show, stored

import paellapy as pp
from paellapy.instrument.errors import PaellaError
from paellapy.scheduler.models.torch_module import named_results
from paellapy.scheduler.models.torch_tensors import as_array

TASKS = {
    "MASKED_LM": "text", "IMAGE_CLASSIFICATION": "vision", "AUDIO_CLASSIFICATION": "audio",
    "OBJECT_DETECTION": "detection", "CTC": "audio", "SEMANTIC_SEGMENTATION": "vision", "DEPTH_ESTIMATION": "vision",
    "UNIVERSAL_SEGMENTATION": "detection", "VIDEO_CLASSIFICATION": "vision",
}  # fmt: skip
WORDS, LAYERS, PIXELS, LENGTH, SECOND = 1000, 2, 224, 32, 16000
SMALL = ("test_", "tiny", "nano", "atto", "pico", "femto", "small", "mini", "lite", "_xxs", "_xs", "_s", "_t", "18",
         "11", "b0", "0_5", "400mf")  # fmt: skip
SKIPPED = ("detection.", "quantization.", "optical_flow.")  # modules of torchvision whose models take no tensor
LOADED = tuple(f"transformers {name}" for name in (
    "ResNetForImageClassification", "BertForMaskedLM", "ViTForImageClassification", "YolosForObjectDetection",
    "HubertForSequenceClassification", "RobertaForMaskedLM", "ModernBertForMaskedLM", "SwinForImageClassification",
    "ConvNextForImageClassification", "MPNetForMaskedLM", "DebertaV2ForMaskedLM", "XLMRobertaForMaskedLM",
    "ElectraForMaskedLM", "DistilBertForMaskedLM", "SegformerForImageClassification", "Dinov2ForImageClassification",
    "BeitForImageClassification", "MobileNetV2ForImageClassification", "WavLMForSequenceClassification",
    "Wav2Vec2ForSequenceClassification",
))  # fmt: skip
BATCH = (1, 2)
TOLERANCE = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 8e-2}  # of the largest value
Make = Callable[[], torch.nn.Module]


def families() -> Iterator[tuple[str, str, Make]]:
    """Names of the models of transformers, their kinds, and how they are made."""
    from transformers.models.auto import configuration_auto, modeling_auto

    known = set()
    for task, kind in TASKS.items():
        for family, names in getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES").items():
            if family in configuration_auto.CONFIG_MAPPING_NAMES and (family, kind) not in known:
                known.add((family, kind))
                name = names if isinstance(names, str) else names[0]
                yield f"transformers {name}", kind, lambda family=family, name=name: family_model(family, name)


def family_model(family: str, name: str) -> torch.nn.Module:
    import transformers

    config = transformers.models.auto.CONFIG_MAPPING[family]
    return getattr(transformers, name)(config(**small(config().to_dict(), parts_only=True)))


def small(config: Mapping[str, Any], parts_only: bool = False) -> dict[str, Any]:
    """A configuration with few layers; `parts_only`: only the entries that this changes."""
    found = {}
    backbone = bool(config.get("out_features") or config.get("out_indices"))  # layers that others read stay
    for key, value in config.items():
        if isinstance(value, dict) and "model_type" in value:
            found[key] = small(value)
        elif isinstance(value, int) and key.endswith("_token_id") and value >= WORDS:
            found[key] = WORDS - 1
        elif isinstance(value, int) and key == "vocab_size":
            found[key] = min(value, WORDS)
        elif isinstance(value, int) and key == "image_size":
            found[key] = min(value, PIXELS)
        elif not backbone and isinstance(value, int) and key.endswith("_layers") and "feat" not in key:
            found[key] = min(value, LAYERS)
        elif key in ("use_cache", "use_pretrained_backbone"):
            found[key] = False
        elif not parts_only and key not in ("layer_types", "transformers_version", "architectures"):
            found[key] = value
    return found


def networks() -> Iterator[tuple[str, str, Make]]:
    """One small network per module of torchvision and timm."""
    import timm
    from torchvision import models

    found = [timm.list_models(module=module) for module in timm.list_modules()]
    for names in sorted(filter(None, found), key=lambda names: not smallest(names).startswith("test_")):
        yield f"timm {(name := smallest(names))}", "vision", lambda name=name: timm.create_model(name)
    modules: dict[str, list[str]] = {}
    for name in models.list_models():
        where = models.get_model_builder(name).__module__.removeprefix("torchvision.models.")
        if not where.startswith(SKIPPED):
            modules.setdefault(where, []).append(name)
    for names in modules.values():
        yield f"torchvision {(name := smallest(names))}", "vision", lambda name=name: torchvision_model(name)


def torchvision_model(name: str) -> torch.nn.Module:
    from torchvision import models

    takes = inspect.signature(models.get_model_builder(name)).parameters
    return models.get_model(name, **({"weights_backbone": None} if "weights_backbone" in takes else {}))


def smallest(names: list[str]) -> str:
    return next((name for part in SMALL for name in names if part in name), names[0])


def example(net: torch.nn.Module, kind: str) -> dict[str, torch.Tensor]:
    """Inputs of one request by name; every second text ends in padding."""
    config = getattr(net, "config", None)
    takes = inspect.signature(net.forward).parameters
    if config is None or kind in ("vision", "detection"):
        shape = (3, *pixels(net, config))
        if config is None:
            video = "video" in type(net).__module__
            return {next(iter(takes)): torch.randn(1, 3, *([16] * video), *shape[1:])}
        name = net.main_input_name
        frames = [getattr(config, "num_frames", 8)] if name == "pixel_values_videos" or "num_frames" in config else []
        return {name: torch.randn(1, *frames, getattr(config, "num_channels", 3), *shape[1:])}
    name = net.main_input_name
    if kind == "audio":
        bins = getattr(config, "num_mel_bins", getattr(config, "feature_projection_input_dim", 80))
        if name == "input_values" and "max_length" not in config:
            return {name: torch.randn(1, SECOND)}
        frames = 2 * getattr(config, "max_source_positions", 0) or getattr(config, "max_length", 0) or 100
        return {name: torch.randn(1, bins, frames) if "whisper" in config.model_type else torch.randn(1, frames, bins)}
    given = {name: torch.randint(10, min(WORDS, getattr(config, "vocab_size", WORDS)), (1, LENGTH))}
    if "attention_mask" in takes:
        given["attention_mask"] = (torch.arange(LENGTH) < LENGTH - 8 * int(torch.randint(2, ()))).long()[None]
    if "bbox" in takes:
        given["bbox"] = torch.randint(0, 100, (1, LENGTH, 2)).repeat(1, 1, 2)
    return given


def pixels(net: torch.nn.Module, config: Any) -> tuple[int, int]:
    parts = [config, *(getattr(config, part, None) for part in ("backbone_config", "vision_config"))]
    found = next((p.image_size for p in parts if getattr(p, "image_size", None)), PIXELS)
    if config is None:
        found = getattr(net, "pretrained_cfg", {}).get("input_size", (3, PIXELS, PIXELS))[1:]
    return (found, found) if isinstance(found, int) else (int(found[0]), int(found[1]))


def on(net: torch.nn.Module, given: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The inputs where the module is."""
    where = next(net.parameters()).device
    return {key: t.to(where) for key, t in given.items()}


def attempt(engine: pp.Engine, net: Any, kind: str, dtype: str, outputs: Sequence[str] = ()) -> dict[str, Any]:
    """Loads a model, and compares its answers to two requests with the module's own."""
    given, numbers = [on(net, example(net, kind)) for _ in range(2)], getattr(torch, dtype)
    began, worst = time.perf_counter(), 0.0
    engine.load(pp.Model.from_torch(net, given[0], name="net", batch=BATCH, instances=1, dtype=dtype,
                                    outputs=outputs))  # fmt: skip
    seconds = time.perf_counter() - began
    try:
        for each in given:
            typed = {k: t.to(numbers) if t.is_floating_point() else t for k, t in each.items()}
            found = engine.infer_sync("net", {k: as_array(torch, t[0].cpu()) for k, t in typed.items()})
            with torch.no_grad():
                wanted = named_results("", net.to(numbers)(**typed), outputs)
            for key, tensor in wanted.items():
                want = tensor[0].float().cpu().numpy()
                off = np.abs(found[key].astype(np.float32) - want).max(initial=0.0)
                worst = max(worst, float(off) / max(float(np.abs(want).max(initial=0.0)), 1e-6))
    finally:
        engine.unload("net")
    timed = {"load_s": seconds} if engine.device.name.startswith("cuda") else {}  # a CPU's time says little of a GPU's
    return {**timed, "error": worst, "equal": worst <= TOLERANCE[dtype]}


def fails_in(net: torch.nn.Module, kind: str, dtype: str) -> str:
    """Why the module cannot be called in this type without any capture; "" if it can."""
    numbers = getattr(torch, dtype)
    given = {k: t.to(numbers) if t.is_floating_point() else t for k, t in on(net, example(net, kind)).items()}
    try:
        with torch.no_grad():
            net.to(numbers)(**given)
    except Exception as e:
        return f"{type(e).__name__}: {e}"[:120]
    return ""


def outcome(engine: pp.Engine, make: Make, kind: str, dtype: str) -> dict[str, Any]:
    """Taken, with its error; or refused, with the remedies that were tried and what came of them."""
    torch.manual_seed(0)
    where = "cuda" if engine.device.name.startswith("cuda") else "cpu"
    try:
        net = make().eval().to(where)
        with torch.no_grad():
            net(**on(net, example(net, kind)))
    except Exception as e:  # the configuration needs more than `small` knows
        return {"not_built": f"{type(e).__name__}: {e}"[:120]}
    if dtype != "float32" and (why := fails_in(make().eval().to(where), kind, dtype)):
        return {"not_built": f"in {dtype}, the module itself fails: {why}"}
    try:
        return {"taken": True, **attempt(engine, net, kind, dtype)}
    except PaellaError as e:
        where = str(getattr(e, "location", "")).partition("site-packages/")[2]
        why, remedies = f"{type(e).__name__}: {e}".partition(" at /")[0][:120], getattr(e, "remedies", [])
    tried: dict[str, Any] = {}
    for remedy in remedies:
        setter, _, rest = remedy.partition("(")
        again, outputs = make().eval().to(where), []
        if setter.startswith("set_"):
            getattr(again, setter)(rest.split('"')[1])
        elif remedy.startswith("outputs="):
            outputs = ast.literal_eval(remedy[remedy.index("[") : remedy.index("]") + 1])
        elif not remedy.startswith("dtype"):
            continue  # `python -O` is tried by running this script so
        try:
            tried[remedy] = attempt(engine, again, kind, "bfloat16" if "dtype" in remedy else dtype, outputs)
        except PaellaError as e:
            tried[remedy] = {"equal": False, "why": str(e)[:120]}
    return {"taken": False, "why": why, "where": where, "remedies": list(remedies), "tried": tried}


def seconds_to(prepare: Callable[..., Any], net: torch.nn.Module, given: Mapping[str, torch.Tensor]) -> float | str:
    """Time until a module has been prepared for each batch size, or the reason why it cannot be."""
    batches = [{k: torch.cat([t] * n) for k, t in given.items()} for n in BATCH]
    torch.cuda.synchronize()
    began = time.perf_counter()
    try:
        with torch.no_grad():
            for batch in batches:
                prepare(net, batch)
        torch.cuda.synchronize()
    except Exception as e:
        return f"{type(e).__name__}: {e}"[:120]
    return time.perf_counter() - began


def plain_capture(net: torch.nn.Module, batch: Mapping[str, torch.Tensor]) -> None:
    """As PyTorch's documentation says: runs on another stream, then the capture."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            net(**batch)
    side.synchronize()
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        net(**batch)


def compiled(net: torch.nn.Module, batch: Mapping[str, torch.Tensor]) -> None:
    torch.compile(net, dynamic=False)(**batch)


def loading(o: Any) -> None:
    """Stores load times, in seconds, by model."""
    import torch._inductor.config as inductor

    inductor.force_disable_caches = True
    name, dtype = "model_loading_libraries", "float16"
    made = {title: (kind, make) for title, kind, make in families() if title in LOADED}
    found: dict[str, dict[str, Any]] = {}
    with pp.Engine(o.device) as engine:
        device = engine.device
        for title in LOADED:
            found[title] = outcome(engine, made[title][1], made[title][0], dtype)
            print(title, found[title], flush=True)
            save(name, found, device, o.out)
    if not device.name.startswith("cuda"):
        return
    for title in LOADED:  # the engine is closed: a capture that fails disturbs none of its own
        kind, make = made[title]
        found[title]["capture_s"] = seconds_to(plain_capture, *on_gpu(make, kind, dtype))
    ends = time.perf_counter() + o.seconds
    for title in LOADED:
        if time.perf_counter() < ends:
            torch._dynamo.reset()
            kind, make = made[title]
            found[title]["compile_s"] = seconds_to(compiled, *on_gpu(make, kind, dtype))
            print(title, found[title], flush=True)
    columns = ("load_s", "capture_s", "compile_s")
    rows: list[Sequence[object]] = [("model", "engine, s", "plain capture, s", "torch.compile, s")]
    for title, each in found.items():
        cells = (each.get(key, "") for key in columns)
        rows.append((title.partition(" ")[2], *(f"{x:.2f}" if isinstance(x, float) else x and "fails" for x in cells)))
    for key in columns:
        known = [each[key] for each in found.values() if isinstance(each.get(key), float)]
        print(key, len(known), "median", np.median(known) if known else None)
    show("Seconds to load", rows[0], rows[1:])
    save(name, found, device, o.out, tables={"model-loading-libraries": rows})


def on_gpu(make: Make, kind: str, dtype: str) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """A model and the inputs of one request in GPU memory."""
    net, numbers = make().eval(), getattr(torch, dtype)
    given = {k: t.cuda().to(numbers if t.is_floating_point() else t.dtype) for k, t in example(net, kind).items()}
    return net.cuda().to(numbers), given


def main() -> None:
    parser = arguments(__doc__, device="virtual:h200", seconds=30.0)
    parser.add_argument("--loading", action="store_true", help="load times, beside a capture and torch.compile")
    parser.add_argument("--dtype", default="float32", choices=list(TOLERANCE))
    parser.add_argument("--only", default="", help="parts of names, separated by commas")
    o = parser.parse_args()
    # Of torchvision's detectors; its wheel for CUDA lacks them beside PyTorch for CPUs.
    for op in ("nms", "qnms") if torch.version.cuda is None else ():
        torch.library.define(f"torchvision::{op}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    if o.loading:
        loading(o)
        return
    name = "model_corpus" if o.device.startswith("virtual") else "model_corpus_gpu"
    results = stored(name, o.out)
    found = results.setdefault(o.dtype, {})
    key = "python -O, which leaves assertions out"
    with pp.Engine(o.device) as engine:
        for title, kind, make in (*networks(), *families()):
            known = found.get(title, {})
            if not any(part in title for part in o.only.split(",")) or (not o.only and "kind" in known):
                continue
            new = {"kind": kind, **outcome(engine, make, kind, o.dtype), "commit": commit()}
            if not __debug__ and known.get("taken") is False:
                known["tried"][key] = new
            else:
                found[title] = new
            print(title, new, flush=True)
            save(name, results, engine.device, o.out, tables={name.replace("_", "-"): table(found)})
            gc.collect()
    rows = table(found)
    show(f"{o.device}, {o.dtype}", rows[0], rows[1:])


def table(found: Mapping[str, Any]) -> list[Sequence[object]]:
    """By kind: models that were built, loaded and equal, equal with a remedy of the error, and refused."""
    rows: list[Sequence[object]] = [("models", "tried", "loaded and equal", "with a remedy", "refused")]
    built = [each for each in found.values() if "not_built" not in each]
    for kind in (*dict.fromkeys(each["kind"] for each in built), "all"):
        of_kind = [each for each in built if kind in (each["kind"], "all")]
        equal = sum(each.get("equal", False) for each in of_kind)
        remedied = sum(any(t["equal"] for t in each.get("tried", {}).values()) for each in of_kind)
        rows.append((kind, len(of_kind), equal, remedied, len(of_kind) - equal - remedied))
    return rows


if __name__ == "__main__":
    main()
