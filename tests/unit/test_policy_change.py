"""Which policy decides, by the settings and by a call; and what it tells of its decisions."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.sidecars import sidecar
from tests.stores import BLOCK, Rig, chain
from tests.unit.test_joint_store import Engine, audit, gate, traffic
from tierkv import calls, explain
from tierkv.errors import TierKVError
from tierkv.gate import Gate


def deciding(rig: Rig, name: str = "") -> str:
    return rig.store.policy(1, calls.PolicyCall(name=name)).name


def told(rig: Rig, key: bytes = b"") -> explain.Explanation:
    return explain.from_wire(rig.store.explain(1, calls.ExplainCall(key=key)))


@pytest.mark.parametrize(
    ("setting", "one", "expected"),
    [
        ("auto", None, "lru"), ("auto", gate(), "evicpress"), ("lru", gate(), "lru"),
        ("evicpress", None, "evicpress"),
    ],
)  # fmt: skip
def test_the_joint_policy_decides_where_there_is_a_gate(
    setting: str, one: Gate | None, expected: str
) -> None:
    assert deciding(Rig(8, gate=one, policy=setting)) == expected


def test_the_policy_changes_while_clients_work() -> None:
    """Nothing is lost by a change: what is there is served, and gives way, as before."""
    rig = Rig(8 * 40, [], gate=gate(), policy="lru")
    engine = Engine(rig, ("raw", "int8"))
    names = ["evicpress", "lru", "evicpress", "auto"]
    for number, request in enumerate(traffic(1, 800.0)):
        engine.serve(request)
        if number % 40 == 39:
            keys = chain(request.session, request.blocks)
            before = rig.match(keys, fidelity=2)
            rig.store.release(1, calls.ReleaseCall(match=before.match))
            assert before.blocks == request.blocks
            deciding(rig, names[number // 40 % len(names)])
            after = rig.match(keys, fidelity=2)
            rig.store.release(1, calls.ReleaseCall(match=after.match))
            assert after.blocks == before.blocks
        rig.sound()
        audit(rig)
    assert deciding(rig) == "evicpress"
    rig.idle()


def test_what_a_policy_finds_is_known_once_its_chain_is_asked_for() -> None:
    rig = Rig(8, [], policy="lru")
    keys = chain(1, 4)
    assert rig.put(keys, b"text") == 4
    deciding(rig, "evicpress")
    assert told(rig, keys[0]).numbers["raw_bytes"] == 0
    reply = rig.match(keys, linear=1e-3)
    rig.store.release(1, calls.ReleaseCall(match=reply.match))
    assert told(rig, keys[0]).numbers["raw_bytes"] == BLOCK
    assert told(rig, keys[0]).numbers["behind_blocks"] == 3
    audit(rig)


def test_a_policy_that_is_none_changes_nothing() -> None:
    rig = Rig(8)
    with pytest.raises(TierKVError, match="use one of auto, lru, evicpress"):
        deciding(rig, "mru")
    assert deciding(rig) == "lru"


@pytest.mark.parametrize("policy", ["lru", "evicpress"])
def test_it_says_why_a_block_is_where_it_is(policy: str) -> None:
    rig = Rig(8, policy=policy)
    keys = chain(1, 4)
    rig.match(keys, linear=1e-3)
    assert rig.put(keys, b"text") == 4
    rig.inline.drain()
    said = told(rig, keys[0])
    assert [(one.tier, one.profile, one.state) for one in said.copies] == [
        ("nvme", "raw", "ready"), ("host", "raw", "ready"),
    ]  # fmt: skip
    assert said.key == keys[0].hex()
    assert said.policy == policy
    if policy == "evicpress":
        numbers = said.numbers
        assert numbers["recompute_s"] == pytest.approx(64e-3)
        assert numbers["raw_bytes"] == BLOCK
        assert numbers["behind_blocks"] == 3
        saved = numbers["recompute_s"] - numbers["load_s"]
        assert numbers["earns"] == pytest.approx(numbers["uses_per_s"] * saved, rel=1e-6)
        assert {"drop", "demote as lossless in nvme"} & {one.does for one in said.choices}
    assert told(rig, b"k" * 32).copies == ()
    with pytest.raises(TierKVError, match="64 hex digits"):
        told(rig, b"short")


@pytest.mark.parametrize("policy", ["lru", "evicpress"])
def test_it_says_why_the_last_drop_was_made(policy: str) -> None:
    rig = Rig(8, [], policy=policy)
    assert "nothing was given up" in told(rig).because
    rig.match(chain(1, 6), linear=1e-3)
    assert rig.put(chain(1, 6), b"one") == 6
    rig.match(chain(2, 4), linear=1e-3)
    assert rig.put(chain(2, 4), b"two") == 4
    said = told(rig)
    assert said.key in {key.hex() for key in chain(1, 6)[4:]}
    assert "of host went" in said.because
    if policy == "evicpress":
        drop = next(one for one in said.choices if one.does == "drop")
        assert drop.leaves == "no copy"
        per_byte = said.numbers["uses_per_s"] * (
            said.numbers["recompute_s"] - said.numbers["load_s"]
        )
        assert drop.loss_per_byte == pytest.approx(per_byte / BLOCK, rel=1e-6)


def test_the_commands(tmp_path: Path) -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        program = "from tierkv_service.cli import main; main()"
        command = [sys.executable, "-c", program, *arguments, "--socket", str(process.path)]
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)

    with sidecar(tmp_path) as process:
        assert run("policy").stdout == "lru\n"
        assert run("policy", "evicpress").stdout == "evicpress\n"
        wrong: Any = run("policy", "mru")
        assert wrong.returncode == 2
        assert "use one of auto, lru, evicpress" in wrong.stderr
        said = json.loads(run("explain", "--last-drop", "--json").stdout)
        assert said["policy"] == "evicpress"
        assert "no tier has a copy" in run("explain", "ab" * 32).stdout
        assert "64 hex digits" in run("explain", "ab").stderr
        assert "--last-drop" in run("explain").stderr
