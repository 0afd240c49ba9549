"""Language models of known shapes with random weights: a decode step against the bandwidth of the GPU's memory, tokens
per second of many texts at once, latencies of a few clients, and chats beside best-effort work. The tokens mean
nothing, the times do.

    python benchmarks/language_models.py --shapes 0.6B 8B           on a GPU
    python benchmarks/language_models.py --quick                    a tiny model on the virtual GPU
    python benchmarks/language_models.py --profiles                 the stored times, for simulations of chats
"""

from __future__ import annotations

import asyncio
import json
import math
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import harness
import ml_dtypes
import numpy as np
from models import Kind
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers import models as token_models

import paellapy as pp
from paellapy.scheduler.language.model import step_sizes
from paellapy.scheduler.sim.chats import RECORDED

# hidden size, layers, heads, heads of keys, width of a head, of the gated product, vocabulary, tied, family
SHAPES: dict[str, tuple[int, int, int, int, int, int, int, bool, str]] = {
    "tiny": (64, 2, 4, 2, 32, 96, 300, True, "Qwen3"),
    "0.6B": (1024, 28, 16, 8, 128, 3072, 151_936, True, "Qwen3"),
    "1B": (2048, 16, 32, 8, 64, 8192, 128_256, True, "Llama"),
    "4B": (2560, 36, 32, 8, 128, 9728, 151_936, True, "Qwen3"),
    "8B": (4096, 32, 32, 8, 128, 14_336, 128_256, False, "Llama"),
}
STEP_BATCHES = (1, 32)
PARTS = ("step", "offline", "latency", "beside")
PROMPTS = (250, 1000)  # tokens, of the texts whose latency is measured
TBT_MS = 8  # the target of these texts
TARGETS_MS = (3, 4, 6, 10)  # of chats beside best-effort work
STEP_PROMPT, STEP_TOKENS = 256, 256  # tokens before the steps that are timed, and their number
PUBLISHED = {"nano-vllm": 19_638, "mini-sglang": 20_711}  # tokens/s offline, Qwen3-0.6B on an H200

