"""Hostfiles, --include and --exclude: what is right is taken in order, what is wrong says where and what to do."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.errors import ConfigError
from zero.launch.job import Node, choose_nodes, first_nodes, first_slots, parse_hostfile, read_hostfile

HOSTS = st.dictionaries(st.from_regex(r"[a-z][a-z0-9.-]{0,8}", fullmatch=True), st.integers(1, 4), min_size=1)
POOL = {"worker-1": 4, "worker-2": 4, "worker-3": 2}


@given(HOSTS, st.lists(st.sampled_from(["", "   ", "# a comment", "  # worker-9 slots=1"]), max_size=3), st.data())
def test_hosts_come_in_the_order_of_the_file(pool: dict[str, int], noise: list[str], data: st.DataObject) -> None:
    lines = [f"{host}  slots={count}{data.draw(st.sampled_from(['', ' # x', '  ']))}" for host, count in pool.items()]
    for line in noise:
        lines.insert(data.draw(st.integers(0, len(lines))), line)
    read = parse_hostfile("\n".join(lines), "hosts")
    assert list(read.items()) == list(pool.items())


@given(st.text(max_size=60))
def test_any_text_is_read_or_refused_by_name(text: str) -> None:
    try:
        assert all(count >= 1 for count in parse_hostfile(text, "hosts").values())
    except ConfigError as error:
        assert str(error).startswith("hosts")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("worker-1 slots=4\nworker-2 slots=0\n", ["line 2", "worker-2", "at least 1", "'0'"]),
        ("worker-1 slots=-1", ["line 1", "at least 1", "'-1'"]),
        ("worker-1 slots=four", ["line 1", "whole number", "'four'"]),
        ("worker-1 slots=", ["line 1", "worker-1 slots=4", "'worker-1 slots='"]),
        ("\n# c\nworker-1\n", ["line 3", "HOST slots=N", "'worker-1'", "correct the line"]),
        ("worker-1 slots=4 max-slots=many", ["line 1", "HOST slots=N"]),
        ("worker-1 slots=4 worker-2", ["line 1", "HOST slots=N"]),
        ("a slots=1\nb slots=1\na slots=2", ["line 3", "a again", "line 1", "merge"]),
        ("a slots=1\n-oProxyCommand=x slots=1", ["line 2", "begin with a dash", "'-oProxyCommand=x'"]),
        ("-oProxyCommand=x@a slots=1", ["line 1", "begin with a dash"]),
        ("me@-oProxyCommand=x slots=1", ["line 1", "begin with a dash"]),
        ("a\0b slots=1", ["line 1", "host name", "'a\\x00b'"]),
        ("", ["at least one line", "none"]),
        ("# only\n\n", ["at least one line"]),
    ],
)
def test_a_bad_hostfile_says_where_and_what_to_do(text: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as refusal:
        parse_hostfile(text, "/etc/hosts.job")
    assert all(word in str(refusal.value) for word in ["/etc/hosts.job", *words])


def test_a_hostfile_that_is_missing_or_no_text_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--hostfile .*/none: cannot be read.*leave --hostfile out"):
        read_hostfile(tmp_path / "none")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"cannot be read.*'utf-8'.*expected text in UTF-8"):
        read_hostfile(tmp_path / "bytes")


@st.composite
def filters(draw: st.DrawFn) -> str:
    hosts = draw(st.lists(st.sampled_from(sorted(POOL)), unique=True, min_size=1))
    words = []
    for host in hosts:
        slots = draw(st.lists(st.integers(0, POOL[host] - 1), unique=True))
        words.append(f"{host}:{','.join(map(str, slots))}" if slots else host)
    return "@".join(words)


def taken(nodes: list[Node]) -> set[tuple[str, int]]:
    return {(node.host, slot) for node in nodes for slot in node.slots}


@given(filters())
def test_include_and_exclude_of_the_same_words_share_everything_out(words: str) -> None:
    included = choose_nodes(POOL, include=words)
    try:
        rest = choose_nodes(POOL, exclude=words)
    except ConfigError as error:
        assert "at least one slot to remain" in str(error)
        rest = []
    assert taken(included) | taken(rest) == taken(choose_nodes(POOL)) and not taken(included) & taken(rest)
    assert [node.host for node in included] == [host for host in POOL if host in {node.host for node in included}]
    assert all(node.slots == tuple(sorted(node.slots)) for node in included)


def test_the_words_of_the_deepspeed_manual() -> None:
    assert choose_nodes(POOL, include="worker-2:0@worker-3:0,1") == [Node("worker-2", (0,)), Node("worker-3", (0, 1))]
    assert choose_nodes(POOL, exclude="worker-2@worker-3:0") == [Node("worker-1", (0, 1, 2, 3)), Node("worker-3", (1,))]


@pytest.mark.parametrize("flag", ["include", "exclude"])
@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("worker-9", ["'worker-9'", "worker-1, worker-2, worker-3"]),
        ("worker-1:4", ["0 to 3", "got 4"]),
        ("worker-1:0,0", ["each slot once", "got 0 again"]),
        ("worker-1:a", ["slot numbers", "'a'"]),
        ("worker-1:", ["slot numbers", "''"]),
        ("worker-1:-1", ["slot numbers", "'-1'"]),
        ("worker-1:0@worker-1:1", ["each host once", "worker-1 again"]),
        ("worker-1@@worker-2", ["empty word"]),
    ],
)
def test_a_bad_filter_names_the_word(flag: str, words: str, told: list[str]) -> None:
    with pytest.raises(ConfigError) as refusal:
        choose_nodes(POOL, **{flag: words})
    assert all(word in str(refusal.value) for word in [f"--{flag} {words}", *told])


def test_both_filters_or_nothing_left_are_refused() -> None:
    with pytest.raises(ConfigError, match="expected one of them, got both"):
        choose_nodes(POOL, "worker-1", "worker-2")
    with pytest.raises(ConfigError, match="at least one slot to remain, got none"):
        choose_nodes(POOL, exclude="@".join(POOL))


def test_fewer_nodes_and_slots_are_the_first_ones() -> None:
    nodes = choose_nodes(POOL)
    assert first_nodes(nodes, 2) == nodes[:2]
    assert [node.slots for node in first_slots(nodes, 2)] == [(0, 1)] * 3
    for count in (0, 4, -1):
        with pytest.raises(ConfigError, match="--num_nodes: expected 1 to 3"):
            first_nodes(nodes, count)
    with pytest.raises(ConfigError, match=r"--num_gpus: expected at most 2 \(the slots of worker-3\), got 3"):
        first_slots(nodes, 3)
    with pytest.raises(ConfigError, match="--num_gpus: expected at least 1, got 0"):
        first_slots(nodes, 0)
