"""Text to tokens and back, whatever pieces it comes in."""

from __future__ import annotations

from pathlib import Path

import pytest
from failing import failing
from hypothesis import given
from hypothesis import strategies as st
from language_families import byte_tokenizer

from paellapy.scheduler.core.errors import InputError
from paellapy.scheduler.language.text import GrowingText, TextCodec
from paellapy.scheduler.models.model_folder import LanguageModelError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    byte_tokenizer(made)
    return made


@pytest.fixture(scope="module")
def codec(folder: Path) -> TextCodec:
    return TextCodec(folder)


@given(text=st.text(max_size=40), stop=st.lists(st.text(min_size=1, max_size=4), max_size=3))
def test_growing_text_is_the_text_up_to_the_first_stop_string(codec: TextCodec, text: str, stop: list[str]) -> None:
    growing = GrowingText(codec, stop)
    pieces = [growing.add(token) for token in codec.encode(text)]
    found = "".join(pieces) + growing.end()
    ends = [text.index(each) for each in stop if each in text]
    assert found == (text[: min(ends)] if ends else text)
    assert (growing.stopped is not None) == bool(ends)


def test_a_character_of_several_tokens_comes_whole(codec: TextCodec):
    growing = GrowingText(codec)
    assert [growing.add(token) for token in codec.encode("aé€")] == ["a", "", "é", "", "", "€"]


def test_a_conversation_is_written_by_the_template(codec: TextCodec):
    messages = [{"role": "user", "content": "hi"}]
    assert codec.has_chat
    assert codec.chat_text(messages) == "<user>hi|<assistant>"
    assert codec.decode(codec.encode_chat(messages, add_generation_prompt=False)) == "<user>hi|"
    with failing(InputError, field="messages"):
        codec.chat_text([{"role": "tool", "content": ""}])


def test_a_template_cannot_reach_python(codec: TextCodec, folder: Path, tmp_path: Path):
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    (tmp_path / "chat_template.jinja").write_text("{{ messages.__class__.__mro__ }}")
    with failing(InputError, field="messages"):
        TextCodec(tmp_path).chat_text([])


def test_folders_without_a_tokenizer_are_refused(tmp_path: Path):
    with failing(LanguageModelError, field="tokenizer"):
        TextCodec(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with failing(LanguageModelError, path=tmp_path / "tokenizer.json"):
        TextCodec(tmp_path)