def write_folder(folder: Path, shape: str) -> None:
    """A folder as the hub has it, with random weights."""
    width, layers, heads, kv, head, ffn, vocabulary, tied, family = SHAPES[shape]
    about = {
        "architectures": [f"{family}ForCausalLM"], "hidden_size": width, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv, "head_dim": head, "intermediate_size": ffn,
        "vocab_size": vocabulary, "max_position_embeddings": 4096, "tie_word_embeddings": tied, "dtype": "bfloat16",
        "rms_norm_eps": 1e-6, "rope_theta": 1e6,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(about))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(token_models.BPE({c: k for k, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    tensors = {"model.embed_tokens.weight": (vocabulary, width), "model.norm.weight": (width,)}
    if not tied:
        tensors["lm_head.weight"] = (vocabulary, width)
    for k in range(layers):
        at, attention = f"model.layers.{k}.", f"model.layers.{k}.self_attn."
        tensors |= {at + "input_layernorm.weight": (width,), at + "post_attention_layernorm.weight": (width,)}
        for name, n in (("q", heads), ("k", kv), ("v", kv)):
            tensors[f"{attention}{name}_proj.weight"] = (n * head, width)
        tensors[attention + "o_proj.weight"] = (width, heads * head)
        if family == "Qwen3":
            tensors |= {f"{attention}{name}_norm.weight": (head,) for name in "qk"}
        for name in ("gate", "up"):
            tensors[f"{at}mlp.{name}_proj.weight"] = (ffn, width)
        tensors[at + "mlp.down_proj.weight"] = (width, ffn)
    sizes = {name: 2 * int(np.prod(extents)) for name, extents in tensors.items()}
    header, offset = {}, 0
    for name, extents in tensors.items():
        header[name] = {"dtype": "BF16", "shape": extents, "data_offsets": [offset, offset + sizes[name]]}
        offset += sizes[name]
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    noise = (np.random.default_rng(0).standard_normal(1 << 22) * 0.02).astype(ml_dtypes.bfloat16).tobytes()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for nbytes in sizes.values():
            while nbytes:
                nbytes -= file.write(noise[: min(nbytes, len(noise))])


@contextmanager
def engine_with(folder: Path, device: str, policy: str = "slack", **options: Any) -> Iterator[pp.Engine]:
    with pp.Engine(device, policy=policy) as engine:
        engine.load(pp.LanguageModel(folder, name="model", capture="ahead", **options))
        yield engine


def write_texts(engine: pp.Engine, lengths: list[tuple[int, int]], vocabulary: int) -> tuple[float, list[Any]]:
    """Has texts of (prompt, answer) tokens written at once; seconds, and of each text the times of its tokens."""
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, vocabulary, n).tolist() for n, _ in lengths]

    async def one(prompt: list[int], n: int, began: float) -> list[float]:
        writing = engine.generate("model", prompt, max_tokens=n, temperature=0.6, ignore_eos=True)
        return [time.perf_counter() - began async for _ in writing]

    async def every() -> list[list[float]]:
        began = time.perf_counter()
        return await asyncio.gather(*(one(p, n, began) for p, (_, n) in zip(prompts, lengths, strict=True)))

    began = time.perf_counter()
    times = asyncio.run(every())
    return time.perf_counter() - began, times


def step(engine: pp.Engine, shape: str, batch: int, tokens: int, bandwidth: float) -> dict[str, float]:
    """Time between tokens of a full batch, and the time in which the step's bytes are read."""
    _, times = write_texts(engine, [(STEP_PROMPT, tokens)] * batch, SHAPES[shape][6])
    gaps = np.diff([each[tokens // 4 :] for each in times]).reshape(-1)
    memory = engine.memory()["models"]["model decode"]
    model = engine.language_models["model"]
    weights = weight_bytes(model.path)
    read = weights + batch * (STEP_PROMPT + tokens * 5 // 8) * model.config.token_bytes
    found: dict[str, float] = {"ms": float(np.median(gaps)) * 1e3, "p99_ms": float(np.quantile(gaps, 0.99)) * 1e3,
             "bytes": read, "held_bytes": memory["weights_bytes"]}  # fmt: skip
    return found | ({"over_bytes": found["ms"] * 1e-3 * bandwidth / read} if bandwidth else {})


def weight_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def measured_bandwidth(device: Any) -> float:
    """Bytes per second that a copy within the GPU's memory reads; 0 without a GPU."""
    if not device.name.startswith("cuda"):
        return 0.0
    import torch

    x = torch.empty(1 << 30, dtype=torch.float32, device="cuda")
    sums, times = torch.empty((), device="cuda"), []
    for _ in range(12):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        torch.sum(x, 0, out=sums)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e-3)
    return float(x.nbytes / statistics.median(times[2:]))


def offline(engine: pp.Engine, shape: str, texts: int, longest: int) -> dict[str, float]:
    """As nano-vllm measures it: prompts and answers of 100 to 1024 tokens, all asked for at once."""
    rng = np.random.default_rng(0)
    least = min(100, longest // 2)
    lengths = [(int(a), int(b)) for a, b in rng.integers(least, longest + 1, (texts, 2))]
    before = engine.stats()["language_models"]["model"]
    took, _ = write_texts(engine, lengths, SHAPES[shape][6])
    after = engine.stats()["language_models"]["model"]
    answered = sum(n for _, n in lengths)
    steps = after["steps"] - before["steps"]
    return {"texts": texts, "tokens": answered, "s": took, "tokens_s": answered / took, "steps": steps,
            "batch": (after["batched"] - before["batched"]) / max(1, steps),
            "chunks": after["chunks"] - before["chunks"]}  # fmt: skip


def latency(engine: pp.Engine, shape: str, clients: int, rounds: int, prompt: int, tokens: int) -> dict[str, float]:
    """Clients that ask again when they are answered."""
    rng = np.random.default_rng(2)
    ttft: list[float] = []
    tbt: list[float] = []

    async def client() -> None:
        for _ in range(rounds):
            given = rng.integers(0, SHAPES[shape][6], prompt).tolist()
            began = last = time.perf_counter()
            async for _ in engine.generate("model", given, max_tokens=tokens, temperature=0, ignore_eos=True):
                now = time.perf_counter()
                (ttft if last == began else tbt).append((now - last) * 1e3)
                last = now

    async def every() -> None:
        await asyncio.gather(*(client() for _ in range(clients)))

    asyncio.run(every())
    return {"clients": clients, "ttft_p50_ms": float(np.median(ttft)), "ttft_p99_ms": float(np.quantile(ttft, 0.99)),
            "tbt_p50_ms": float(np.median(tbt)), "tbt_p99_ms": float(np.quantile(tbt, 0.99))}  # fmt: skip


def beside(engine: pp.Engine, shape: str, loop: Kind, chats: int, tokens: int, target: float) -> dict[str, float]:
    """Chats beside a loop that asks again at once: time between tokens, and the loop's rate ÷ its rate alone."""
    vocabulary, batch = SHAPES[shape][6], {"input": loop.inputs()[0]}
    gaps: list[float] = []
    ended = asyncio.Event()

    async def chat(seed: int) -> None:
        prompt = np.random.default_rng(seed).integers(0, vocabulary, 64).tolist()
        last = 0.0
        async for _ in engine.generate("model", prompt, max_tokens=tokens, temperature=0.6, ignore_eos=True):
            now = time.perf_counter()
            if last:
                gaps.append((now - last) * 1e3)
            last = now

    async def loops(seconds: float) -> float:
        answered, began = 0, time.perf_counter()

        async def one() -> None:
            nonlocal answered
            while not ended.is_set() and time.perf_counter() - began < seconds:
                await engine.infer(loop.label, batch)
                answered += 1

        await asyncio.gather(one(), one())
        return answered / (time.perf_counter() - began)

    async def both() -> tuple[float, float]:
        alone = await loops(1.0)
        task = asyncio.create_task(loops(math.inf))
        await asyncio.gather(*(chat(k) for k in range(chats)))
        ended.set()
        return alone, await task

    alone, shared = asyncio.run(both())
    p50, p99 = np.quantile(gaps, (0.5, 0.99))
    return {"in_time": float(np.mean(np.array(gaps) <= target)), "tbt_p50_ms": float(p50), "tbt_p99_ms": float(p99),
            "loop": shared / alone}  # fmt: skip


def measure_beside(folder: Path, shape: str, o: Any) -> dict[str, Any]:
    chats, tokens = (2, 4) if o.quick else (8, 400)
    loop = Kind("tiny4", items=4) if o.quick else Kind("resnet50", items=64)
    setups = [(f"slack, {t} ms", "slack", t, 0) for t in ((1000,) if o.quick else TARGETS_MS)]
    setups += [("streams", "streams", TARGETS_MS[-1], 0), ("stream priorities", "streams", TARGETS_MS[-1], 1),
               ("priority", "priority", TARGETS_MS[-1], 1)]  # fmt: skip
    found = {}
    for name, policy, target, priority in setups:
        about = {"tbt_ms": target, "priority": priority, "sequences": chats, "context": 1024}
        with engine_with(folder, o.device, policy, **about) as engine:
            engine.load(loop.model((1,), 2, 0, o.device.partition(":")[0] if o.device.startswith("cuda") else "cpu"))
            write_texts(engine, [(8, 4)] * chats, SHAPES[shape][6])
            found[name] = beside(engine, shape, loop, chats, tokens, target)
    return found


def measure(shape: str, o: Any, bandwidth: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        write_folder(folder, shape)
        sequences, longest, texts = (4, 16, 6) if o.quick else (256, 1024, 256)
        tokens, rounds = (6, 2) if o.quick else (128, 6)
        found: dict[str, Any] = {}
        parts = o.parts
        if {"step", "offline"} & {*parts}:
            began = time.perf_counter()
            with engine_with(folder, o.device, sequences=sequences, chunk=64 if o.quick else 2048) as engine:
                found["load_s"] = time.perf_counter() - began
                for batch in (b for b in STEP_BATCHES if b <= sequences and "step" in parts):
                    found[f"step {batch}"] = step(engine, shape, batch, 8 if o.quick else STEP_TOKENS, bandwidth)
                for kind in ("decode", "prefill"):
                    programs = engine.profile(f"model {kind}")
                    found[f"{kind}_us"] = {str(each.batch): round(each.whole_ns * 1e-3, 1) for each in programs}
                if "offline" in parts:
                    found["offline"] = offline(engine, shape, texts, longest)
        if "latency" in parts:
            target = {"ttft_ms": 100, "tbt_ms": TBT_MS, "sequences": 4, "context": 2048}
            with engine_with(folder, o.device, chunk=64 if o.quick else 1024, **target) as engine:
                for prompt in (20,) if o.quick else PROMPTS:
                    found[f"latency {prompt}"] = latency(engine, shape, 4, rounds, prompt, tokens)
        if "beside" in parts:
            found["beside"] = measure_beside(folder, shape, o)
        return found


def profiles(results: dict[str, Any]) -> dict[str, Any]:
    """Times of steps of the measured shapes, in µs, for simulations. `context_ns`: for each token that a text has."""
    shapes = json.loads(RECORDED.read_text())["shapes"]
    for shape, found in results["shapes"].items():
        width, layers, heads, kv, head, ffn, vocabulary, _, _ = SHAPES[shape]
        weights = layers * (width * head * (2 * heads + 2 * kv) + 3 * width * ffn) + width * vocabulary
        many = STEP_BATCHES[-1]
        tokens = many * (STEP_PROMPT + STEP_TOKENS * 5 // 8)
        over_us = max(0.0, found[f"step {many}"]["ms"] * 1e3 - found["decode_us"][str(many)])
        shapes[shape] = {
            "weight_bytes": 2 * weights, "token_bytes": 4 * layers * kv * head,
            "context_ns": round(over_us * 1e3 / tokens, 3),
            "decode_us": {str(size): found["decode_us"][str(size)] for size in step_sizes(256)},
            "prefill_us": found["prefill_us"],
        }  # fmt: skip
    about = f"measured on an H200, with random weights: {', '.join(results['shapes'])}; others are estimates"
    return {"about": about, "shapes": shapes}


def rows(results: dict[str, Any]) -> list[Any]:
    head = ("shape", "batch 1 ÷ bytes", "batch 32 ÷ bytes", "offline, tokens/s",
            *(f"{n} tokens: TTFT p50; TBT p50, p99, ms" for n in PROMPTS))  # fmt: skip
    made: list[Any] = [head]
    for shape, found in results["shapes"].items():
        over = [f"{found[f'step {b}']['over_bytes']:.2f}" if "over_bytes" in found.get(f"step {b}", {}) else "–"
                for b in STEP_BATCHES]  # fmt: skip
        rate = f"{found['offline']['tokens_s']:,.0f}" if "offline" in found else "–"
        late = [f"{each['ttft_p50_ms']:.1f}; {each['tbt_p50_ms']:.2f}, {each['tbt_p99_ms']:.2f}" if each else "–"
                for each in (found.get(f"latency {n}") for n in PROMPTS)]  # fmt: skip
        made.append((shape, *over, rate, *late))
    return made


def rows_beside(results: dict[str, Any]) -> list[Any]:
    made: list[Any] = [("shape", "chats and a loop under", "in time", "TBT p50, ms", "p99, ms", "loop ÷ alone")]
    for shape, found in results["shapes"].items():
        for name, each in found.get("beside", {}).items():
            made.append((shape, name, f"{100 * each['in_time']:.1f} %", f"{each['tbt_p50_ms']:.2f}",
                         f"{each['tbt_p99_ms']:.2f}", f"{each['loop']:.2f}"))  # fmt: skip
    return made


def main() -> None:
    parser = harness.arguments(__doc__, device="cuda", quick=True)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["0.6B", "1B", "8B"])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--profiles", action="store_true", help="write stored times of steps where simulations look")
    o = parser.parse_args()
    if o.profiles:
        RECORDED.write_text(json.dumps(profiles(harness.stored("language_models", o.out)), indent=1) + "\n")
        return
    if o.quick:
        o.device, o.shapes = "virtual:h200", ["tiny"]
    with pp.Device(o.device) as device:
        bandwidth = measured_bandwidth(device)
        shapes = harness.stored("language_models", o.out).get("shapes", {})
        results: dict[str, Any] = {"bandwidth": bandwidth, "published": PUBLISHED, "shapes": shapes}
        for shape in o.shapes:
            shapes[shape] = shapes.get(shape, {}) | measure(shape, o, bandwidth)
            harness.save("language_models", results, device, o.out)  # a later shape may fail
        tables = {"language-models": rows(results), "language-models-beside": rows_beside(results)}
        for name, (head, *lines) in tables.items():
            harness.show(name, head, lines)
        print(harness.save("language_models", results, device, o.out, tables=tables))


if __name__ == "__main__":
    main()
