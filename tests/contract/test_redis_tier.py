"""The Redis tier keeps the contract of every tier, over a Unix socket, TCP and TLS."""

import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import redis

from tests.contract.tier_contract import MIB, TierContract
from tests.frames import NAMESPACE, content, empty_item, key_of, make_frame
from tests.redis_server import RedisFactory, RedisServer, free_port
from tierkv import frame as frame_module
from tierkv.fidelity import Fidelity
from tierkv.tier import DONE, FrameId, SharedTier, Status, Tier
from tierkv.tiers import redis_hash
from tierkv.tiers.redis import RedisSettings, RedisTier
from tierkv.tiers.redis_hash import PIECE_BYTES, TAIL_BYTES
from tierkv.wrap import Sealed


class TestRedisUnix(TierContract):
    addressed = False
    tls_ca = ""

    @pytest.fixture(autouse=True)
    def url(self, redis_server: RedisServer) -> str:
        self.address = redis_server.unix_url
        return self.address

    def make_tier(self, tmp: Path) -> Tier:
        return self.open(str(tmp))

    def open(self, prefix: str) -> RedisTier:
        return RedisTier(
            RedisSettings(
                url=self.address, prefix=prefix, max_bytes=48 * MIB, ttl_s=600, timeout_s=30.0,
                tls_ca=self.tls_ca,
            )
        )  # fmt: skip

    def test_it_is_a_shared_tier(self, tier: Tier) -> None:
        assert isinstance(tier, SharedTier)

    @pytest.mark.parametrize(
        "nbytes",
        [
            PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, 2 * PIECE_BYTES + TAIL_BYTES,
            2 * PIECE_BYTES + TAIL_BYTES + 1, 8 * PIECE_BYTES, 34 * MIB + 5,
        ],
    )  # fmt: skip
    def test_frames_of_every_count_of_pieces(self, tier: Tier, nbytes: int) -> None:
        frame = make_frame(1, nbytes=nbytes)
        locator = self.put(tier, frame)
        for cuts in [], [65_536] * 700:
            item = empty_item(frame.id, locator, nbytes, cuts)
            assert tier.read([item]) == [DONE]
            assert content(item) == frame.data
        assert isinstance(tier, RedisTier)
        assert tier.drop([frame.id]) == [DONE]

    @pytest.mark.parametrize("nbytes", [PIECE_BYTES, 3 * PIECE_BYTES + 77])
    def test_a_frame_is_verified_while_it_arrives(
        self, tier: Tier, nbytes: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Afterwards its bytes would have to come from memory a second time."""
        sound, harmed = make_frame(1, nbytes=nbytes), make_frame(2, nbytes=nbytes)
        other = make_frame(2, nbytes=nbytes, version=1)
        harmed = harmed._replace(data=harmed.data[:-9] + other.data[-9:])
        items = [empty_item(one.id, self.put(tier, one), nbytes) for one in (sound, harmed)]
        monkeypatch.delattr(frame_module, "verify")
        assert isinstance(tier, RedisTier)
        outcomes = Sealed(tier).read(items)
        assert [outcome.status for outcome in outcomes] == [Status.DONE, Status.CORRUPT]
        assert content(items[0]) == sound.data

    def test_another_tier_finds_reads_and_drops(self, tier: Tier, tmp_path: Path) -> None:
        frame = make_frame(1)
        other = self.open(str(tmp_path))
        assert other.find([frame.id]) == [-1]
        self.put(tier, frame)
        nobody = FrameId(key_of(5), frame.id.part)
        assert other.find([nobody, frame.id, nobody]) == [-1, frame.nbytes, -1]
        item = empty_item(frame.id, 0, frame.nbytes)
        assert other.read([item]) == [DONE]
        assert content(item) == frame.data
        assert other.drop([nobody, frame.id, frame.id]) == [DONE] * 3
        assert other.find([frame.id]) == [-1]
        assert tier.read([item])[0].status is Status.MISSING
        other.close()

    def test_what_another_tier_clears_is_gone(self, tier: Tier, tmp_path: Path) -> None:
        assert isinstance(tier, RedisTier)
        old = make_frame(1, generation=3)
        self.put(tier, old)
        other = self.open(str(tmp_path))
        assert other.find([old.id]) == [old.nbytes]
        other.raise_generation(NAMESPACE, 4)
        assert tier.find([old.id]) == other.find([old.id]) == [-1]
        item = empty_item(old.id, 0, old.nbytes)
        assert tier.read([item])[0].status is Status.MISSING
        late = make_frame(1, generation=3)
        assert tier.write([late.item(0)]) == [DONE]
        assert tier.find([old.id]) == [-1]
        new = make_frame(1, generation=4)
        assert tier.write([new.item(0)]) == [DONE]
        assert tier.find([old.id]) == other.find([old.id]) == [new.nbytes]
        assert other.read([item]) == [DONE]
        assert content(item) == new.data
        other.close()

    def test_generations_of_a_frame_lie_apart(self, tier: Tier) -> None:
        assert isinstance(tier, RedisTier)
        frames = [make_frame(1, version=n, generation=n) for n in range(3)]
        ids = [frame.id._replace(generation=n) for n, frame in enumerate(frames)]
        items = [frame.item(0)._replace(id=id_) for frame, id_ in zip(frames, ids, strict=True)]
        assert tier.write(items[:2]) == [DONE] * 2
        assert tier.find(ids) == [frames[0].nbytes, frames[1].nbytes, -1]
        tier.raise_generation(NAMESPACE, 1)
        assert tier.find(ids) == [-1, frames[1].nbytes, -1]
        back = empty_item(ids[1], 0, frames[1].nbytes)
        assert tier.read([back]) == [DONE]
        assert content(back) == frames[1].data

    def test_of_generations_raised_at_once_the_highest_stays(self, tmp_path: Path) -> None:
        tiers = [self.open(str(tmp_path)) for _ in range(4)]
        generations = [range(n, 200, 4) for n in range(4)]

        def raise_all(number: int) -> None:
            for generation in generations[number]:
                tiers[number].raise_generation(NAMESPACE, generation)

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(raise_all, range(4)))
        for tier in tiers:
            assert tier.generations() == {NAMESPACE: 199}
            tier.close()

    def test_generations_hold_64_bits(self, tier: Tier) -> None:
        assert isinstance(tier, RedisTier)
        tier.raise_generation(NAMESPACE, 2**64 - 1)
        tier.raise_generation(NAMESPACE, 2**64 - 2)
        tier.raise_generation(bytes(16), 2**53 + 1)
        tier.raise_generation(bytes(16), 2**53)
        assert tier.generations() == {NAMESPACE: 2**64 - 1, bytes(16): 2**53 + 1}

    def test_an_existing_frame_is_not_written_again(self, tier: Tier) -> None:
        first, second = make_frame(1, version=1), make_frame(1, version=2)
        assert tier.write([first.item(0)]) == tier.write([second.item(0)]) == [DONE]
        item = empty_item(first.id, 0, first.nbytes)
        assert tier.read([item]) == [DONE]
        assert content(item) == first.data

    def test_the_better_copy_stays(self, tier: Tier) -> None:
        assert isinstance(tier, RedisTier)
        exact = make_frame(1, nbytes=3 * MIB)
        small = make_frame(1, nbytes=MIB // 2, fidelity=Fidelity.SAFE, codec_id=7)
        assert tier.write([small.item(0)]) == [DONE]
        assert tier.write([exact.item(0)]) == [DONE]
        assert tier.find([exact.id]) == [exact.nbytes]
        assert tier.write([small.item(0)])[0].status is Status.THROTTLED
        item = empty_item(exact.id, 0, exact.nbytes)
        assert tier.read([item]) == [DONE]
        assert content(item) == exact.data

    def test_a_frame_of_another_length_is_a_miss(self, tier: Tier) -> None:
        frame = make_frame(1, nbytes=3 * MIB)
        other = make_frame(2, nbytes=100_000)
        assert tier.write([frame.item(0), other.item(0)]) == [DONE, DONE]
        lengths = [frame.nbytes - 1, PIECE_BYTES, 100, frame.nbytes + 1, 20 * MIB]
        items = [empty_item(frame.id, 0, nbytes) for nbytes in lengths]
        items.append(empty_item(other.id, 0, other.nbytes))
        outcomes = tier.read(items)
        assert [outcome.status for outcome in outcomes[:-1]] == [Status.MISSING] * len(lengths)
        assert outcomes[-1] == DONE
        assert content(items[-1]) == other.data

    @pytest.mark.parametrize("piece", [0, 1, 2])
    @pytest.mark.parametrize("tail", [TAIL_BYTES, TAIL_BYTES + 1])
    def test_a_frame_that_lost_a_piece_is_not_read(
        self, tier: Tier, tmp_path: Path, piece: int, tail: int
    ) -> None:
        frames = [make_frame(n, nbytes=2 * PIECE_BYTES + tail) for n in (1, 2)]
        assert tier.write([frame.item(0) for frame in frames]) == [DONE, DONE]
        tls = {"ssl_ca_certs": self.tls_ca} if self.tls_ca else {}
        with redis.Redis.from_url(self.address, **tls) as client:
            key = redis_hash.key_of(f"{tmp_path}:1:".encode(), frames[0].id)
            assert client.hdel(key, f"p{piece}") == 1
        items = [empty_item(frame.id, 0, frame.nbytes) for frame in frames]
        outcomes = tier.read(items)
        assert outcomes[0].status in {Status.MISSING, Status.CORRUPT}
        assert outcomes[1] == DONE
        assert content(items[1]) == frames[1].data

    def test_what_is_no_frame_is_not_written(self, tier: Tier) -> None:
        assert isinstance(tier, RedisTier)
        frame = make_frame(1)
        junk = frame.item(0)
        junk.pieces[0][:4] = b"junk"
        short = make_frame(2).item(0)._replace(nbytes=1 << 20)
        outcomes = tier.write([junk, frame.item(0)._replace(nbytes=9000), short])
        assert [outcome.status for outcome in outcomes] == [Status.FAILED] * 3
        assert tier.find([frame.id, short.id]) == [-1, -1]


class TestRedisTcp(TestRedisUnix):
    @pytest.fixture(autouse=True)
    def url(self, redis_server: RedisServer) -> str:
        self.address = redis_server.url
        return self.address


@pytest.fixture(scope="module")
def tls_server(
    redis_factory: RedisFactory, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, str]]:
    """Start a server with TLS; gives its URL and the file with its certificate."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl, which makes the certificate, is not installed")
    files = tmp_path_factory.mktemp("tls")
    key, certificate = str(files / "key.pem"), str(files / "cert.pem")
    subprocess.run(
        [openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2",
         "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost",
         "-keyout", key, "-out", certificate],
        check=True, capture_output=True,
    )  # fmt: skip
    port = str(free_port())
    try:
        server = redis_factory(
            tls_port=port, tls_cert_file=certificate, tls_key_file=key, tls_auth_clients="no",
            requirepass="se@c:r/e%t",
        )  # fmt: skip
    except RuntimeError as error:
        if "tls" not in str(error).lower():
            raise
        pytest.skip("this redis-server was built without TLS")
    yield f"rediss://:se%40c%3Ar%2Fe%25t@localhost:{port}", certificate
    server.stop()


class TestRedisTls(TestRedisUnix):
    @pytest.fixture(autouse=True)
    def url(self, tls_server: tuple[str, str]) -> str:
        self.address, self.tls_ca = tls_server
        return self.address

    def test_an_unknown_certificate_is_refused(self) -> None:
        tier = RedisTier(RedisSettings(url=self.address, prefix="none"))
        assert "certificate" in tier.probe()
        assert tier.find([make_frame(1).id]) == [-1]
        with pytest.raises(OSError, match="ConnectionError"):
            tier.raise_generation(NAMESPACE, 1)
        tier.close()
