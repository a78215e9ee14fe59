"""Offers: which of the profiles that a client can encode a put may use. The gate's one reader.

An exact profile is always allowed. A lossy one is, if the gate has measured it for the model's
family, artifact and context, and gives it at least the class that the put's readers ask for: so
blocks for exact readers are never coded with loss. Without a gate nothing lossy is written, and
lossy frames that are found in a lower tier are left alone.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from tierkv import frame
from tierkv.allowance import Allowance, Allowed
from tierkv.calls import PutCall
from tierkv.codec import BY_CODEC_ID, BY_LEVELS, LOSSLESS, PROFILES, Profile
from tierkv.errors import invalid
from tierkv.fidelity import FIDELITIES, Fidelity
from tierkv.frame import NO_ARTIFACT
from tierkv.gate import Gate, Verdict
from tierkv.identity import Identity
from tierkv.key import KEY_BYTES

MAX_FAMILIES = 4096
MAX_MODELS = 256
MAX_REASONS = 64
"""Reasons kept apart; later ones are counted together."""
OTHERS = "other reasons"


class Offer(NamedTuple):
    """A profile that a put may use, with what its blocks will promise: `fidelity`.

    That is what the gate measured, but never more than the prefix the blocks were computed on.
    `kl` is the loss in nats per token that the gate was told, 0 for an exact profile.
    """

    profile: Profile
    artifact: bytes
    fidelity: Fidelity
    kl: float


def prefix_class(call: PutCall) -> Fidelity:
    """Return what a put's blocks promise before any codec: exact, unless they are derived."""
    return FIDELITIES[call.fidelity] if call.derived else Fidelity.EXACT


def exact_offers(call: PutCall) -> dict[int, Offer]:
    """Return by number the profiles that a block may always take, when no other takes it."""
    return {
        profile.number: Offer(profile, NO_ARTIFACT, prefix_class(call), 0.0)
        for profile in PROFILES.values()
        if not profile.lossy
    }


def fallback_of(offers: Iterable[Offer], profile: Profile) -> Profile:
    """Return what a block takes that `profile` cannot.

    The smallest other one that is allowed and fits any model, since it is the calibration that most
    often does not fit; else lossless.
    """
    others = [one.profile for one in offers if one.artifact == NO_ARTIFACT and one.profile.lossy]
    return max((one for one in others if one != profile), key=_ratio, default=LOSSLESS)


def _ratio(profile: Profile) -> float:
    return profile.ratio


