"""Text to tokens and back: the tokenizer and chat template of a model's folder, text that grows, stop strings."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers.decoders import DecodeStream

from paellapy.scheduler.core.errors import InputError
from paellapy.scheduler.models.model_folder import read_json, read_tokenizer


class TextCodec:
    """The tokenizer of a folder, and its chat template."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.tokenizer = read_tokenizer(self.folder)
        about = self.folder / "tokenizer_config.json"
        self._about = read_json(about) if about.exists() else {}
        self._token_texts: dict[int, str] = {}

    @property
    def vocabulary(self) -> int:
        return int(self.tokenizer.get_vocab_size())

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, with those that the tokenizer puts around it."""
        return self._ids(text, add_special_tokens=True)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        """The tokens of a conversation as the model was trained to see it; the assistant's turn is next."""
        text = self.chat_text(messages, **options)
        return self._ids(text, add_special_tokens=False)

    def _ids(self, text: str, add_special_tokens: bool) -> list[int]:
        # A batch, since tokenizers leave the interpreter to other threads only for batches
        (found,) = self.tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)
        return list(found.ids)

    def chat_text(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """A conversation as text, by the folder's template."""
        special = {
            name: token["content"] if isinstance(token, Mapping) else token or ""
            for name, token in self._about.items()
            if name.endswith("_token")
        }
        given = {"add_generation_prompt": True, **special, **options, "messages": messages}
        try:
            return self._template.render(**given)
        except jinja2.TemplateError as e:
            raise InputError(
                f"the model's chat template refuses these messages: {e}", field="messages", given=len(messages)
            ) from None
        except (TypeError, AttributeError, KeyError, ValueError, ArithmeticError, RecursionError) as e:
            raise InputError(
                f"the model's chat template cannot use these messages ({type(e).__name__}: {e}): each needs a role and "
                "a content", field="messages", given=len(messages),
            ) from None  # fmt: skip

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(tokens)))

    def token_text(self, token: int) -> str:
        """The text of a single token."""
        found = self._token_texts.get(token)
        if found is None:
            found = self._token_texts[token] = self.decode([token])
        return found

    def growing(self, stop: Sequence[str] = ()) -> GrowingText:
        return GrowingText(self, stop)

    @property
    def has_chat(self) -> bool:
        """Whether the folder has a chat template."""
        return self._template_text is not None

    @cached_property
    def _template_text(self) -> str | None:
        path = self.folder / "chat_template.jinja"
        if path.exists():
            return path.read_text(encoding="utf-8")
        given = self._about.get("chat_template")
        if isinstance(given, list):  # several, by name
            given = {each["name"]: each["template"] for each in given}.get("default")
        return given

    @cached_property
    def _template(self) -> jinja2.Template:
        text = self._template_text
        if text is None:
            raise InputError(
                "this model has no chat template: send a prompt to /v1/completions, or add chat_template.jinja to its "
                "folder", field="messages",
            )  # fmt: skip
        extensions = ["jinja2.ext.loopcontrols"]
        around = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
        around.filters["tojson"] = _to_json
        around.globals["raise_exception"] = _refuse
        around.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        return around.from_string(text)


def _to_json(value: Any, indent: int | None = None, ensure_ascii: bool = False, **_: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _refuse(why: str) -> None:
    raise jinja2.TemplateError(why)


class Piece(NamedTuple):
    """One token of an answer. Its `text` is empty while a character or a stop string is not complete."""

    text: str
    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()  # the most probable tokens, with their log probabilities
    finish_reason: str | None = None  # of the last piece: "stop" or "length"


class GrowingText:
    """The text of tokens that come one by one. Bytes of a character are held back until it is whole; text that may be
    the beginning of a stop string, until that is known.

    `stopped` is the stop string that was found; the text ends before it.
    """

    def __init__(self, codec: TextCodec, stop: Sequence[str] = ()) -> None:
        self._codec, self._stream = codec, DecodeStream(skip_special_tokens=True)
        self._stop = [_StopString(text) for text in stop if text]
        self._held = ""
        self.stopped: str | None = None

    def add(self, token: int) -> str:
        """The text that is certain now."""
        if self.stopped is not None:
            return ""
        piece = self._stream.step(self._codec.tokenizer, token) or ""
        return self._certain(piece) if self._stop else piece

    def end(self) -> str:
        """The text that was held back."""
        held, self._held = self._held, ""
        return "" if self.stopped is not None else held

    def _certain(self, piece: str) -> str:
        text = self._held + piece
        ends = [(len(self._held) + end - len(stop.text), -len(stop.text), stop.text)
                for stop in self._stop if (end := stop.add(piece))]  # fmt: skip
        if ends:
            at, _, self.stopped = min(ends)
            self._held = ""
            return text[:at]
        keep = max((stop.begun for stop in self._stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


class _StopString:
    """A stop string that is looked for in a text as it comes, each character once (Knuth, Morris and Pratt).

    >>> stop = _StopString("<end>")
    >>> stop.add("a <en"), stop.begun, stop.add("d> and"), stop.begun
    (0, 3, 2, 5)
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.begun = 0  # how many of the last characters are the beginning of the stop string
        self._shorter = [0]  # for each beginning of the stop string: how long a shorter one it ends with

    def add(self, piece: str) -> int:
        """Takes more of the text; returns how much of it there is until the stop string ends, or 0."""
        for k, character in enumerate(piece):
            self._go_on(character)
            if self.begun == len(self.text):
                return k + 1
        return 0

    def _go_on(self, character: str) -> None:
        text, begun = self.text, self.begun
        while begun and text[begun] != character:
            begun = self._fallen(begun)
        self.begun = begun + (text[begun] == character)

    def _fallen(self, begun: int) -> int:
        """The next shorter beginning that the last `begun` characters end with."""
        text, shorter = self.text, self._shorter
        while len(shorter) < begun:  # made as far as a text has come
            n, last = shorter[-1], text[len(shorter)]
            while n and text[n] != last:
                n = shorter[n - 1]
            shorter.append(n + (text[n] == last))
        return shorter[begun - 1]
