"""The demo's lossy profile: calibrated and measured on the demo's model once, then kept beside it.

It goes the way that a user goes: `tierkv calibrate`, `tierkv eval`, a gate file. Only the amounts
are smaller, so that it takes minutes.
"""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from transformers import AutoConfig

from tierkv import gate
from tierkv.codec import KVTC, profile_of
from tierkv.errors import TierKVError, invalid
from tierkv.fidelity import Fidelity
from tierkv.frame import NO_ARTIFACT
from tierkv.gate import Gate, Verdict
from tierkv.identity import Identity
from tierkv.part import Part
from tierkv_codecs import kvtc_artifact
from tierkv_codecs.lab.evaluate import Step, Suite
from tierkv_codecs.lab.report import GATE
from tierkv_connectors.identities import layer_specs, name_model
from tierkv_connectors.transformers_identity import TOKENS_PER_BLOCK
from tierkv_service import calibrate, evaluate
from tierkv_service.calibrate import in_lines

CALIBRATION_TOKENS = 16384
CONTEXT = 1536
"""Of the evaluation; the gate then reaches to twice as many tokens, the demo's prompt."""
SUITE = Suite("demo", 4, CONTEXT, 64)
KV_DTYPE = "fp32"
ARTIFACT = "artifact.kvtc"


class Lossy(NamedTuple):
    """A profile that the gate allows, and what it promises.

    `limit` is the most KL in nats per token that its class may cost on average, `kl` what was
    measured.
    """

    profile: str
    artifact: str
    gate: str
    fidelity: Fidelity
    limit: float
    kl: float


def prepare(model: Path, name: str, write: Callable[[str], None]) -> Lossy:
    """Return a profile that may be used, calibrated and measured at the first call.

    Args:
        model: its directory; a folder beside it keeps the artifact and the gate.
        name: of the profile.
        write: takes lines of progress.

    Raises: TierKVError (invalid): the profile is not known, loses nothing, or was rejected.
    """
    profile = profile_of(name)
    if not profile.lossy:
        raise invalid(f"{name} loses nothing, as the demo without --profile: name a lossy one")
    identity = identity_of(model)
    folder = model.with_name(f"{model.name}-demo")
    folder.mkdir(exist_ok=True)
    artifact = _artifact(model, folder, identity, write) if profile in KVTC else NO_ARTIFACT
    path = folder / ARTIFACT if profile in KVTC else None
    found, verdict = _look(folder, identity, name, artifact)
    if verdict.kl == float("inf"):  # of this model and artifact nothing is known yet
        write(f"measuring what {name} costs, once (a few minutes; `tierkv eval` does it)")
        on_step = in_lines(write)
        order = evaluate.Order(
            model, folder, SUITE.name, name, artifact=path, kv_dtype=KV_DTYPE, context=CONTEXT
        )

        def tell(step: Step) -> None:
            on_step("measured", step.share)

        evaluate.measure(order, SUITE, tell)
        found, verdict = _look(folder, identity, name, artifact)
    if verdict.fidelity is None:
        raise invalid(f"the gate rejects {name} for this model ({verdict.why}): try int8")
    limit = dict(found.thresholds.classes())[verdict.fidelity].kl_mean
    return Lossy(name, str(path or ""), str(folder / GATE), verdict.fidelity, limit, verdict.kl)


def identity_of(model: Path) -> Identity:
    """Return the identity of the demo's engines, without loading the model."""
    config = AutoConfig.from_pretrained(model, local_files_only=True)
    name, weights = name_model(config, path=str(model))
    return Identity(
        model=name,
        weights=weights,
        kv_dtype=KV_DTYPE,
        tokens_per_block=TOKENS_PER_BLOCK,
        layers=layer_specs(config),
    )


def _artifact(model: Path, folder: Path, identity: Identity, write: Callable[[str], None]) -> bytes:
    """Return the digest of an artifact that fits, made where there is none."""
    path = folder / ARTIFACT
    if path.exists():
        try:
            found = kvtc_artifact.read(path)
            found.check(identity, Part.whole(identity))
        except TierKVError as error:
            write(f"{path} is of no use any more ({error}): made anew")
        else:
            return found.digest
    write(f"calibrating {model.name}, once (a few minutes; `tierkv calibrate` does it)")
    order = calibrate.Order(model, path, tokens=CALIBRATION_TOKENS)
    return calibrate.make(order, in_lines(write)).artifact.digest


def _look(folder: Path, identity: Identity, name: str, artifact: bytes) -> tuple[Gate, Verdict]:
    path = folder / GATE
    found = gate.load(path) if path.exists() else Gate()
    return found, found.look(identity.family, name, artifact, 2 * CONTEXT)
