# SPDX-License-Identifier: Apache-2.0
"""Instances in processes of their own that stop, die and come back at every step of a pull.

In each case the survivor's load ends in time with exact bytes or without, its scheduler does not
wait, what was held for the other one comes back, and without a restart of the survivor a later load
gets everything.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.tiers.p2p.conftest import UCX
from tests.tiers.p2p.hooked import OWNER_STEPS, READER_STEPS
from tests.tiers.p2p.peers import (
    BACK_SECONDS,
    CHUNK,
    CHUNKS,
    LEASE_SECONDS,
    LOAD_SECONDS,
    SILENCE_SECONDS,
    Peer,
    check_calls,
    checked,
    comes,
    healed,
    lives,
    nothing_more,
    quiet,
    reach,
    running,
    side_by_side,
    state_of,
    until,
)
from tests.tiers.p2p.proxy import HERE, Proxy
from tests.tiers.p2p.rig import free_port

SOAK_SECONDS = float(os.environ.get("KVTIER_SOAK_SECONDS", "4"))
ALL = range(CHUNKS)
ISOLATIONS = ("thread", "process")
TRANSPORTS = ["tcp", UCX]
IN_HANDSHAKE = ("Hello", "Proof", "Challenge", "Welcome")


class Pair:
    """An owner and a reader."""

    def __init__(self, folder: Path, isolation: str, **options: Any) -> None:
        folder.mkdir()
        self.owner = Peer(folder, "owner", numbers=ALL, isolation=isolation, **options)
        self.reader = Peer(
            folder, "reader", peers=[self.owner.address], isolation=isolation, **options
        )

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Both run, and end in good order if nothing has failed."""
        with running(self.owner, self.reader):
            self.settle()
            yield
            for one in (self.reader, self.owner):
                assert one.close() == {"error": "", "left": []}

    def settle(self, *survivors: Peer) -> None:
        """All is well again: nothing is held, everything comes, no scheduler has waited."""
        quiet(self.owner, BACK_SECONDS)
        healed(self.reader, ALL)
        quiet(self.owner, BACK_SECONDS)
        quiet(self.reader, BACK_SECONDS)
        check_calls(*survivors)

    def case(self, step: str, action: str, chance: random.Random) -> None:
        """One of them stops or dies at `step`."""
        victim, survivor = self.owner, self.reader
        if step.startswith("reader"):
            victim, survivor = survivor, victim
        self.reader.do("forget")
        if step.endswith(IN_HANDSHAKE):
            self.reader.forget_sessions()
        victim.arm(step, action)
        pid, load = reach(victim, step, self.reader, numbers=list(ALL))
        began_at = time.monotonic()
        seconds = 0.0
        if action == "stop":
            # Short, longer than a silence, longer than a lease.
            time.sleep(chance.choice([0.1, 1.5 * SILENCE_SECONDS, 1.5 * LEASE_SECONDS]))
            if victim is self.reader:
                quiet_after(self.owner, began_at)
            else:
                self.reader.loaded(load)
            os.kill(pid, signal.SIGCONT)
            seconds = time.monotonic() - began_at
            if victim is self.reader:
                # The engine of a service that stops goes on; one that stops itself has longer.
                self.reader.loaded(load, LOAD_SECONDS + seconds)
        elif pid == victim.process.pid:
            victim.kill()
            if victim is self.owner:
                self.reader.loaded(load)
            else:
                quiet(self.owner, BACK_SECONDS)
            victim.start()
        else:
            self.reader.loaded(load)
        victim.do("rest")
        self.settle(survivor)
        print(f"{step} {action}: {time.monotonic() - began_at:.1f} s", flush=True)


def quiet_after(owner: Peer, began_at: float) -> None:
    """What a reader had that stopped then comes back, unless it was not stopped for so long."""
    if time.monotonic() > began_at + LEASE_SECONDS:
        quiet(owner, BACK_SECONDS)


