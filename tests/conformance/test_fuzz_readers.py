"""Files, settings and events that are nonsense: a clear error of the reader's own, and no other."""

import json
from collections import Counter

import msgspec
import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from kappa.protocol import Announcement, WorkerReport
from kappa.settings.base import SettingsError
from kappa.settings.cluster import ClusterSettings, load_settings
from kappa_router.index.prefix_hash import PrefixHasher
from kappa_router.index.prefix_index import PrefixIndex
from kappa_workload.catalogue import workload_named
from kappa_workload.reading import WorkloadError
from tests.router.kv_batches import decode_batch

QUICK = settings(max_examples=150, deadline=None, suppress_health_check=[*HealthCheck])
SCALAR = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
    | st.sampled_from([2**63, -1, 10**30, "", "\x00", "nan"])
)  # fmt: skip
JSON = st.recursive(
    SCALAR,
    lambda inner: (
        st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=8), inner, max_size=5)
    ),
    max_leaves=10,
)

# -- trace readers ----------------------------------------------------------------------------

GOOD = {
    "mooncake.jsonl": {
        "timestamp": 10, "input_length": 1000, "output_length": 5, "hash_ids": [1, 2],
    },
    "sessions.jsonl": {"session": "a", "turn": 0, "input": "text", "output": "text"},
    "questions.jsonl": {"document": "d", "question": "q", "tokens": 5},
}  # fmt: skip


def write(folder, name, content):
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def read(path):
    """The reader may succeed or refuse; anything else is a fault of ours."""
    try:
        workload_named(str(path))
    except WorkloadError as error:
        assert str(error)


@QUICK
@given(name=st.sampled_from(sorted(GOOD)), key=st.integers(0, 3), value=JSON, drop=st.booleans())
def test_a_trace_with_a_bent_line_is_refused_by_name(tmp_path_factory, name, key, value, drop):
    record = dict(GOOD[name])
    field = list(record)[key % len(record)]
    if drop:
        record.pop(field)
    else:
        record[field] = value
    lines = [json.dumps(GOOD[name]), json.dumps(record)]
    read(write(tmp_path_factory.mktemp("trace"), name, "\n".join(lines)))


@QUICK
@given(suffix=st.sampled_from([".jsonl", ".json", ".csv", ".txt", ".parquet"]),
       content=st.binary(max_size=300))  # fmt: skip
@example(".csv", b"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,1,\xff\n")
@example(".json", b'[{"conversations": 5}]')
def test_bytes_that_are_no_trace_are_refused(tmp_path_factory, suffix, content):
    read(write(tmp_path_factory.mktemp("trace"), f"trace{suffix}", content))


# -- settings ---------------------------------------------------------------------------------

SECTIONS = sorted(ClusterSettings.model_fields)
FIELDS = sorted({
    name for section in ClusterSettings.model_fields.values()
    for name in getattr(section.annotation, "model_fields", {})
})  # fmt: skip


@QUICK
@given(section=st.sampled_from(SECTIONS), field=st.sampled_from(FIELDS), value=JSON)
@example("dilation", "name", float("nan"))
@example("dilation", "name", float("inf"))
def test_settings_are_read_or_refused_with_a_reason(tmp_path_factory, section, field, value):
    folder = tmp_path_factory.mktemp("settings")
    for content in ({section: value}, {section: {field: value}}, {section: [{field: value}]}):
        path = write(folder, "c.yaml", yaml.safe_dump(json.loads(json.dumps(content))))
        try:
            assert isinstance(load_settings(path), ClusterSettings)
        except SettingsError as error:
            assert str(path) in str(error)


@QUICK
@given(content=st.binary(max_size=200) | st.text(max_size=200))
def test_a_settings_file_of_anything_is_read_or_refused(tmp_path_factory, content):
    if isinstance(content, str):
        content = content.encode(errors="surrogatepass")
    path = write(tmp_path_factory.mktemp("settings"), "c.yaml", content)
    try:
        load_settings(path)
    except SettingsError as error:
        assert str(path) in str(error)


# -- what workers say -------------------------------------------------------------------------

HASH = st.integers() | st.binary(max_size=20) | st.text(max_size=5) | st.none()
EVENT = st.fixed_dictionaries(
    {"type": st.sampled_from(["BlockStored", "BlockRemoved", "AllBlocksCleared", "Other"])},
    optional={
        "block_hashes": st.lists(HASH, max_size=4),
        "parent_block_hash": HASH,
        "token_ids": st.lists(st.integers(-(2**63), 2**64 - 1), max_size=40) | SCALAR,
        "block_size": st.sampled_from([0, 1, 4, 16, -1, None, "4", 2**40]),
        "lora_id": st.none() | st.integers(0, 3),
        "medium": st.sampled_from(["GPU", "CPU", "DISK", None, 5]),
        "extra_keys": st.none() | st.lists(st.none() | st.lists(SCALAR, max_size=2), max_size=3),
        "group_idx": st.none() | st.integers(0, 2),
        "kv_cache_spec_kind": st.sampled_from(["full_attention", "sliding_window", "mamba", "x"]),
        "kv_cache_spec_sliding_window": st.none() | st.integers(-(2**63), 2**64 - 1),
    },
)


def packed(value):
    try:
        return msgspec.msgpack.encode(value)
    except (OverflowError, UnicodeEncodeError):
        return b"\xc1"


@settings(QUICK, max_examples=400)
@given(events=st.lists(EVENT, max_size=4), when=st.floats() | SCALAR, rank=st.integers(-1, 2))
def test_events_are_decoded_or_refused_and_the_index_stands(events, when, rank):
    hasher = PrefixHasher(16, secret=1)
    index = PrefixIndex(hasher, 100)
    try:
        decoded = decode_batch(packed([when, events, rank]), "w", Counter())
    except ValueError as error:
        assert "worker w" in str(error)
        return
    for event in decoded:
        index.handle(event)
    assert index.stats()["blocks"] <= 100
    assert not index.match_columns(hasher.prefix_hashes(range(64))).any()


@settings(QUICK, max_examples=400)
@given(payload=st.binary(max_size=200))
def test_bytes_that_are_no_batch_are_refused(payload):
    try:
        decode_batch(payload, "w", Counter())
    except ValueError as error:
        assert "worker w" in str(error)


@QUICK
@given(data=st.dictionaries(st.sampled_from(sorted(Announcement.__dataclass_fields__)), JSON))
def test_an_announcement_of_anything_is_refused(data):
    with pytest.raises((ValueError, TypeError)):
        Announcement.from_dict(data)


@QUICK
@given(
    data=st.dictionaries(st.sampled_from(sorted(WorkerReport.__struct_fields__)), JSON),
    named=st.booleans(),
)
def test_a_report_of_anything_is_read_or_refused(data, named):
    base = {"worker": "w", "time_s": 1.0} if named else {}
    try:
        WorkerReport.from_dict({**base, **data})
    except (ValueError, TypeError):
        return
