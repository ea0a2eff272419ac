"""Tokenizes a text that mostly repeats an earlier one at the cost of its new part.

Theory of operation. A tokenizer of Hugging Face first cuts a text at its special tokens, then
normalizes, cuts (pre-tokenizes) and encodes every part by itself. So the tokens of a text are the
tokens of its parts, one after the other, and parts that were seen before need not be encoded again.
A chat template puts special tokens around every message: a follow-up turn has new text in its last
parts only. Long parts are cut once more at boundaries where the pre-tokenizer always cuts: a letter
behind a single line feed. Cuts depend only on the text before them, so a longer text has the same.

Neither holds for every tokenizer (one may put a space before the first part only, or strip around a
special token). `exactness` decides at load, by the tokenizer's structure and by trying every
combination of character classes around a cut; without that proof texts are encoded whole.

The router's decider and the worker's engine use the same class. Pure but for its cache, which is
safe between threads, bounded in bytes, and kept apart by tenant: a fast answer tells a tenant only
about its own texts.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int32]
Encode = Callable[[list[str]], list[Ids]]

CACHE_BYTES = 256 << 20
"""Default bound of a cache: ids of 64 million tokens."""

# A part is cut at the first boundary after this many characters. Larger: a changed word costs
# encoding that much again; smaller: more look-ups.
_CHUNK_CHARS = 4096
# Memory of a cached part besides its ids: key, array, list node.
_ENTRY_BYTES = 256
_BOUNDARY = "\n"

# Representatives of the classes that pre-tokenizers' patterns tell apart.
_CLASSES = tuple("aZ7 \n\r\t.'_\u00e9\u4e2d\u0301\u00a0")
_LETTERS = tuple("aZ\u00e9\u4e2d")
_WORDS = (
    "", " ", "a", " a", "a ", "Hello world", "\n", "\nuser\n", "\n\n", "it's 12345", ".",
    " \u00e9t\u00e9", "\u4e2d\u6587", "\U0001f600", "\u0301x",
)  # fmt: skip


class Part(NamedTuple):
    """A part of a text: a special token (`token` is its id), or text to encode (`token` is -1)."""

    text: str
    token: int = -1


@dataclass(frozen=True, slots=True)
class Exactness:
    """Properties proved of a tokenizer. Without `specials` it must encode a text whole."""

    specials: bool
    """Tokens of a text are those of its parts between special tokens."""
    boundaries: bool
    """A part may be cut before a letter that follows a single line feed."""


class SegmentCache:
    """Ids by tenant and text, least recently used first out."""

    def __init__(self, most_bytes: int = CACHE_BYTES) -> None:
        self._most_bytes = most_bytes
        # Of all entries, their keys and lists included.
        self.size_bytes = 0
        self._ids: OrderedDict[bytes, Ids] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: bytes) -> Ids | None:
        with self._lock:
            found = self._ids.get(key)
            if found is not None:
                self._ids.move_to_end(key)
            return found

    def put(self, key: bytes, ids: Ids) -> None:
        with self._lock:
            before = self._ids.pop(key, None)
            self.size_bytes += ids.nbytes + _ENTRY_BYTES
            self.size_bytes -= before.nbytes + _ENTRY_BYTES if before is not None else 0
            self._ids[key] = ids
            while self.size_bytes > self._most_bytes and self._ids:
                gone = self._ids.popitem(last=False)[1]
                self.size_bytes -= gone.nbytes + _ENTRY_BYTES


class Lookup:
    """A text being encoded: the ids found in the cache, and the parts still to encode."""

    def __init__(
        self, parts: Sequence[Part], keys: Sequence[bytes], found: list[Ids | None]
    ) -> None:
        self._keys, self._found = keys, found
        self._missing = [i for i, ids in enumerate(found) if ids is None]
        self.missing: list[str] = [parts[i].text for i in self._missing]
        """Texts that are not in the cache, in order."""
        self.missing_chars = sum(map(len, self.missing))

    def fill(self, encoded: Sequence[Ids], cache: SegmentCache) -> None:
        """Add the ids of `missing`, in that order, here and to the cache."""
        for at, ids in zip(self._missing, encoded, strict=True):
            self._found[at] = ids
            cache.put(self._keys[at], ids)

    def ids(self, before: Ids, after: Ids) -> Ids:
        """All ids, with those that the tokenizer puts before and after a text."""
        known = [ids for ids in self._found if ids is not None]
        assert len(known) == len(self._found), "fill it first"
        return np.concatenate([before, *known, after])


class IncrementalTokenizer:
    """Encodes with a `tokenizers.Tokenizer`, part by part.

    Args:
        backend: the tokenizer; neither truncating nor padding.
        cache: may be shared by several tokenizers.
    """

    def __init__(self, backend: Any, cache: SegmentCache | None = None) -> None:
        self._backend = backend
        self.cache = cache or SegmentCache()
        self._specials = _Specials(backend)
        self.exact = exactness(backend, self._specials)
        # A cache may be shared by tokenizers of several models.
        self._name = hashlib.blake2b(backend.to_str().encode(), digest_size=16).digest()
        self._around = {special: self._ends(special) for special in (False, True)}

    def look_up(self, text: str, tenant: str = "") -> Lookup:
        """Look a text's parts up in the cache; a text that must be encoded whole is one part."""
        parts = list(self._parts(text))
        seed = hashlib.blake2b(self._name, key=tenant.encode()[:64], digest_size=16)
        keys, found = list[bytes](), list[Ids | None]()
        for part in parts:
            if part.token >= 0:
                keys.append(b"")
                found.append(np.array([part.token], dtype=np.int32))
                continue
            key = seed.copy()
            key.update(part.text.encode(errors="surrogatepass"))
            keys.append(key.digest())
            found.append(self.cache.get(keys[-1]))
        return Lookup(parts, keys, found)

    def encode(self, text: str, tenant: str = "", *, add_special_tokens: bool = False) -> Ids:
        """Token ids of a text, int32, equal to the tokenizer's own."""
        return self.finish(self.look_up(text, tenant), add_special_tokens=add_special_tokens)

    def finish(
        self, looked_up: Lookup, *, add_special_tokens: bool = False, encode: Encode | None = None
    ) -> Ids:
        """Encode the missing parts of a text, and return all its ids. encode: encodes parts instead
        of `encode_parts`."""
        if looked_up.missing:
            looked_up.fill((encode or self.encode_parts)(looked_up.missing), self.cache)
        return looked_up.ids(*self._around[add_special_tokens])

    def encode_parts(self, texts: Sequence[str]) -> list[Ids]:
        """Ids of several texts, without special tokens around them. Releases the GIL."""
        found = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(one.ids, dtype=np.int32) for one in found]

    def _ends(self, special: bool) -> tuple[Ids, Ids]:
        """Ids that the tokenizer puts before and after a text."""
        bare = list(self._backend.encode("a", add_special_tokens=False).ids)
        dressed = list(self._backend.encode("a", add_special_tokens=special).ids)
        at = next(
            (i for i in range(len(dressed)) if dressed[i : i + len(bare)] == bare), len(dressed)
        )
        before, after = dressed[:at], dressed[at + len(bare) :]
        return np.array(before, dtype=np.int32), np.array(after, dtype=np.int32)

    def _parts(self, text: str) -> Iterator[Part]:
        if not self.exact.specials:
            yield Part(text)
            return
        for part in self._specials.cut(text):
            if part.token >= 0 or not self.exact.boundaries:
                yield part
            else:
                yield from map(Part, _chunks(part.text))