@pytest.mark.slow
@pytest.mark.fault("H03", "K07", "K08", "L13", "L14", "P02", "P17", "P19")
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_every_step(tmp_path: Path, transport: str) -> None:
    """Stopped and killed at each step, on each side, with the service in a thread and in a process
    of its own: a pair of instances for each, side by side."""

    def work(case: tuple[str, str]) -> None:
        side, isolation = case
        chance = random.Random(f"{isolation} {side}")
        pair = Pair(tmp_path / f"{side}-{isolation}", isolation, transport=transport)
        survivor = pair.reader if side == "owner" else pair.owner
        with pair.running():
            before = checked(survivor)
            for step in OWNER_STEPS if side == "owner" else READER_STEPS:
                if transport == "ucx" and step == "owner-in-read":
                    continue  # an owner does nothing there
                for action in ("stop", "kill"):
                    pair.case(step, action, chance)
            nothing_more(before, survivor)

    sides = ("owner", "reader")
    side_by_side(work, [(side, isolation) for side in sides for isolation in ISOLATIONS])


@pytest.mark.slow
@pytest.mark.fault("K07", "K08", "P02", "P17")
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_random_moments(tmp_path: Path, transport: str) -> None:
    """Loads all the time, and now and then one of the two stops, dies, or loses its service."""
    seed = int(time.time())
    print(f"seed {seed}")
    side_by_side(
        lambda isolation: random_moments(tmp_path / isolation, isolation, transport, seed),
        ISOLATIONS,
    )


def random_moments(folder: Path, isolation: str, transport: str, seed: int) -> None:
    chance = random.Random(f"{seed} {isolation}")
    pair = Pair(folder, isolation, transport=transport)
    got = faults = 0
    with pair.running():
        end = time.monotonic() + SOAK_SECONDS
        while time.monotonic() < end:
            victim = chance.choice([pair.owner, pair.reader])
            action = chance.choice(["stop", "kill", "service"][: 2 + (isolation == "process")])
            self_stopped = 0.0
            pair.reader.do("forget")
            first = chance.randrange(CHUNKS)
            load = pair.reader.begin("load", numbers=list(range(first, CHUNKS)))
            time.sleep(chance.random() * chance.choice([0.001, 0.02]))
            faults += 1
            if action == "stop":
                stopped_at = time.monotonic()
                victim.signal(signal.SIGSTOP)
                time.sleep(chance.random() * 1.5)
                victim.signal(signal.SIGCONT)
                self_stopped = time.monotonic() - stopped_at
            elif action == "kill":
                victim.kill()
                if victim is pair.owner:
                    got += pair.reader.loaded(load)["ready"]
                else:
                    quiet(pair.owner, BACK_SECONDS)
                victim.start()
                load = -1
            else:
                for pid in victim.services():
                    os.kill(pid, signal.SIGKILL)
                time.sleep(chance.random())
            if load >= 0:
                got += pair.reader.loaded(load, LOAD_SECONDS + self_stopped)["ready"]
            for one in (pair.owner, pair.reader):
                one.do("rest")
            if chance.random() < 0.3:
                pair.settle(pair.owner, pair.reader)
        pair.settle(pair.owner, pair.reader)
    print(f"{faults} faults, {got} chunks came all the same")
    assert faults
    assert got or SOAK_SECONDS < 60


# Ends.
@pytest.mark.fault("H17", "P22")
def test_an_owner_that_leaves_says_so(tmp_path: Path) -> None:
    """What it had is a miss at once, and there again when it is back."""
    pair = Pair(tmp_path / "pair", "thread")
    owner, reader = pair.owner, pair.reader
    with running(owner, reader):
        pair.settle(owner, reader)
        before = checked(reader)
        assert owner.close() == {"error": "", "left": []}
        until(lambda: "it has ended the session" in reader.log, 5.0, "the owner's farewell")
        said = reader.load(ALL)
        assert said["ready"] == 0
        assert said["seconds"] < 1.0
        # It stays away for a while, and is asked for all the same.
        end = time.monotonic() + 2.0
        while time.monotonic() < end:
            assert reader.load(ALL)["ready"] == 0
            time.sleep(0.05)
        owner.start()
        healed(reader, ALL, 10.0)
        pair.settle(reader)
        nothing_more(before, reader)


@pytest.mark.fault("H17")
def test_the_process_ends_whatever_is_unsent(tmp_path: Path) -> None:
    """The owner takes nothing; the reader has questions for it, and ends: in good order, or by an
    exception that nobody catches."""
    side_by_side(lambda isolation: end_unsent(tmp_path / isolation, isolation), ISOLATIONS)


