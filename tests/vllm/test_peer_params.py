# SPDX-License-Identifier: Apache-2.0
"""What ``kv_transfer_params`` say of peers, read as vLLM's own p2p tier reads it; nothing raises.

Over a manager without workers or engine; what the peers do with it is in ``test_peers``.
"""

from __future__ import annotations

import ast
import re
import socket
from pathlib import Path
from typing import Any

import pytest

from kvtier.config import VLLM_TIER_WITHOUT_MEANING, TierConfig
from kvtier.runtime import messages as m
from kvtier.tiers.p2p.options import P2pOptions
from kvtier.types import Peer
from kvtier.vllm.peers import MAX_WARNINGS, PeerParams
from tests.vllm.serve import free_ports
from tests.vllm.test_walks import KEYS, Rig

pytestmark = pytest.mark.vllm

P2P = TierConfig("p2p", "p2p", options={"prefill_wait_seconds": 7.5})
FS = TierConfig("fs", "fs", options={"root_dir": "/mnt/kv"})
THERE = {"kv_request_id": "r-1", "remote_host": "10.0.0.7", "remote_port": 5710}

READ: list[tuple[dict[str, Any] | None, Peer | None, str]] = [
    (None, None, ""),
    ({}, None, ""),
    ({"max_load_tokens": 3, "remote_prefiller": None}, None, ""),
    ({"remote_prefiller": THERE}, Peer("10.0.0.7:5710", "r-1", 7.5), ""),
    ({"remote_kv_source": THERE}, Peer("10.0.0.7:5710", "r-1", 0.0), ""),
    ({"remote_decoder": {"kv_request_id": "r-1"}}, None, "r-1"),
    ({"remote_decoder": THERE}, None, "r-1"),
    # A prefill instance that takes a part of its prompt from a third one.
    (
        {"remote_decoder": {"kv_request_id": "r-2"}, "remote_kv_source": THERE},
        Peer("10.0.0.7:5710", "r-1", 0.0),
        "r-2",
    ),
    (
        {"remote_prefiller": THERE | {"remote_host": "fd00::7", "remote_port": "80"}},
        Peer("[fd00::7]:80", "r-1", 7.5),
        "",
    ),
    (
        {"remote_prefiller": THERE | {"remote_host": "[fd00::7]"}},
        Peer("[fd00::7]:5710", "r-1", 7.5),
        "",
    ),
    (
        {"remote_prefiller": THERE | {"remote_host": "prefill-0.kv.svc"}},
        Peer("prefill-0.kv.svc:5710", "r-1", 7.5),
        "",
    ),
]

MALFORMED: list[tuple[dict[str, Any], str]] = [
    ({"remote_prefiller": "10.0.0.7:5710"}, "remote_prefiller is passed over.*it is a mapping"),
    ({"remote_prefiller": {}}, "remote_port is a number from 1 to 65535, got None"),
    ({"remote_prefiller": THERE | {"remote_port": True}}, "remote_port .*got True"),
    ({"remote_prefiller": THERE | {"remote_port": 0}}, "remote_port .*got 0"),
    ({"remote_prefiller": THERE | {"remote_port": "7" * 5000}}, "remote_port .*got 777777$"),
    ({"remote_prefiller": THERE | {"remote_host": None}}, "remote_host is a name .*got None"),
    ({"remote_prefiller": THERE | {"remote_host": ""}}, "remote_host, ''"),
    ({"remote_prefiller": THERE | {"remote_host": "a:1"}}, "remote_host is a name .*got 'a:1'"),
    ({"remote_prefiller": THERE | {"remote_host": "a b"}}, "remote_host, 'a b' is no address"),
    ({"remote_prefiller": THERE | {"remote_host": "0.0.0.0"}}, "remote_host, .*names none"),
    ({"remote_prefiller": THERE | {"kv_request_id": ""}}, "kv_request_id is a text .*got ''"),
    ({"remote_prefiller": THERE | {"kv_request_id": 7}}, "kv_request_id is a text .*got 7"),
    ({"remote_kv_source": THERE | {"kv_request_id": "x" * 513}}, "kv_request_id is a text"),
    ({"remote_decoder": {"kv_request_id": "\ud800"}}, "remote_decoder is passed.*kv_request_id"),
    ({"remote_decoder": ["r-1"]}, "remote_decoder is passed over.*it is a mapping"),
]


