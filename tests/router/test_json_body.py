"""Bodies as far as they are read: fields, bounds, faults, and the same values as `json.loads`."""

import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kappa_router import json_body
from kappa_router.json_body import (
    MAX_CONTAINERS,
    MAX_FIELDS,
    MAX_NESTING,
    MAX_VALUES,
    UNREAD,
    ExcessiveError,
    MalformedError,
    NoObjectError,
    read_object,
    shape_of,
)


def nested(depth):
    return b"[" * depth + b"]" * depth


def body_of(value):
    return b'{"x": %b}' % value


# -- fields ------------------------------------------------------------------------------------


def test_wanted_fields_are_decoded_and_others_are_not():
    body = b' {"a" : [1, {"b": "c"}],\n"n":null , "\\u0062":{"x": [[]]}, "z":"}" }\r\n'
    assert read_object(body, {"a"}) == {"a": [1, {"b": "c"}], "n": None, "b": UNREAD, "z": UNREAD}
    assert read_object(body, {"b", "n", "y"})["b"] == {"x": [[]]}
    assert read_object(b"{ }", {"a"}) == {}


def test_last_of_fields_with_one_name_counts():
    body = b'{"a": 1, "a": [2], "b": 1, "b": null}'
    assert read_object(body, {"a"}) == {"a": [2], "b": None}


def test_brackets_in_texts_and_escaped_quotes_are_text():
    text = '"[{' * 70_000 + "\\"
    body = json.dumps({"a": text, "b": [text]}).encode()
    assert read_object(body, {"a", "b"}) == {"a": text, "b": [text]}
    assert shape_of(body) == (2, 2)


def test_unread_fields_have_only_their_marks_checked():
    assert read_object(b'{"a": nonsense, "b": 01, "c": 1}', {"c"})["c"] == 1
    for inside in (b"[}", b'"', b"[", b"]", b"", b"1,"):
        with pytest.raises(MalformedError):
            read_object(b'{"c": 1, "a": ' + inside + b"}", {"c"})


# -- faults ------------------------------------------------------------------------------------


@pytest.mark.parametrize("body", [b"", b"  ", b"7", b"[]", b'"a"', b"null", b"\xff", nested(999)])
def test_body_that_is_no_object_is_refused_as_such(body):
    with pytest.raises(NoObjectError):
        read_object(body, {"a"})


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"{", "missing"), (b'{"a', "missing"), (b'{"a": 1', "missing"), (b"{]", "missing"),
        (b'{"a": 1}}', "one too many"), (b'{"a": 1} x', "one too many"), (b"{,}", "missing"),
        (b'{"a": 1,}', "missing"), (b'{"a": 1,,"b": 2}', "missing"), (b'{"a\\": 1}', "missing"),
        (b'{"a"}', "no name or no value"), (b'{"a": }', "no name or no value"),
        (b'{: 1}', "a field's name"), (b'{a: 1}', "a field's name"), (b'{7: 1}', "a field's name"),
        (b'{"\xff": 1}', "a field's name"), (b'{"a": 01}', "in a"), (b'{"a": 1:2}', "in a"),
        (b'{"a": NaN}', "in a"), (b'{"a": [1,]}', "trailing comma in array in a"),
        (b'{"a": "\xff"}', "in a"), (b'{"a": "\x01"}', "in a"), (b'{"a": 1e999}', "in a"),
        (b'{"a": "\\ud800"}', "in a"),
    ],
)  # fmt: skip
def test_malformed_json_is_refused_with_the_reason(body, why):
    with pytest.raises(MalformedError, match=why) as caught:
        read_object(body, {"a"})
    assert caught.value.field == ("a" if why.endswith("in a") else None)
    assert "byte" not in str(caught.value)


# -- bounds ------------------------------------------------------------------------------------


def listed(one, count):
    return body_of(b"[" + one + (b"," + one) * (count - 1) + b"]")


def fields(count):
    return b'{"x":0' + b',"a":0' * (count - 1) + b"}"


@pytest.mark.parametrize(
    ("bodies", "bound"),
    [
        ((listed(b"[]", n) for n in (MAX_CONTAINERS - 2, MAX_CONTAINERS - 1)), MAX_CONTAINERS),
        ((listed(b"{}", n) for n in (MAX_CONTAINERS - 2, MAX_CONTAINERS - 1)), MAX_CONTAINERS),
        ((listed(b"0", n) for n in (MAX_VALUES + 1, MAX_VALUES + 2)), MAX_VALUES),
        ((body_of(nested(n)) for n in (MAX_NESTING - 1, MAX_NESTING)), MAX_NESTING),
        ((fields(n) for n in (MAX_FIELDS, MAX_FIELDS + 1)), MAX_FIELDS),
    ],
    ids=["lists", "objects", "values", "nesting", "fields"],
)
def test_body_beyond_a_bound_is_refused_with_the_remedy(bodies, bound):
    fits, exceeds = bodies
    assert read_object(fits, ())["x"] is UNREAD
    with pytest.raises(ExcessiveError, match=rf" {bound}\b.*: \w+"):
        read_object(exceeds, ())