def end_unsent(folder: Path, isolation: str) -> None:
    pair = Pair(folder, isolation)
    owner, reader = pair.owner, pair.reader
    with running(owner, reader):
        for how in ("close", "fail"):
            pair.settle()
            reader.do("forget")
            owner.signal(signal.SIGSTOP)
            reader.begin("load", numbers=list(ALL))
            began_at = time.monotonic()
            if how == "close":
                assert reader.close() == {"error": "", "left": []}
            else:
                reader.begin("fail")
                assert reader.process.wait(10) == 1
                reader.end()
            assert time.monotonic() - began_at < 5.0
            owner.signal(signal.SIGCONT)
            quiet(owner, BACK_SECONDS)
            reader.start()
        pair.settle()


def test_a_service_whose_engine_was_killed_says_so(tmp_path: Path) -> None:
    """It ends in good order, in a process of its own."""
    pair = Pair(tmp_path / "pair", "process", heartbeat_seconds=60.0)
    owner, reader = pair.owner, pair.reader
    with running(owner, reader):
        pair.settle()
        (service,) = owner.services()
        owner.process.kill()
        until(lambda: not lives(service), 5.0, "the service's end")
        owner.end()
        assert reader.load(ALL)["ready"] == 0
        assert "it has ended the session" in reader.log
        owner.start()
        pair.settle()


def test_an_owner_that_makes_no_step_answers_as_ever(tmp_path: Path) -> None:
    """Its engine hangs in a step, its service is another process."""
    pair = Pair(tmp_path / "pair", "process")
    owner, reader = pair.owner, pair.reader
    with pair.running():
        pair.settle()
        os.kill(owner.process.pid, signal.SIGSTOP)
        assert reader.load(ALL)["ready"] == CHUNKS
        assert state_of(owner.process.pid) == "T"
        os.kill(owner.process.pid, signal.SIGCONT)
        owner.do("rest")
        pair.settle()


@pytest.mark.fault("H20", "H21")
@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_forks_while_loads_are_under_way(tmp_path: Path, isolation: str) -> None:
    """A child of Python's that ends, and commands that foreign code starts in a thread."""
    pair = Pair(tmp_path / "pair", isolation)
    owner, reader = pair.owner, pair.reader
    with pair.running():
        pair.settle()
        for one in (owner, reader):
            for how in ("fork", "system"):
                reader.do("forget")
                load = reader.begin("load", numbers=list(ALL))
                assert one.do(how)["code"] == 0
                assert reader.loaded(load)["ready"] == CHUNKS
        pair.settle()


