"""RoPE: taking the rotation out of keys, and putting it back.

Keys are coded without their rotation, because a channel's values then lie close together from token
to token and from block to block. Engines hold them rotated. Both directions use one table of angles
made from the layer's `Rope`: an angle that differs in its last bits from the engine's own costs a
little of the codec's ratio and nothing of what comes back.

Kinds: `none`, `default` and the scaled ones (`linear`, `dynamic` within its trained length,
`llama3`, `yarn`), each over all of a head or its first `rotary_dim` dimensions, as halves or as
interleaved neighbours. `yarn` multiplies cos and sin by a factor f; the inverse divides by
cos^2 + sin^2 = f^2. Everything else (angles of several axes, of a kind not known here) is unsuited.
"""

import functools
import json
import math
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from tierkv.identity import LayerSpec, Rope
from tierkv_codecs.codec import Unsuited

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]

_NO_ANGLE = frozenset({"attention_factor", "mscale", "mscale_all_dim", "max_position_embeddings"})
"""Settings of `scaling` that are not part of the angle itself."""
_ANGLE = {
    "default": frozenset[str](),
    "linear": frozenset({"factor"}),
    "dynamic": frozenset({"factor"}),
    "llama3": frozenset(
        {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}
    ),
    "yarn": frozenset(
        {"factor", "beta_fast", "beta_slow", "original_max_position_embeddings", "truncate"}
    ),
}
"""By kind: the settings that its angles are computed from. Any other setting is unsuited."""


def unrope(keys: torch.Tensor, layers: Sequence[LayerSpec], position: int) -> torch.Tensor:
    """Return keys [layer, token, head, dim] in float32 with the rotation of each layer taken out.

    Args:
        keys: as the engine holds them, of consecutive tokens; any dtype and device.
        layers: of the first axis, in order.
        position: of the first token.

    Raises: Unsuited for a RoPE that is not known here.
    """
    return _turned(keys, layers, position, inverse=True)


def rope(keys: torch.Tensor, layers: Sequence[LayerSpec], position: int) -> torch.Tensor:
    """Return keys in float32 with the rotation put back: the inverse of `unrope`."""
    return _turned(keys, layers, position, inverse=False)


def _turned(
    keys: torch.Tensor, layers: Sequence[LayerSpec], position: int, *, inverse: bool
) -> torch.Tensor:
    out = keys.to(torch.float32, copy=True)
    start = 0
    for one, run in groupby(layer.rope for layer in layers):
        stop = start + len(list(run))
        if one.kind != "none":
            _turn(out[start:stop], one, position, inverse=inverse)
        start = stop
    return out


def _turn(keys: torch.Tensor, one: Rope, position: int, *, inverse: bool) -> None:
    """Rotate keys [layer, token, head, dim] of one RoPE in place."""
    half = rotary_dim(one, keys.shape[3]) // 2
    angles = table(one, keys.shape[3], position, keys.shape[1], inverse=inverse)
    cos, sin = (torch.from_numpy(part).to(keys.device)[:, None, :] for part in angles)
    if one.interleaved:
        first, second = keys[..., 0 : 2 * half : 2], keys[..., 1 : 2 * half : 2]
    else:
        first, second = keys[..., :half], keys[..., half : 2 * half]
    turned = first * cos - second * sin
    second.copy_(second * cos + first * sin)
    first.copy_(turned)


@functools.lru_cache(64)
def table(
    one: Rope, dim: int, position: int, tokens: int, *, inverse: bool
) -> tuple[Floats, Floats]:
    """Return cos and sin [token, rotary_dim / 2], not to be written to, with which a pair turns.

    (x, y) becomes (x cos - y sin, y cos + x sin). The angle is rounded as engines round it, to
    float32; cos and sin are those of that angle, rounded once, so that every machine has the same.

    Raises: Unsuited for a RoPE that is not known here.
    """
    frequency, factor = _frequencies(one, dim)
    at = np.arange(position, position + tokens, dtype=np.float32)
    angle = (at[:, None] * frequency.astype(np.float32)).astype(np.float64)
    # The inverse of a rotation by an angle, scaled by f: by minus the angle, scaled by 1 / f.
    scale, sign = (1 / factor, -1.0) if inverse else (factor, 1.0)
    cos = (np.cos(angle) * scale).astype(np.float32)
    sin = (np.sin(angle) * (scale * sign)).astype(np.float32)
    return cos, sin