class _Specials:
    """Special tokens that a text is cut at before anything else happens to it."""

    def __init__(self, backend: Any) -> None:
        # Ids of those that are cut at, by text; others are found as well, but left in their part.
        self.ids, kept = dict[str, int](), set[str]()
        for token_id, token in backend.get_added_tokens_decoder().items():
            if token.normalized or not token.content:
                continue  # Looked for within a part, once that is normalized.
            if token.lstrip or token.rstrip or token.single_word:
                kept.add(token.content)
            else:
                self.ids[token.content] = int(token_id)
        # By first character, which `find` looks for at memory speed. Longest first: of several
        # tokens that begin at one place the longest is found.
        self._by_start: dict[str, tuple[str, ...]] = {}
        for one in sorted({*self.ids, *kept}, key=len, reverse=True):
            self._by_start[one[0]] = (*self._by_start.get(one[0], ()), one)

    def cut(self, text: str) -> Iterator[Part]:
        """The parts of a text; none of them is empty."""
        start = 0
        places = {first: self._next(text, first, 0) for first in self._by_start}
        while (at := min((one for one in places.values() if one >= 0), default=-1)) >= 0:
            first = text[at]
            found = next(one for one in self._by_start[first] if text.startswith(one, at))
            stop = at + len(found)
            if found in self.ids:
                if at > start:
                    yield Part(text[start:at])
                yield Part(found, self.ids[found])
                start = stop
            for each, place in places.items():
                if 0 <= place < stop:
                    places[each] = self._next(text, each, stop)
        if start < len(text):
            yield Part(text[start:])

    def _next(self, text: str, first: str, at: int) -> int:
        """Position of the next special token with this first character; -1 if there is none."""
        tokens = self._by_start[first]
        at = text.find(first, at)
        while at >= 0 and not text.startswith(tokens, at):
            at = text.find(first, at + 1)
        return at