# Waiting for a prefill.
@pytest.mark.fault("L20", "P06")
def test_a_prefill_elsewhere_is_awaited_through_faults(tmp_path: Path) -> None:
    """Half of a prompt has come, the rest is awaited; then something happens."""
    pair = Pair(tmp_path / "pair", "thread")
    owner, reader = pair.owner, pair.reader
    prompt = list(range(100, 100 + CHUNKS))

    def begin(name: str, wait_seconds: float = 10.0) -> int:
        number = reader.begin("load", numbers=prompt, peer=[owner.address, name, wait_seconds])
        owner.do("begin", request=name)
        owner.do("store", numbers=prompt[: CHUNKS // 2], request=name)
        until(lambda: owner.audit()["awaited"] == 1, 5.0, "the owner knows of it")
        return number

    def over(*survivors: Peer) -> None:
        reader.do("rest")
        owner.do("rest")
        pair.settle(*survivors)
        owner.do("forget")
        owner.do("store", numbers=list(ALL))

    with pair.running():
        # Nothing happens.
        load = begin("whole")
        owner.do("store", numbers=prompt[CHUNKS // 2 :], request="whole")
        owner.do("end", request="whole")
        assert reader.loaded(load)["ready"] == CHUNKS
        over(owner, reader)
        # It ends early: nobody waits for the rest.
        load = begin("short")
        owner.do("end", request="short")
        assert reader.loaded(load)["ready"] == CHUNKS // 2
        over(owner, reader)
        # The owner is stopped, for too long; the reader goes on without it.
        load = begin("stopped")
        owner.signal(signal.SIGSTOP)
        said = reader.loaded(load, SILENCE_SECONDS + 1.0)
        assert said["ready"] <= CHUNKS // 2
        owner.signal(signal.SIGCONT)
        owner.do("end", request="stopped")
        over(reader)
        # The reader is stopped, then killed: nothing waits for it any more.
        begin("left")
        reader.signal(signal.SIGSTOP)
        quiet(owner, BACK_SECONDS)
        reader.kill()
        reader.start()
        owner.do("end", request="left")
        over(owner)
        # The reader is killed, and its connection with it.
        begin("killed")
        reader.kill()
        quiet(owner, BACK_SECONDS)
        reader.start()
        owner.do("end", request="killed")
        over(owner)
        # The owner dies.
        load = begin("dead")
        owner.kill()
        said = reader.loaded(load, SILENCE_SECONDS + 1.0)
        assert said["ready"] <= CHUNKS // 2
        owner.start()
        over(reader)


# Leases that are too old.
@pytest.mark.fault("L13", "L14", "L20")
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_slot_that_was_reused_after_its_lease_is_not_read(tmp_path: Path, transport: str) -> None:
    """The reader stops between lease and read; its session stands all the while."""
    pair = Pair(
        *(tmp_path / "pair", "thread"),
        heartbeat_seconds=60.0,
        lease_seconds=3.0,
        # It does read, however late.
        load_timeout_seconds=30.0,
        config={"lookup_timeout_seconds": 30.0},
        transport=transport,
    )
    owner, reader = pair.owner, pair.reader
    owner.slots = CHUNKS + 1  # one is kept free
    owner.options["max_lease_bytes"] = CHUNKS * CHUNK
    with running(owner, reader):
        healed(reader, ALL)
        quiet(owner, BACK_SECONDS)
        reader.do("forget")
        reader.arm("reader-before-read", "stop")
        _, load = reach(reader, "reader-before-read", reader, numbers=list(ALL))
        assert owner.audit()["pins"] == CHUNKS
        # What is leased stays where it is.
        assert owner.do("store", numbers=list(range(200, 200 + CHUNKS)))["stored"] <= 1
        quiet(owner, 4.0)
        # What is not leased goes, and others take its place.
        assert owner.do("store", numbers=list(range(200, 200 + CHUNKS)))["stored"] >= CHUNKS - 1
        reader.signal(signal.SIGCONT)
        ready = reader.loaded(load, LOAD_SECONDS + 5.0)["ready"]
        said = reader.audit()
        assert said["reader"] == 1.0
        if transport == "tcp":
            # Not a byte was sent for the old lease, so that there was nothing to find out.
            assert (ready, said["corrupt_chunks_total"]) == (0, 0)
        else:
            # The owner is not asked. What was read is not what was leased, but for a slot that
            # nobody has taken yet.
            assert ready <= 1
            assert said["corrupt_chunks_total"] >= CHUNKS - 1
        assert reader.load(range(200, 200 + CHUNKS))["ready"] >= CHUNKS - 1
        assert reader.load(ALL)["ready"] == 0


@pytest.mark.fault("L20")
def test_what_goes_between_question_and_lease_is_a_miss(tmp_path: Path) -> None:
    pair = Pair(tmp_path / "pair", "thread", heartbeat_seconds=60.0, lease_seconds=3.0)
    owner, reader = pair.owner, pair.reader
    owner.slots = CHUNKS + 1  # one is kept free
    owner.options["max_lease_bytes"] = CHUNKS * CHUNK
    with running(owner, reader):
        healed(reader, ALL)
        quiet(owner, BACK_SECONDS)
        reader.do("forget")
        reader.arm("reader-before-Lend", "stop")
        _, load = reach(reader, "reader-before-Lend", reader, numbers=list(ALL))
        assert owner.do("store", numbers=list(range(200, 211)))["stored"] == 11
        reader.signal(signal.SIGCONT)
        said = reader.loaded(load, LOAD_SECONDS + 5.0)
        # The last of the prompt went first.
        assert 0 < said["ready"] <= CHUNKS - 10
        quiet(owner, BACK_SECONDS)


# The network between them.
def test_a_slow_peer_costs_no_more_than_the_time_of_a_load(tmp_path: Path) -> None:
    data_port = free_port()
    pair = Pair(tmp_path / "pair", "thread")
    pair.owner.options["data_port"] = data_port
    pair.reader.options["peers"] = [f"{HERE}:{pair.owner.port}"]
    with Proxy([pair.owner.port, data_port]) as proxy, pair.running():
        pair.settle()
        before = checked(pair.owner, pair.reader)
        proxy.slow(data_port, 0.02)
        assert pair.reader.load(ALL)["ready"] == CHUNKS  # slow, and in time
        proxy.slow(data_port, 0.5)
        said = pair.reader.load(ALL)
        assert said["ready"] < CHUNKS
        assert said["seconds"] < LOAD_SECONDS + 1.0
        quiet(pair.owner, BACK_SECONDS)
        proxy.let()
        proxy.slow(pair.owner.port, 0.15)
        pair.reader.load(ALL)
        proxy.let()
        pair.settle(pair.owner, pair.reader)
        nothing_more(before, pair.owner, pair.reader)


@pytest.mark.fault("H03", "L14", "P21")
def test_half_open(tmp_path: Path) -> None:
    """Nothing passes any more, and nobody is told; later it passes again."""
    steps = ("", "owner-after-Lent", "owner-in-read", "owner-before-Have")
    side_by_side(lambda step: half_open(tmp_path / f"at-{step}", step), steps)


def half_open(folder: Path, step: str) -> None:
    data_port = free_port()
    pair = Pair(folder, "thread")
    owner, reader = pair.owner, pair.reader
    owner.options["data_port"] = data_port
    reader.options["peers"] = [f"{HERE}:{owner.port}"]
    with Proxy([owner.port, data_port]) as proxy, pair.running():
        before = checked(owner, reader)
        for _ in range(2):
            reader.do("forget")
            if not step:
                proxy.hold()
                load = reader.begin("load", numbers=list(ALL))
            else:
                owner.arm(step, "stop")
                _, load = reach(owner, step, reader, numbers=list(ALL))
                proxy.hold()
                owner.signal(signal.SIGCONT)
            reader.loaded(load)
            quiet(owner, BACK_SECONDS)
            # Later ones do not wait for what is known to be gone; a question would take a second.
            assert reader.load(ALL)["seconds"] < 0.8
            proxy.let()
            owner.do("rest")
            pair.settle(reader)
        nothing_more(before, owner, reader)


@pytest.mark.fault("H03", "P11")
def test_a_network_that_lets_only_sessions_pass(tmp_path: Path) -> None:
    """As a firewall that knows one of the two ports: it costs a few deadlines, then little."""
    data_port = free_port()
    pair = Pair(tmp_path / "pair", "thread")
    owner, reader = pair.owner, pair.reader
    owner.options["data_port"] = data_port
    reader.options["peers"] = [f"{HERE}:{owner.port}"]
    with Proxy([owner.port, data_port]) as proxy, pair.running():
        proxy.hold(data_port)
        took = [reader.load(ALL)["seconds"] for _ in range(4)]
        print(took)
        assert took[-1] < 1.0
        quiet(owner, BACK_SECONDS)
        proxy.let()
        pair.settle(owner, reader)


# Many.
@pytest.mark.slow
@pytest.mark.fault("K08", "P02", "P19", "P22")
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("count", [2, 4])
def test_a_mesh(tmp_path: Path, count: int, transport: str) -> None:
    """Each has chunks of its own and asks all others; now and then one dies and comes back."""
    seed = int(time.time())
    print(f"seed {seed}")
    chance = random.Random(f"{seed} {count}")
    ports = [free_port() for _ in range(count)]
    peers = [
        Peer(
            tmp_path,
            f"p{i}",
            port=port,
            numbers=range(i * CHUNKS, (i + 1) * CHUNKS),
            peers=[f"127.0.0.1:{one}" for one in ports],
            isolation=chance.choice(["thread", "process"]),
            transport=transport,
        )
        for i, port in enumerate(ports)
    ]

    def part(of: Peer) -> list[int]:
        first = chance.randrange(CHUNKS)
        return of.numbers[first : first + 8]

    def all_heal() -> None:
        for one in peers:
            for other in peers:
                if one is not other:
                    comes(one, other.numbers)

    with running(*peers):
        all_heal()
        for _ in range(max(1, int(SOAK_SECONDS / 5))):
            victim = chance.choice(peers)
            others = [one for one in peers if one is not victim]
            # Chunks of all, from whoever has them: other prompts for everybody.
            loads = []
            for one in others:
                one.do("forget")
                one.do("store", numbers=one.numbers)
                numbers = [number for of in peers if of is not one for number in part(of)]
                loads.append((one, one.begin("load", numbers=numbers)))
            time.sleep(chance.random() * 0.02)
            victim.kill()
            for one, load in loads:
                one.loaded(load)
            victim.start()
            all_heal()
            check_calls(*others)
        for one in peers:
            quiet(one, BACK_SECONDS)
        for one in peers:
            assert one.close() == {"error": "", "left": []}