class Turn(NamedTuple):
    """Neighbouring layers with one RoPE: cos and sin [token, pair], see `table`."""

    start: int
    stop: int
    interleaved: bool
    cos: Floats
    sin: Floats


def turns(
    layers: Sequence[LayerSpec], dim: int, position: int, tokens: int, *, inverse: bool
) -> Iterator[Turn]:
    """Yield the runs of layers that have one RoPE. Raises: Unsuited for one that is not known."""
    start = 0
    for one, run in groupby(layer.rope for layer in layers):
        stop = start + len(list(run))
        cos, sin = np.zeros((2, tokens, 0), np.float32)
        if rotary_dim(one, dim):
            cos, sin = table(one, dim, position, tokens, inverse=inverse)
        yield Turn(start, stop, one.interleaved, cos, sin)
        start = stop


def rotary_dim(one: Rope, dim: int) -> int:
    """Return how many leading dimensions of a head turn. Raises: Unsuited."""
    if one.kind == "none":
        return 0
    turning = one.rotary_dim or dim
    if turning % 2 or turning > dim:
        raise Unsuited(f"{turning} of {dim} dimensions cannot turn in pairs")
    return turning


def _frequencies(one: Rope, dim: int) -> tuple[Doubles, float]:
    """Return radians per token of each pair, and the factor of cos and sin."""
    settings: dict[str, Any] = json.loads(one.scaling or "{}")
    odd = set(settings) - _ANGLE.get(one.kind, frozenset()) - _NO_ANGLE
    if one.kind not in _ANGLE or odd:
        raise Unsuited(
            f"its RoPE has angles that are not known: {' '.join([one.kind, *sorted(odd)])}"
        )
    turning = rotary_dim(one, dim)
    base = one.theta ** -(np.arange(0, turning, 2, dtype=np.float64) / turning)
    if one.kind == "linear":
        return base / settings["factor"], 1.0
    if one.kind == "llama3":
        return _llama3(base, settings), 1.0
    if one.kind == "yarn":
        return _yarn(base, one.theta, settings), _yarn_factor(settings)
    return base, 1.0


def _llama3(base: Doubles, settings: dict[str, Any]) -> Doubles:
    """Keep high frequencies, divide low ones, and go from one to the other between."""
    factor, length = settings["factor"], settings["original_max_position_embeddings"]
    low, high = settings["low_freq_factor"], settings["high_freq_factor"]
    turns = length * base / (2 * math.pi)
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
    scaled: Doubles = (1 - smooth) * base / factor + smooth * base
    return scaled


def _yarn(base: Doubles, theta: float, settings: dict[str, Any]) -> Doubles:
    """As llama3, with a ramp over the number of the pair (arXiv 2309.00071, section 3.2)."""
    dim, length = 2 * len(base), settings["original_max_position_embeddings"]
    fast, slow = settings.get("beta_fast") or 32.0, settings.get("beta_slow") or 1.0
    first, last = (
        dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta))
        for turns in (fast, slow)
    )
    if settings.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    last += 0.001 if first == last else 0
    ramp = np.clip((np.arange(len(base)) - first) / (last - first), 0.0, 1.0)
    scaled: Doubles = base / _yarn_stretch(settings) * ramp + base * (1 - ramp)
    return scaled


def _yarn_stretch(settings: dict[str, Any]) -> float:
    trained = float(settings["original_max_position_embeddings"])
    return float(settings.get("factor") or settings["max_position_embeddings"] / trained)


def _yarn_factor(settings: dict[str, Any]) -> float:
    def mscale(of: float = 1.0) -> float:
        stretch = _yarn_stretch(settings)
        return 0.1 * of * math.log(stretch) + 1.0 if stretch > 1 else 1.0

    given = settings.get("attention_factor")
    if given is not None:
        return float(given)
    if settings.get("mscale") and settings.get("mscale_all_dim"):
        return mscale(settings["mscale"]) / mscale(settings["mscale_all_dim"])
    return mscale()