def test_shape_has_the_containers_and_the_nesting():
    assert shape_of(b'[1, {"a": [[]], "b": "[["}, []] ') == (5, 4)
    assert shape_of(b" {} ") == (1, 1)
    for text in (b"7", b"", b'"["', b"[1,]", b"[}"):
        with pytest.raises(MalformedError):
            shape_of(text)
    with pytest.raises(ExcessiveError, match="deeper"):
        shape_of(nested(MAX_NESTING + 1))


# -- the same as the standard library ------------------------------------------------------------

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
NUMBERS = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXTS,
    lambda inside: st.lists(inside, max_size=9) | st.dictionaries(TEXTS, inside, max_size=9),
    max_leaves=60,
)
NAMES = st.sampled_from(["model", "messages", "prompt", "tools", "a\u00e9", "", '"'])
WRITTEN = st.tuples(st.booleans(), st.sampled_from([None, 0, 3]), st.sampled_from([",", " , "]))


def same(one, other):
    """Equal in value and type: 1 is not 1.0, nor True."""
    return json.dumps(one) == json.dumps(other)


def check_as_the_standard_library(data, wanted, written):
    ascii_only, indent, comma = written
    body = json.dumps(data, ensure_ascii=ascii_only, indent=indent, separators=(comma, " : "))
    found, expected = read_object(body.encode(), wanted), json.loads(body)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if name in wanted:
            assert same(found[name], value)
        else:
            assert found[name] is (None if value is None else UNREAD)


@pytest.mark.parametrize("size", [1, 7, 64])
@given(data=st.dictionaries(NAMES | TEXTS, VALUES), wanted=st.sets(NAMES), written=WRITTEN)
def test_fields_read_equal_the_standard_librarys(size, data, wanted, written):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_body, "PART_BYTES", size)
        check_as_the_standard_library(data, wanted | {""}, written)


MARKS = st.binary(max_size=30) | st.lists(
    st.sampled_from([*'[]{}",:\\ 01en-', '"a"', "null", "true", "\n", "\u00e9"]), max_size=14
).map(lambda marks: "".join(marks).encode())


@given(MARKS)
@example(b'"a":1,"a":2')
@example(b'"a":{"b":1,"b":2,"c":[1,2,3]}')
def test_body_read_whole_is_valid_json(inside):
    body = b"{" + inside + b"}"
    try:
        expected = json.loads(body)
    except ValueError:
        expected = None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_body, "PART_BYTES", 3)
        try:
            found = read_object(body, AnyName())
        except MalformedError:
            # Python holds what JSON has no words for, and half of a surrogate pair.
            assert expected is None or not sound(expected)
        else:
            assert same(found, expected)


class AnyName:
    def __contains__(self, name):
        return True


def sound(value):
    """Whether it has no NaN, no infinity, and no half of a surrogate pair."""
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except ValueError:
        return False
    return True


# -- sizes at which parts begin and end ----------------------------------------------------------


@pytest.mark.parametrize("of", [b"%d,", b'"%d",', b"[%d],", b'{"a":%d},', b'"\\"%d[",'])
@pytest.mark.parametrize("least", [1, 5, 6, 7, 8, 40])
def test_parts_meet_at_any_size(of, least, monkeypatch):
    monkeypatch.setattr(json_body, "PART_BYTES", least)
    items = b"".join(of % i for i in range(40))
    long = b'{"k":"' + b"v" * 90 + b'","l":[' + items[:-1] + b"]}"
    for inside in (items[:-1], items + long, long + b"," + items[:-1], items + long + b"," + long):
        body = b'{"x":[' + inside + b"]}"
        assert read_object(body, {"x"}) == json.loads(body)
        named = b",".join(b'"%d":%b' % (i, one) for i, one in enumerate([long, b"1", long, b"[]"]))
        body = b'{"x":{' + named + b"}}"
        assert read_object(body, {"x"}) == json.loads(body)


def test_fault_is_found_in_any_part(monkeypatch):
    monkeypatch.setattr(json_body, "PART_BYTES", 8)
    good = b'{"x":[' + b'"abc",' * 20 + b'{"a":1}]}'
    assert read_object(good, {"x"})["x"][-1] == {"a": 1}
    for i in range(len(good)):
        cut = good[:i] + good[i + 1 :]
        try:
            expected = json.loads(cut)
        except ValueError:
            with pytest.raises((MalformedError, NoObjectError)):
                read_object(cut, {"x"})
        else:
            assert read_object(cut, {"x"}).get("x", UNREAD) == expected.get("x", UNREAD)