class Offers:
    """Decides by a gate; None: no gate file, so lossless only."""

    def __init__(self, gate: Gate | None) -> None:
        self.gate = gate
        self.refusals: Counter[str] = Counter()
        """Puts that could not use a lossy profile, by profile and reason."""
        passing = gate.passing() if gate else frozenset()
        known = {PROFILES[name].codec_id for name in passing if name in PROFILES}
        self.readable: Mapping[int, Profile] = {
            codec_id: profile
            for codec_id, profile in BY_CODEC_ID.items()
            if not profile.lossy or codec_id in known
        }
        """By codec id: the profiles whose frames readers may be given."""
        self._families: dict[bytes, bytes] = {}
        """Of fingerprints that something was put under."""
        self._models: dict[bytes, Identity] = {}
        """By family: what was introduced."""
        self._usual: set[bytes] = set()

    def allowance(self, call: PutCall) -> Allowance:
        """Return what the blocks of a put may become later, by the rule that it goes by itself."""
        artifacts = {artifact for artifact in call.artifacts if artifact.strip(b"\0")}
        artifact = artifacts.pop() if len(artifacts) == 1 else NO_ARTIFACT
        if call.family:
            if len(self._families) >= MAX_FAMILIES:
                self._families.clear()
            self._families[call.fingerprint] = call.family
        return self._allowance(call.family, artifact, call.fidelity, _context(call))

    def allowance_of(self, header: frame.Header, context: int) -> Allowance:
        """As `allowance`, of a frame that was found; nothing until its model has put something.

        `context`: tokens of the sequence for which it was wanted.
        """
        family = self._families.get(header.fingerprint, b"")
        return self._allowance(family, header.artifact, header.fidelity, context)

    def introduce(self, identity: Identity) -> None:
        """Note a model; of too many the first is forgotten."""
        self._models[identity.family] = identity
        if len(self._models) > MAX_MODELS:
            del self._models[next(iter(self._models))]

    def knows(self, family: bytes) -> bool:
        """Return whether a model was introduced."""
        return family in self._models

    def identity_of(self, header: frame.Header) -> Identity | None:
        """Return the model of a frame, but for the epoch of its weights; None: not introduced."""
        return self._models.get(self._families.get(header.fingerprint, b""))

    def note_levels(self, artifact: bytes) -> None:
        """Note that an artifact's profiles have the usual levels: a whole block of one had them.

        Then a prefix of n segments is the profile of n levels, if the gate knows that profile with
        this artifact: ratios fall from level to level, so no other one can be the n-th.
        """
        if len(self._usual) < MAX_FAMILIES:
            self._usual.add(artifact)

    def profile_of(self, header: frame.Header) -> Profile:
        """Return the profile of a readable frame; the first of its format where that is all."""
        levels = sum(map(bool, header.segments)) if header.artifact in self._usual else 0
        return BY_LEVELS.get((header.codec_id, levels), self.readable[header.codec_id])

    def _allowance(self, family: bytes, artifact: bytes, asked: int, context: int) -> Allowance:
        if self.gate is None or not family or asked == Fidelity.EXACT:
            return {}
        found: dict[int, Allowed] = {}
        for profile in PROFILES.values():
            mine = artifact if profile.levels else NO_ARTIFACT
            if profile.lossy and profile.codec_id in self.readable:
                fidelity, kl, _ = self.gate.look(family, profile.name, mine, context)
                if fidelity is not None and fidelity >= asked:
                    found[profile.number] = Allowed(int(fidelity), kl, mine)
        return found

    def allowed(self, call: PutCall) -> list[Offer]:
        """Return what a put may use, in the client's order of preference.

        Raises: TierKVError (invalid): none of the profiles is known, or an artifact is no digest.
        """
        artifacts = (*call.artifacts, *(b"" for _ in call.profiles[len(call.artifacts) :]))
        known = [
            (PROFILES[name], artifact or NO_ARTIFACT)
            for name, artifact in zip(call.profiles, artifacts, strict=False)
            if name in PROFILES
        ]
        sizes = {len(artifact or NO_ARTIFACT) for artifact in artifacts}
        if not known or sizes != {len(NO_ARTIFACT)}:
            raise invalid(
                f"none of the profiles {call.profiles} is known, or an artifact has not"
                f" {len(NO_ARTIFACT)} bytes; offer some of {list(PROFILES)}"
            )
        found = [self._offer(call, profile, artifact) for profile, artifact in known]
        return [offer for offer in found if offer is not None]

    def _offer(self, call: PutCall, profile: Profile, artifact: bytes) -> Offer | None:
        asked, prefix = FIDELITIES[call.fidelity], prefix_class(call)
        if not profile.lossy:
            return Offer(profile, artifact, prefix, 0.0)
        fidelity, kl, why = self._verdict(call, profile, artifact)
        if fidelity is not None and fidelity >= asked:
            return Offer(profile, artifact, min(fidelity, prefix), kl)
        if fidelity is not None:
            name, least = (one.label.replace("_", " ") for one in (fidelity, asked))
            why = f"it is {name}, its readers ask for {least}: {why}"
        reason = f"{profile.name}: {why}"
        if reason not in self.refusals and len(self.refusals) >= MAX_REASONS:
            reason = OTHERS
        self.refusals[reason] += 1
        return None

    def _verdict(self, call: PutCall, profile: Profile, artifact: bytes) -> Verdict:
        if self.gate is None:
            return Verdict(None, math.inf, "no gate file: [store] gate names none")
        if call.fidelity == Fidelity.EXACT:
            return Verdict(None, math.inf, "its readers ask for exact copies")
        return self.gate.look(call.family, profile.name, artifact, _context(call))


def _context(call: PutCall) -> int:
    """Return the tokens of a put's sequence, as far as it goes."""
    return call.position + len(call.keys) // KEY_BYTES * call.tokens_per_block
