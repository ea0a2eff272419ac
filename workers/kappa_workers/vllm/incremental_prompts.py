"""Lets vLLM's front end tokenize only the new part of a prompt, by `kappa.incremental_tokenizer`.
All APIs (chat, completions, responses, messages) come through the one method that is replaced here.

A follow-up turn repeats its conversation. vLLM encodes all its tokens again, 2 us each, and decodes
all of them when the first token of the answer comes, 0.25 us each on the event loop. A tenant's
prompts are remembered for that tenant alone; requests without a tenant (`kappa_workers.generated`),
and tokenizers for which the cache cannot be proved, go vLLM's own way.
Private names of vLLM: tests/workers/test_contracts.py.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
import json
from typing import Any

import numpy as np
import structlog
from vllm.v1.engine import detokenizer

from kappa.incremental_tokenizer import IncrementalTokenizer, Lookup
from kappa_workers import generated

log = structlog.get_logger(__name__)

# More new text is encoded in a thread, and a longer text is looked up there, in 2 ms for
# a million characters.
_ENCODED_AT_ONCE_CHARS, _LOOKED_UP_AT_ONCE_CHARS = 16 << 10, 256 << 10
_TRIED = ("", "a", " Hello\n", "it's 12 \u00e9t\u00e9 \u4e2d\u6587 \U0001f600\n\nb", " ")
_MOST_SPECIALS = 16
# A character has four bytes, and a token at least one.
_TAIL_TOKENS = 64
# Decoders for which what a token adds to a text depends on its neighbours alone.
_LOCAL = frozenset(("ByteLevel", "Metaspace", "Replace", "ByteFallback", "Fuse", "Strip"))
_INCOMPLETE = "\ufffd"


class IncrementalPrompts:
    """Stands in a renderer's instance for its `_tokenize_prompt_async`.

    Args:
        tokenizer: encodes as `renderer` does, but for truncation.
        renderer: vLLM's `BaseRenderer`.
    """

    def __init__(self, tokenizer: IncrementalTokenizer, renderer: Any) -> None:
        self._tokenizer, self._stock = tokenizer, renderer._tokenize_prompt_async
        # Python's numbers, made once: `tolist` would make new ones for each prompt, in three times
        # the time and with five times the memory in the prompt's list and its copies.
        most = max(renderer.tokenizer.backend_tokenizer.get_vocab().values())
        self._numbers = np.arange(most + 1).astype(object)

    async def __call__(self, prompt: Any, params: Any) -> Any:
        """A `TextPrompt` as a `TokensPrompt`, by vLLM's `TokenizeParams`."""
        request, wanted = generated.current(), params.get_encode_kwargs()
        if request is None or not request.tenant or params.return_token_offsets:
            return await self._stock(prompt, params)
        text, special = prompt["prompt"], wanted["add_special_tokens"]
        try:
            if len(text) <= _LOOKED_UP_AT_ONCE_CHARS:
                known = self._tokenizer.look_up(text, request.tenant)
            else:
                known = await asyncio.to_thread(self._tokenizer.look_up, text, request.tenant)
            if known.missing_chars <= _ENCODED_AT_ONCE_CHARS:
                ids = self._ids(known, special)
            else:
                ids = await asyncio.to_thread(self._ids, known, special)
        except (TypeError, UnicodeError):  # No text: vLLM says what is wrong with it.
            ids = None
        if ids is None or (wanted["truncation"] and len(ids) > wanted["max_length"]):
            return await self._stock(prompt, params)
        return {"prompt_token_ids": ids, **prompt}

    def _ids(self, known: Lookup, special: bool) -> list[int]:
        ids = self._tokenizer.finish(known, add_special_tokens=special)
        return self._numbers.take(ids).tolist()


class TailDetokenizer(detokenizer.FastIncrementalDetokenizer):
    """vLLM's, which begins with the last tokens of a prompt instead of all of them."""

    def __init__(self, tokenizer: Any, request: Any) -> None:
        skip = request.sampling_params.skip_special_tokens
        tail = (request.prompt_token_ids or ())[-_TAIL_TOKENS:]
        text = tokenizer.backend_tokenizer.decode(tail, skip_special_tokens=skip) if tail else ""
        # Without a text, or behind half a character, what comes next depends on more.
        if text and not text.endswith(_INCOMPLETE):
            request = copy.copy(request)
            request.prompt_token_ids = tail
        super().__init__(tokenizer, request)


def install(renderer: Any) -> bool:
    """Let the front end of a `BaseRenderer` encode only new text, if that is proved exact for its
    tokenizer; returns whether it is. Takes some 100 ms, and memory for a copy of the tokenizer."""
    tokenizer = renderer.tokenizer
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return False
    if _decodes_locally(backend):
        detokenizer.FastIncrementalDetokenizer = TailDetokenizer  # type: ignore[misc]
    if getattr(tokenizer, "split_special_tokens", False):
        return False
    # A copy of our own: each call sets how vLLM's truncates.
    backend = copy.deepcopy(backend)
    backend.no_truncation()
    backend.no_padding()
    made = IncrementalTokenizer(backend)
    if not made.exact.specials or not _agree(made, backend, renderer):
        log.info("prompts_tokenized_whole", reason="the tokenizer's cuts cannot be proved")
        return False
    renderer._tokenize_prompt_async = IncrementalPrompts(made, renderer)
    return True


def _agree(made: IncrementalTokenizer, backend: Any, renderer: Any) -> bool:
    """Whether vLLM's own way, with all that it does before and after its tokenizer, gives the same
    tokens of texts around special tokens."""
    added = [token.content for token in backend.get_added_tokens_decoder().values()]
    specials = ["", *added[:_MOST_SPECIALS]]
    for params in (renderer.default_chat_tok_params, renderer.default_cmpl_tok_params):
        special = params.get_encode_kwargs()["add_special_tokens"]
        for left, middle, right in itertools.product(_TRIED, specials, _TRIED):
            text = left + middle + right
            theirs = renderer._tokenize_prompt({"prompt": text}, params)["prompt_token_ids"]
            if made.encode(text, add_special_tokens=special).tolist() != list(theirs):
                return False
    return True


def _decodes_locally(backend: Any) -> bool:
    """Whether what a token adds to a text depends on the tokens near it alone."""
    state = {} if backend.decoder is None else json.loads(backend.decoder.__getstate__())
    return {one.get("type") for one in state.get("decoders", [state])} <= _LOCAL
