"""A record of a real store's policy, replayed: the same answers, and what is wrong is noticed."""

import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.memory_tier import MemoryTier
from tests.nvme_tiers import opening
from tests.sidecars import connect, load, store, until
from tests.stores import Rig, chain
from tests.unit.test_joint_store import PROFILES_OF_ENGINE, RAW, Engine, gate, traffic
from tierkv import calls
from tierkv.errors import TierKVError
from tierkv.record import MAGIC, Recorder, is_record, read_record
from tierkv.simulation.rerun import rerun
from tierkv.tier import DurableTier


def record(path: Path, lower: list[DurableTier], seconds: float = 900.0, **fields: Any) -> None:
    """Serve chats under pressure, with a clear and a change of policy in between."""
    rig = Rig(8 * 40, lower, gate=gate(), recorder=Recorder(path), **fields)
    engine = Engine(rig, PROFILES_OF_ENGINE)
    for number, request in enumerate(traffic(3, seconds)):
        engine.serve(request)
        rig.sound()
        if number == 60:
            rig.clear("two")
            rig.clear()
        if number == 100:
            rig.store.policy(1, calls.PolicyCall(name="lru"))
        if number == 120:
            rig.store.policy(1, calls.PolicyCall(name="evicpress"))
        if number % 30 == 0:
            rig.flush(chain(request.session, request.blocks))
            rig.store.explain(1, calls.ExplainCall(key=chain(request.session, 1)[0]))
    rig.store.close(1.0)


@pytest.mark.parametrize("policy", ["lru", "evicpress"])
def test_a_live_store_decides_as_its_replay(tmp_path: Path, policy: str) -> None:
    path = tmp_path / "record"
    record(path, [MemoryTier(capacity=60 * RAW)], policy=policy)
    found = rerun(path)
    assert found.different == 0, found.first
    assert found.answers["reclaim"] > 50
    assert found.answers["offered"] > 50
    assert found.answers["admits"] > 50
    assert found.policy == "evicpress"


def test_what_was_found_at_start_and_regions_that_are_reclaimed_too(tmp_path: Path) -> None:
    """A real disk whose log goes round, and a second start over what the first one left."""
    with opening(tmp_path) as open_tier:
        for name in "first", "second":
            path = tmp_path / f"record.{name}"
            record(path, [open_tier(regions=12)], policy="evicpress")
            found = rerun(path)
            assert found.different == 0, found.first
    assert found.answers["keeps"] > 0
    names = {event.name for event in read_record(path)}
    assert {"adopt", "found", "keeps", "resize", "unhold"} <= names


def test_another_decision_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "record"
    record(path, [], 300.0, policy="evicpress")
    monkeypatch.setattr("tierkv.policies.worth.MEMORY", 0.5)
    found = rerun(path)
    assert found.different > 0
    assert "became" in found.first


def test_a_record_that_is_cut_short_is_replayed_as_far_as_it_goes(tmp_path: Path) -> None:
    path = tmp_path / "record"
    record(path, [], 300.0, policy="evicpress")
    whole = rerun(path)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    half = rerun(path)
    assert half.different == 0
    assert 0 < half.answers.total() < whole.answers.total()


def test_what_is_no_record_is_said(tmp_path: Path) -> None:
    path = tmp_path / "record"
    with pytest.raises(TierKVError, match="cannot record to"):
        Recorder(tmp_path / "none" / "record")
    assert not is_record(path)
    path.write_bytes(b"{}")
    assert not is_record(path)
    with pytest.raises(TierKVError, match="is not a record"):
        rerun(path)
    body = msgspec.msgpack.encode(["dance", [], None])
    path.write_bytes(MAGIC + struct.pack("<I", len(body)) + body)
    assert is_record(path)
    with pytest.raises(TierKVError, match="another release"):
        rerun(path)
    path.write_bytes(MAGIC + struct.pack("<I", 3) + b"abc")
    with pytest.raises(TierKVError, match="cannot be read"):
        rerun(path)


def test_a_sidecar_records_and_the_command_replays(tmp_path: Path) -> None:
    path, program = tmp_path / "record", "from tierkv_service.cli import main; main()"
    settings = tmp_path / "tierkv.toml"
    settings.write_text(
        f'[socket]\npath = "{tmp_path}/tierkv.sock"\n[host]\nsize = "32MiB"\n'
        '[http]\nenabled = false\n[store]\npolicy = "evicpress"\n'
    )
    command = [sys.executable, "-c", program]
    serve = [*command, "serve", "--config", str(settings), "--record", str(path)]
    with subprocess.Popen(serve, stderr=subprocess.DEVNULL) as process:
        try:
            assert until((tmp_path / "tierkv.sock").exists, 60)
            client = connect(tmp_path / "tierkv.sock")
            assert store(client, 1) == 1
            assert load(client, 1) is not None
            client.close()
        finally:
            process.terminate()
            process.wait(60)
    done = subprocess.run(
        [*command, "replay", str(path)], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "all the same" in done.stdout
