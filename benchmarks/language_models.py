"""Language models of known shapes with random weights: a decode step against the bandwidth of the GPU's memory and
against bare replays of its graph, attention alone, tokens per second of many texts at once, with and without HTTP,
latencies of a few clients, and how soon weights are back. The tokens mean nothing, the times do. Medians of all rounds.

    python benchmarks/language_models.py --shapes 0.6B 8B           on a GPU
    python benchmarks/language_models.py --quick                    a tiny model on the virtual GPU
    python benchmarks/language_models.py --profiles                 the stored times, for simulations of chats
"""

from __future__ import annotations

import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import harness
import ml_dtypes
import numpy as np
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers import models as token_models

import paellapy as pp
from paellapy.scheduler.language.config import read_config
from paellapy.scheduler.language.decoder import Decoder, State, element_type
from paellapy.scheduler.language.kernels import ROW
from paellapy.scheduler.language.model import step_sizes, words_of
from paellapy.scheduler.language.pages import PAGE
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
PARTS = ("attention", "step", "offline", "latency", "sse", "wake")
USUAL = {"1B": ("step",), "4B": ("step",), "8B": ("attention", "step", "offline", "latency", "wake")}  # others: all
PROMPTS = (250, 1000)  # tokens, of the texts whose latency is measured
TBT_MS = 8  # the target of these texts
BARE = 200  # replays of a step's graph
ATTENTION = 32, 4096  # texts, and tokens of each
HTTP = 64, 64, 256  # clients, tokens of their prompts and answers
STEP_PROMPT, STEP_TOKENS = 256, 256  # tokens before the steps that are timed, and their number
PUBLISHED = {"nano-vllm": 19_638, "mini-sglang": 20_711}  # tokens/s offline, Qwen3-0.6B on an H200

def write_config(folder: Path, shape: str) -> None:
    width, layers, heads, kv, head, ffn, vocabulary, tied, family = SHAPES[shape]
    about = {
        "architectures": [f"{family}ForCausalLM"], "hidden_size": width, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv, "head_dim": head, "intermediate_size": ffn,
        "vocab_size": vocabulary, "max_position_embeddings": 4096, "tie_word_embeddings": tied, "dtype": "bfloat16",
        "rms_norm_eps": 1e-6, "rope_theta": 1e6,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(about))


def write_folder(folder: Path, shape: str) -> None:
    """A folder as the hub has it, with random weights."""
    width, layers, heads, kv, head, ffn, vocabulary, tied, family = SHAPES[shape]
    write_config(folder, shape)
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
def engine_with(
    folder: Path, device: str, policy: str = "slack", memory_bytes: int | None = None, **options: Any
) -> Iterator[pp.Engine]:
    with pp.Engine(device, policy=policy, memory_bytes=memory_bytes) as engine:
        engine.load(pp.LanguageModel(folder, name="model", **{"capture": "ahead", **options}))
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