@pytest.mark.fault("P10", "P18")
@pytest.mark.parametrize(("params", "peer", "serves"), READ)
def test_each_role_is_read(
    params: dict[str, Any] | None,
    peer: Peer | None,
    serves: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert PeerParams([FS, P2P]).read(params) == (peer, serves)
    assert caplog.records == []


@pytest.mark.parametrize(("params", "words"), MALFORMED)
def test_what_makes_no_sense_is_one_warning(
    params: dict[str, Any], words: str, caplog: pytest.LogCaptureFixture
) -> None:
    read = PeerParams([P2P]).read
    for _ in range(3):
        assert read(params) == (None, "")
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert caplog.text.count("\n") == 1  # and one line
    caplog.clear()
    # The other role of the same request counts all the same.
    if "remote_decoder" not in params:
        assert read(params | {"remote_decoder": {"kv_request_id": "r"}}) == (None, "r")
    assert re.search(words, record.getMessage()), record.getMessage()


@pytest.mark.fault("P18")
def test_words_of_another_connector_are_told(caplog: pytest.LogCaptureFixture) -> None:
    """Otherwise they would be found out by the time that requests take."""
    theirs = {"do_remote_prefill": True, "remote_host": "10.0.0.7", "remote_port": 5600}
    params = theirs | {"remote_prefill": THERE, "max_load_tokens": 3, "kv_load_tiers": []}
    read = PeerParams([P2P]).read
    for _ in range(3):
        assert read(params) == (None, "")
    assert caplog.messages == [
        "kv_transfer_params.do_remote_prefill, remote_host, remote_port, remote_prefill is passed "
        "over, for this and every such request: the words for peers are remote_prefiller, "
        "remote_kv_source, remote_decoder"
    ]
    # Every request with other words: the log has an end.
    for number in range(200):
        assert read({f"remote_{number}": 1}) == (None, "")
    assert len(caplog.messages) == MAX_WARNINGS
    caplog.clear()
    assert PeerParams([FS]).read(params) == (None, "")  # another connector may stand beside
    assert caplog.messages == []


def test_of_two_sources_the_prefill_instance_counts(caplog: pytest.LogCaptureFixture) -> None:
    source = THERE | {"remote_host": "10.0.0.8"}
    params = {"remote_kv_source": source, "remote_prefiller": THERE}
    assert PeerParams([P2P]).read(params) == (Peer("10.0.0.7:5710", "r-1", 7.5), "")
    assert "stands beside remote_prefiller" in caplog.text


def test_without_a_peer_tier_they_mean_nothing(caplog: pytest.LogCaptureFixture) -> None:
    read = PeerParams([FS]).read
    for _ in range(3):
        assert read({"remote_prefiller": THERE}) == (None, "")
    assert caplog.messages == [
        "kv_transfer_params.remote_prefiller is passed over, for this and every such request: no "
        "tier of type p2p is configured"
    ]


def test_a_request_that_a_peer_waits_for_is_stored_whole_and_at_once(
    own_shm_directory: Path,
) -> None:
    """Also what is offered for the first time, and what vLLM has found in a cache."""
    # lazy: vLLM takes seconds, and only these tests need it.
    from vllm.v1.kv_offload.base import OffloadPolicy

    tier = {"type": "p2p", "port": free_ports(1)}
    made = Rig(str(own_shm_directory), 8, (None,), [tier], store_threshold=2)
    try:
        manager = made.manager
        plain = made.context(KEYS, "plain")
        assert manager.on_new_request(plain).policy is OffloadPolicy.CHUNK_LEVEL
        assert manager.prepare_store(KEYS[:2], plain).keys_to_store == []
        context = made.context(KEYS, remote_decoder={"kv_request_id": "r-1"})
        assert manager.on_new_request(context).policy is OffloadPolicy.REQUEST_LEVEL
        # The service hears of it with the step, and of its end at once.
        assert manager.engine._planner.state.out == [m.Serve("r-1", ended=False)]
        assert manager.prepare_store(KEYS[2:], context).keys_to_store == KEYS[2:]
        for transfer in range(2):
            made.region.publish(0, transfer)
        manager.complete_store(set(KEYS[2:]), context)
        for one in (context, plain):
            manager.on_request_finished(one)
    finally:
        made.close()


def test_a_replica_listens_as_many_ports_higher(own_shm_directory: Path) -> None:
    port = free_ports(2)
    made = Rig(str(own_shm_directory), 8, (None,), [{"type": "p2p", "port": port}], replica=1)
    try:
        for offset, taken in enumerate((False, True)):
            with socket.socket() as one:
                assert (one.connect_ex(("127.0.0.1", port + offset)) == 0) == taken
    finally:
        made.close()


def test_every_key_of_vllms_own_peer_tier_is_known() -> None:
    import vllm  # lazy: as above

    path = Path(vllm.__file__).parent / "v1/kv_offload/tiering/p2p/manager.py"
    (made,) = (
        item
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef) and node.name == "P2PSecondaryTierManager"
        for item in node.body
        if isinstance(item, ast.FunctionDef) and item.name == "__init__"
    )
    keys = {argument.arg for argument in made.args.args}
    assert {"host", "port", "backends"} < keys
    own = {"self", "offloading_spec", "primary_kv_view", "tier_type"}
    known = {*P2pOptions.__struct_fields__, *VLLM_TIER_WITHOUT_MEANING["p2p"]}
    assert keys - own <= known