def _chunks(text: str) -> Iterator[str]:
    """A part in pieces, each at least `_CHUNK_CHARS` long but for the last one."""
    start = 0
    while len(text) - start > _CHUNK_CHARS:
        at = text.find(_BOUNDARY, start + _CHUNK_CHARS)
        while at >= 0 and not _is_boundary(text, at):
            at = text.find(_BOUNDARY, at + 1)
        if at < 0:
            break
        yield text[start : at + 1]
        start = at + 1
    if start < len(text):
        yield text[start:]


def _is_boundary(text: str, at: int) -> bool:
    """Whether a letter follows the line feed at `at`, and no white space stands before it."""
    behind = text[at + 1 : at + 2]
    return behind.isalpha() and not text[at - 1].isspace()


# -- proof ----------------------------------------------------------------------------------------


def exactness(backend: Any, specials: _Specials | None = None) -> Exactness:
    """Find out where texts may be cut without changing a token. Takes some 100 ms."""
    specials = specials or _Specials(backend)
    added = backend.get_added_tokens_decoder().values()
    state = json.loads(backend.to_str())
    deterministic = not state["model"].get("dropout")
    plain = backend.truncation is None and backend.padding is None
    if not (deterministic and plain) or any(token.single_word for token in added):
        return Exactness(False, False)
    by_specials = all(
        _encoded(backend, left + special + right)
        == [*_encoded(backend, left), token, *_encoded(backend, right)]
        for special, token in itertools.islice(specials.ids.items(), 32)
        for left, right in itertools.product(_WORDS, repeat=2)
    )
    # Without a pre-tokenizer that cuts, any merge may reach across.
    across = any(_BOUNDARY in token.content for token in added)
    known = _normalizes_locally(state.get("normalizer")) and state.get("pre_tokenizer") is not None
    return Exactness(by_specials, by_specials and known and not across and _cuts(backend))


def _encoded(backend: Any, text: str) -> list[int]:
    return list(backend.encode(text, add_special_tokens=False).ids) if text else []


def _normalizes_locally(normalizer: Any) -> bool:
    """Whether a letter after a line feed is normalized independently of the text before."""
    return normalizer is None or normalizer.get("type") in ("NFC", "NFKC", "Lowercase")


def _cuts(backend: Any) -> bool:
    """Whether the pre-tokenizer always cuts at a boundary, whatever stands around it: every string
    of two classes before, and of two behind the letter, is tried."""
    cutter = backend.pre_tokenizer
    pairs = list(itertools.product(_CLASSES, repeat=2))
    lefts = [a + b + _BOUNDARY for a, b in pairs if not b.isspace()]
    rights = [x + a + b for x in _LETTERS for a, b in pairs]

    def cut(text: str) -> list[str]:
        return [piece for piece, _ in cutter.pre_tokenize_str(text)]

    by_right = {right: cut(right) for right in rights}
    few = rights[:: max(len(rights) // 64, 1)]
    for number, left in enumerate(lefts):
        own = cut(left)
        # Every left with some rights, some lefts with every right.
        for right in rights if number % 16 == 0 else few:
            if cut(left + right) != own + by_right[right]:
                return False
    return True