def bare(engine: pp.Engine, batch: int, position: int) -> dict[str, float]:
    """The graph of the same step, launched again and again behind itself without the engine: time of each launch. The
    texts that were written last are all at this position.
    """
    from paellapy.instrument.device.driver import check, driver

    loaded = next(each for each in engine.core.models.by_row.values() if each.model.name == "model decode")
    k = [each.batch for each in loaded.profiles].index(batch)
    instance, graph, cu = loaded.instances[0], loaded.launches[0][k].whole, driver()
    rows = instance.inputs["rows"].reshape(-1, ROW.itemsize // 4).view(ROW)[:, 0]
    rows["sequence"][:batch], rows["position"][:batch], rows["place"][:batch] = 1 + np.arange(batch), position, -1
    engine.device.activate()
    stream = check(cu.cuStreamCreate(1), "making a stream")
    events = [check(cu.cuEventCreate(0), "making an event") for _ in range(2)]
    for event in events:
        for _ in range(BARE):
            check(cu.cuGraphLaunch(graph, stream), "launching a step")
        check(cu.cuEventRecord(event, stream), "noting the time")
    check(cu.cuStreamSynchronize(stream), "waiting for steps")
    ms = check(cu.cuEventElapsedTime(*events), "reading the time") / BARE
    instance.words[:] = instance.draining[:] = 0  # no launch of the engine's has ended
    cu.cuStreamDestroy(stream)
    return {"ms": float(ms)}


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


def attention(device: Any, bandwidth: float, small: bool) -> dict[str, float]:
    """The kernel of one layer of 8B, whose keys and values no cache holds, against the bandwidth."""
    config = config_of("tiny" if small else "8B")
    texts, tokens = (2, 64) if small else ATTENTION
    pages = -(-tokens // PAGE)
    state = State.on(device, replace(config, layers=1), texts, tokens, texts * pages)
    state.table.set(np.concatenate([np.zeros((1, pages)), 1 + np.arange(texts * pages).reshape(texts, pages)])
                    .astype(np.int32))  # fmt: skip
    rows = np.zeros(texts, ROW)
    rows["sequence"], rows["position"], rows["place"] = 1 + np.arange(texts), tokens - 1, -1
    weights = {"cosines": device.array(np.ones((tokens, config.head_width // 2), np.float32)),
               "sines": device.array(np.zeros((tokens, config.head_width // 2), np.float32))}  # fmt: skip
    qkv = device.array(np.ones((texts, config.qkv_width), element_type(config.dtype)))
    mixed = device.empty((texts, config.heads * config.head_width), element_type(config.dtype))
    attend = Decoder(config, weights, state, device.empty).attention(device.array(words_of(rows)))
    attend(qkv, 0, mixed)
    device.synchronize()
    launches = 2 if small else 200
    began = time.perf_counter()
    for _ in range(launches):  # the host launches one in a tenth of the time that it takes
        attend(qkv, 0, mixed)
    device.synchronize()
    ms = (time.perf_counter() - began) / launches * 1e3
    read = 2 * texts * tokens * config.kv_heads * config.head_width * element_type(config.dtype).itemsize
    return {"ms": ms, "bytes": read} | ({"of_bandwidth": read / bandwidth / (ms * 1e-3)} if bandwidth else {})


def config_of(shape: str) -> Any:
    with tempfile.TemporaryDirectory() as made:
        write_config(Path(made), shape)
        return read_config(made)


# -- over HTTP


def sse(folder: Path, shape: str, o: Any) -> dict[str, Any]:
    """Tokens per second that reach clients in other processes, and those of `engine.generate`, in turns."""
    from paellapy.serving.config import ServerConfig
    from paellapy.serving.registry import Registry, entry_of
    from paellapy.serving.server import Server

    clients, prompt, answer = (4, 8, 8) if o.quick else HTTP
    model = pp.LanguageModel(folder, name="model", capture="ahead", sequences=clients, context=1024)
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()

    def within(coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result()

    with pp.Engine(o.device, policy="slack") as engine:
        server = Server(Registry(engine, [entry_of(model)]), ServerConfig(port=0, grace_s=0.0, log_level="warning"))
        within(server.start())
        within(server.load())
        found = []
        for k in range(o.rounds + 1):  # the first one warms up
            plain = clients * answer / write_texts(engine, [(prompt, answer)] * clients, SHAPES[shape][6])[0]
            at, command = time.monotonic() + 3.0, [sys.executable, __file__, "--clients", server.url]
            about = map(str, (clients // 2, prompt, answer, at))
            running = [subprocess.Popen([*command, *each], stdout=subprocess.PIPE, text=True)
                       for each in [list(about)] * 2]  # fmt: skip
            said = [json.loads(each.communicate()[0]) for each in running]
            tokens_s = sum(each["tokens"] for each in said) / (max(each["ended"] for each in said) - at)
            if k:
                found.append({"generate": plain, "sse": tokens_s, "ratio": tokens_s / plain})
        within(server.stop())
    loop.call_soon_threadsafe(loop.stop)
    return {**rounds_of(found), "clients": clients}


async def clients(url: str, count: int, prompt: int, answer: int, at: float) -> dict[str, Any]:
    """Clients that stream a text each from this moment on."""
    import aiohttp

    async def one(session: Any, k: int) -> int:
        body = {"model": "model", "prompt": [(7 * k + i) % 200 for i in range(prompt)], "max_tokens": answer,
                "ignore_eos": True, "stream": True}  # fmt: skip
        await asyncio.sleep(at - time.monotonic())
        events = 0
        async with session.post(f"{url}/v1/completions", json=body) as said:
            async for line in said.content:
                events += line.startswith(b"data: {")
        return events

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        tokens = await asyncio.gather(*(one(session, k) for k in range(count)))
    return {"tokens": sum(tokens), "ended": time.monotonic()}


# -- weights that leave


def wake(folder: Path, shape: str, o: Any) -> dict[str, Any]:
    """From a request until its first token, with all weights on the host before; the time of the copy alone."""
    nbytes = weight_bytes(folder)
    options = {"sequences": 4, "context": 256, "chunk": 64, "kv_gb": 0.001 if o.quick else 0.3}
    with engine_with(folder, o.device, memory_bytes=2 * nbytes + (8 << 30), **options) as engine:
        given, found = list(range(32)), []
        for k in range(o.rounds + 1):
            warm = first_token(engine, given)
            engine.evict("model")
            began = time.perf_counter()
            engine.prefetch("model")
            moved = time.perf_counter() - began
            engine.evict("model")
            cold = first_token(engine, given)
            if k:
                found.append({"cold_ms": cold * 1e3, "warm_ms": warm * 1e3, "prefetch_ms": moved * 1e3})
        link = measured_link(nbytes) if o.device.startswith("cuda") else 0.0
    found = rounds_of(found)
    return {**found, "bytes": nbytes, "link_ms": link * 1e3,
            **({"over_link": found["cold_ms"] / (link * 1e3)} if link else {})}  # fmt: skip


def first_token(engine: pp.Engine, prompt: list[int]) -> float:
    began = time.perf_counter()
    next(iter(engine.generate("model", prompt, max_tokens=1)))
    return time.perf_counter() - began


def measured_link(nbytes: int) -> float:
    """Seconds in which this many bytes come from pinned memory, in pieces of a gibibyte at most."""
    import torch

    piece = min(nbytes, 1 << 30)
    host = torch.empty(piece, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(piece, dtype=torch.uint8, device="cuda")
    times = []
    for _ in range(6):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        there.copy_(host, non_blocking=True)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e-3)
    return float(statistics.median(times[1:]) * nbytes / piece)


# -- all


def rounds_of(runs: list[dict[str, float]]) -> dict[str, Any]:
    """Medians, and each round."""
    return {**harness.medians(runs), "rounds": {name: [run[name] for run in runs] for name in runs[0]}}


def measure(shape: str, parts: Any, o: Any, bandwidth: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        write_folder(folder, shape)
        found: dict[str, Any] = {}
        if {"step", "offline", "latency"} & {*parts}:
            # Only 8B's targets are stated; without them, the order of its steps is that of other models
            targets = {"ttft_ms": 100, "tbt_ms": TBT_MS} if "latency" in parts else {}
            about = {"sequences": 4 if o.quick else 256, "chunk": 64 if o.quick else 2048}
            began = time.perf_counter()
            with engine_with(folder, o.device, **about, **targets) as engine:
                found["load_s"] = time.perf_counter() - began
                found |= measure_engine(engine, shape, parts, o, bandwidth)
        for name, part in (("sse", sse), ("wake", wake)):
            if name in parts:
                found[name] = part(folder, shape, o)
        return found


def measure_engine(engine: pp.Engine, shape: str, parts: Any, o: Any, bandwidth: float) -> dict[str, Any]:
    found: dict[str, Any] = {}
    sequences, longest, texts, tokens = (4, 16, 6, 8) if o.quick else (256, 1024, 256, STEP_TOKENS)
    for kind in ("decode", "prefill"):
        programs = engine.profile(f"model {kind}")
        found[f"{kind}_us"] = {str(each.batch): round(each.whole_ns * 1e-3, 1) for each in programs}
    for batch in (b for b in STEP_BATCHES if b <= sequences and "step" in parts):
        runs = []
        for _ in range(o.rounds):
            run = step(engine, shape, batch, tokens, bandwidth)
            if bandwidth:
                run["bare_ms"] = bare(engine, batch, STEP_PROMPT + tokens * 5 // 8)["ms"]
                run["bare_over_bytes"] = run["bare_ms"] * 1e-3 * bandwidth / run["bytes"]
                run["over_bare"] = run["ms"] / run["bare_ms"]
            runs.append(run)
        found[f"step {batch}"] = rounds_of(runs)
    if "latency" in parts:
        tokens, asked = (6, 2) if o.quick else (128, 6)
        for prompt in (20,) if o.quick else PROMPTS:
            runs = [latency(engine, shape, 4, asked, prompt, tokens) for _ in range(o.rounds)]
            found[f"latency {prompt}"] = rounds_of(runs)
    if "offline" in parts:
        times = o.rounds if shape == "0.6B" else 1
        found["offline"] = rounds_of([offline(engine, shape, texts, longest) for _ in range(times)])
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
    steps = (f"batch {n}: engine ÷ bytes; graph ÷ bytes" for n in STEP_BATCHES)
    late = (f"{n} tokens: TTFT p50; TBT p50, p99, ms" for n in PROMPTS)
    made: list[Any] = [("shape", *steps, "offline, tokens/s", *late)]
    for shape, found in results["shapes"].items():
        over = ["; ".join(f"{each[key]:.2f}" if key in each else "–" for key in ("over_bytes", "bare_over_bytes"))
                for each in (found.get(f"step {b}", {}) for b in STEP_BATCHES)]  # fmt: skip
        rate = f"{found['offline']['tokens_s']:,.0f}" if "offline" in found else "–"
        times = [f"{each['ttft_p50_ms']:.1f}; {each['tbt_p50_ms']:.2f}, {each['tbt_p99_ms']:.2f}" if each else "–"
                for each in (found.get(f"latency {n}") for n in PROMPTS)]  # fmt: skip
        made.append((shape, *over, rate, *times))
    return made


def figures(results: dict[str, Any]) -> dict[str, str]:
    found = {}
    if "of_bandwidth" in results.get("attention", {}):
        found["text.attention"] = f"{results['attention']['of_bandwidth']:.2f}"
    for shape, each in results["shapes"].items():
        if "sse" in each:
            found[f"text.sse.{shape}"] = f"{each['sse']['ratio']:.2f}"
        if "over_link" in each.get("wake", {}):
            found[f"text.wake.{shape}"] = f"{each['wake']['cold_ms']:.0f}"
            found[f"text.wake-link.{shape}"] = f"{each['wake']['over_link']:.2f}"
    return found


def main() -> None:
    if sys.argv[1:2] == ["--clients"]:
        url, *numbers, at = sys.argv[2:]
        print(json.dumps(asyncio.run(clients(url, *map(int, numbers), float(at)))))
        return
    parser = harness.arguments(__doc__, device="cuda", quick=True, rounds=5)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["0.6B", "1B", "8B"])
    parser.add_argument("--parts", nargs="+", choices=PARTS, help="default: those that the issue of a shape needs")
    parser.add_argument("--profiles", action="store_true", help="write stored times of steps where simulations look")
    o = parser.parse_args()
    if o.profiles:
        RECORDED.write_text(json.dumps(profiles(harness.stored("language_models", o.out)), indent=1) + "\n")
        return
    if o.quick:
        o.device, o.shapes, o.rounds = "virtual:h200", ["tiny"], 2
    with pp.Device(o.device) as device:
        bandwidth = measured_bandwidth(device)
        stored = harness.stored("language_models", o.out)
        results: dict[str, Any] = {
            "bandwidth": bandwidth, "published": PUBLISHED, "rounds": o.rounds,
            "attention": stored.get("attention", {}), "shapes": stored.get("shapes", {}),
        }  # fmt: skip
        shapes = results["shapes"]
        for shape in o.shapes:
            parts = o.parts or USUAL.get(shape, PARTS)
            if "attention" in parts:
                runs = [attention(device, bandwidth, o.quick) for _ in range(o.rounds)]
                results["attention"] = rounds_of(runs)
            shapes[shape] = shapes.get(shape, {}) | measure(shape, parts, o, bandwidth)
            harness.save("language_models", results, device, o.out)  # a later shape may fail
        table = rows(results)
        harness.show("language models", table[0], table[1:])
        print(json.dumps(figures(results)))
        tables = {"language-models": table}
        print(harness.save("language_models", results, device, o.out, tables=tables, figures=figures(results)))


if __name__ == "__main__":
    main()
