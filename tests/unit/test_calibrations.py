"""`[store] artifacts`: what is refused before a sidecar starts, and what it then says of itself."""

import os
from pathlib import Path

import msgspec
import pytest

from tests.kvtc_rigs import artifact, packed
from tests.move_rigs import EVERY, RATIOS
from tests.unit.test_gate import domain
from tierkv.errors import ErrorKind, TierKVError
from tierkv.gate import Gate
from tierkv.settings import Settings, StoreSettings
from tierkv.tiers.nvme import NvmeSettings
from tierkv_codecs.kvtc_artifact import read
from tierkv_service import sidecar
from tierkv_service.calibrations import calibrations_of


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "a.kvtc"
    path.write_bytes(packed(artifact(RATIOS)))
    return path


def named(*paths: Path, nvme: bool = True) -> Settings:
    store = StoreSettings(artifacts=tuple(map(str, paths)))
    there = NvmeSettings(path=str(paths[0].parent / "nvme"), size_bytes=1 << 30)
    return Settings(store=store, nvme=there if nvme else None)


def refused(settings: Settings, gate: Gate | None = EVERY) -> str:
    with pytest.raises(TierKVError) as caught:
        calibrations_of(settings, gate)
    assert caught.value.kind in (ErrorKind.INVALID, ErrorKind.UNAVAILABLE)
    return str(caught.value)


def test_what_it_reads_is_what_the_codec_reads(file: Path) -> None:
    (one,) = calibrations_of(named(file), EVERY)
    whole = read(file)
    assert one == (file, whole.digest, whole.header.model)
    assert calibrations_of(Settings(), None) == ()


def test_nothing_to_go_to_no_gate_and_twice(file: Path) -> None:
    assert "add [nvme] or [redis]" in refused(named(file, nvme=False))
    assert "without a gate: measure it with `tierkv eval --artifact`" in refused(named(file), None)
    again = file.with_name("b.kvtc")
    os.link(file, again)
    assert f"{again} is {file} again" in refused(named(file, again))


def test_a_digest_that_the_gate_has_not_measured_or_rejects(file: Path) -> None:
    file.write_bytes(packed(artifact(RATIOS), weights="later ones"))
    assert "is not what the gate has measured" in refused(named(file))
    file.write_bytes(packed(artifact(RATIOS)))
    bad = tuple(msgspec.structs.replace(one, domains=(domain(kl_hi=1.0),)) for one in EVERY.entries)
    assert "rejects all of its profiles" in refused(named(file), Gate(entries=bad))


def test_files_that_are_none(file: Path) -> None:
    assert "No such file" in refused(named(file.with_name("gone")))
    assert "Is a directory" in refused(named(file.parent))
    data = file.read_bytes()
    head = data[: 8 + int.from_bytes(data[:8], "little")]
    for broken in (b"", b"\xff" * 64, data[:100], data.replace(b"tierkv.kvtc", b"tierkv.other", 1)):
        file.write_bytes(broken)
        assert "no calibration artifact: make one with `tierkv calibrate`" in refused(named(file))
    file.write_bytes(head.replace(rb"\"format\":3", rb"\"format\":2"))
    assert "artifact format 2, this release reads 3" in refused(named(file))


def test_other_ratios_are_refused_since_nobody_could_name_their_prefixes(file: Path) -> None:
    file.write_bytes(packed(artifact(RATIOS), ratios=(16.0, 8.0, 4.0)))
    assert "its ratios are 4, 8, 16; the sidecar encodes with the usual ones" in refused(
        named(file)
    )


def test_without_codecs_nothing_starts(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = file.with_name("gate.json")
    gate.write_bytes(msgspec.json.encode(EVERY))
    settings = named(file)
    store = msgspec.structs.replace(settings.store, gate=str(gate))
    monkeypatch.setattr("tierkv_service.codec_process.possible", lambda: False)
    with pytest.raises(TierKVError, match=r"install tierkv-sidecar\[codecs\]"):
        sidecar.run(msgspec.structs.replace(settings, store=store))
