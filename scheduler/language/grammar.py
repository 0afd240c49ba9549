"""Answers of a given form: which tokens may follow, by a JSON schema (package llguidance)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from paellapy.scheduler.core.errors import InputError
from paellapy.scheduler.models.model_folder import LanguageModelError

MOST_STATES = 50_000  # of the automaton of one answer: they take 1 to 2 KB each
_LAYOUT: Any = {"whitespace_pattern": "[ \\n]?"}  # small models would otherwise write blanks without end


class Grammars:
    """Makes the guides of one model's answers."""

    def __init__(self, folder: str | Path, vocabulary: int, eos: Sequence[int]) -> None:
        """`folder` has the model's tokenizer."""
        try:
            import llguidance
        except ModuleNotFoundError:
            raise InputError(
                "answers by a JSON schema need the package 'llguidance': install paellapy with the extra 'structured' "
                "on the server", field="json_schema",
            ) from None  # fmt: skip
        self._library, self._words = llguidance, -(-vocabulary // 32)
        try:
            path = Path(folder) / "tokenizer.json"
            self._tokenizer = llguidance.LLTokenizer(str(path), vocabulary, list(eos) or None)
        except ValueError as e:
            raise LanguageModelError(f"llguidance cannot use this tokenizer: {e}", path=folder) from None
        self._limits = llguidance.LLParserLimits(max_lexer_states=MOST_STATES, verbose_errors=False)

    def guide(self, schema: str | Mapping[str, Any]) -> Guide:
        """InputError: the schema cannot be used."""
        matcher = self._library.LLMatcher
        try:
            text = schema if isinstance(schema, str) else json.dumps(schema)
            grammar = matcher.grammar_from_json_schema(text, _LAYOUT)
            made = matcher(self._tokenizer, grammar, log_level=0, limits=self._limits)
        except (TypeError, ValueError, RecursionError) as e:
            raise _refused(str(e)) from None
        if made.is_error():
            raise _refused(made.get_error())
        guide = Guide(made, self._words)
        if made.is_error() or not guide.mask.any():  # known once the first token is asked for
            raise _refused(made.get_error() or "no text fulfils it")
        return guide


def _refused(why: str) -> InputError:
    first = why.strip().splitlines()[0] if why.strip() else "it is no JSON schema"
    return InputError(f"the JSON schema cannot be used: {first}", field="json_schema")


class Guide:
    """One answer on its way through the grammar."""

    def __init__(self, matcher: Any, words: int) -> None:
        self._matcher = matcher
        self.mask = np.zeros(words, np.int32)  # a bit for each token: whether it may be next
        self._set_mask()

    def take(self, token: int) -> bool:
        """Goes on by one token. True: the answer is complete."""
        self._matcher.consume_token(token)
        if self._matcher.is_stopped() or self._matcher.is_error():
            return True
        self._set_mask()
        return False

    def _set_mask(self) -> None:
        self._matcher.unsafe_compute_mask_ptr(self.mask.ctypes.data, self.mask.nbytes)
