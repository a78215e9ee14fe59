"""The bases of `kvtc`: principal components in a metric.

An error e in the keys (or values) of one head costs about e' F e of KL divergence, where F is the
second moment of the gradient of the model's own log likelihood with respect to them. Features are
weighted by the square root of F of their head.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

RIDGE = 0.1
"""Share of its mean that is added to a metric's diagonal: no direction is without weight."""
SMALL = 8192
"""Up to so many features the covariance is decomposed exactly, beyond by randomised SVD."""
SEED = 1


class Basis(NamedTuple):
    """A side's principal components: weights W [blocks, d, d], their inverse, and vectors."""

    mean: torch.Tensor
    weight: torch.Tensor
    unweight: torch.Tensor
    variances: torch.Tensor
    vectors: torch.Tensor


def fit(
    values: torch.Tensor,
    metric: torch.Tensor,
    held: torch.Tensor,
    progress: Callable[[float], None],
) -> Basis:
    """Return the principal components of the rows that are not held out, in a metric."""
    train = values[~held]
    mean = train.mean(0, dtype=torch.float32)
    weight, unweight = weights(metric)
    vectors, variances = (
        _exact_components if values.shape[1] <= SMALL else _randomised_components
    )(train, mean, weight, progress)
    return Basis(mean, weight, unweight, variances, vectors)


def weights(metric: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the square roots of metrics [blocks, d, d], made definite, and their inverses."""
    dim = metric.shape[1]
    scale = metric.diagonal(dim1=1, dim2=2).mean(1).double()
    ridge = RIDGE * scale + 0.01 * RIDGE * scale.mean() + torch.finfo(torch.float32).tiny
    definite = metric.double() + ridge[:, None, None] * torch.eye(dim, dtype=torch.double)
    found, vectors = torch.linalg.eigh(definite)
    roots = found.clamp_min(1e-30).sqrt()[:, None, :]
    return (
        (vectors * roots @ vectors.transpose(1, 2)).float(),
        (vectors / roots @ vectors.transpose(1, 2)).float(),
    )


def weighted(rows: torch.Tensor, mean: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return centred and weighted rows, float32 [rows, features]."""
    blocks, dim, _ = weight.shape
    apart = (rows.float() - mean).view(-1, blocks, dim).transpose(0, 1)
    return torch.bmm(apart, weight).transpose(0, 1).reshape(len(rows), -1)


def _exact_components(
    train: torch.Tensor, mean: torch.Tensor, weight: torch.Tensor, progress: Callable[[float], None]
) -> tuple[torch.Tensor, torch.Tensor]:
    features = train.shape[1]
    gram = torch.zeros(features, features)
    for start in range(0, len(train), 4096):
        some = weighted(train[start : start + 4096], mean, weight)
        gram.addmm_(some.T, some)
        progress(0.7 * min(start + 4096, len(train)) / len(train))
    variances, vectors = torch.linalg.eigh(gram / len(train))
    progress(1.0)
    return vectors.flip(1).contiguous(), variances.flip(0).clamp_min(0)


def _randomised_components(
    train: torch.Tensor, mean: torch.Tensor, weight: torch.Tensor, progress: Callable[[float], None]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Randomised SVD (Halko et al., arXiv 0909.4061) with 8 power iterations, a block at a time."""
    features, iterations = train.shape[1], 8
    rank = min(SMALL, len(train), features)
    generator = torch.Generator().manual_seed(SEED)
    basis = torch.randn(features, rank, generator=generator)
    for turn in range(iterations + 1):
        basis = torch.linalg.qr(basis).Q
        product = torch.zeros(features, rank)
        for start in range(0, len(train), 4096):
            some = weighted(train[start : start + 4096], mean, weight)
            product.addmm_(some.T, some @ basis)
        if turn < iterations:
            basis = product
        progress((turn + 1) / (iterations + 1))
    variances, vectors = torch.linalg.eigh(basis.T @ product / len(train))
    return (basis @ vectors.flip(1)).contiguous(), variances.flip(0).clamp_min(0)
