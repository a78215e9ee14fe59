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

KV_DTYPE = "fp32"
ARTIFACT = "artifact.kvtc"


class Amount(NamedTuple):
    """How much text a calibration and an evaluation read; each amount has a folder of its own."""

    tokens: int
    suite: Suite


DEMO = Amount(16384, Suite("demo", 4, context=1536, continuation=64, tail=0))
"""Nothing at the end of a prefix is exact, as nothing is in the demo's store. The gate reaches to
twice the context, which is the demo's prompt."""


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


def prepare(model: Path, name: str, write: Callable[[str], None], amount: Amount = DEMO) -> Lossy:
    """Return a profile that may be used, calibrated and measured at the first call.

    Args:
        model: its directory; a folder beside it keeps the artifact and the gate.
        name: of the profile.
        write: takes lines of progress.
        amount: of text.

    Raises: TierKVError (invalid): the profile is not known, loses nothing, or was rejected.
    """
    profile = profile_of(name)
    if not profile.lossy:
        raise invalid(f"{name} loses nothing, as the demo without --profile: name a lossy one")
    identity = identity_of(model)
    suite = amount.suite
    folder = model.with_name(f"{model.name}-{suite.name}")
    folder.mkdir(exist_ok=True)
    artifact, path = NO_ARTIFACT, None
    if profile in KVTC:
        path = folder / ARTIFACT
        artifact = _artifact(model, path, identity, amount.tokens, write)

    def look() -> tuple[Gate, Verdict]:
        file = folder / GATE
        found = gate.load(file) if file.exists() else Gate()
        return found, found.look(identity.family, name, artifact, 2 * suite.context)

    found, verdict = look()
    if verdict.kl == float("inf"):  # of this model and artifact nothing is known yet
        write(f"measuring what {name} costs, once (a few minutes; `tierkv eval` does it)")
        on_step = in_lines(write)
        order = evaluate.Order(
            model,
            folder,
            suite.name,
            name,
            artifact=path,
            kv_dtype=KV_DTYPE,
            context=suite.context,
            tail=suite.tail,
        )

        def tell(step: Step) -> None:
            on_step("measured", step.share)

        evaluate.measure(order, suite, tell)
        found, verdict = look()
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


def _artifact(
    model: Path, path: Path, identity: Identity, tokens: int, write: Callable[[str], None]
) -> bytes:
    """Return the digest of an artifact that fits, made where there is none."""
    if path.exists():
        try:
            found = kvtc_artifact.read(path)
            found.check(identity, Part.whole(identity))
        except TierKVError as error:
            write(f"{path} is of no use any more ({error}): made anew")
        else:
            return found.digest
    write(f"calibrating {model.name}, once (a few minutes; `tierkv calibrate` does it)")
    order = calibrate.Order(model, path, tokens=tokens)
    return calibrate.make(order, in_lines(write)).artifact.digest
