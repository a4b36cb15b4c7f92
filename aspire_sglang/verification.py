"""Which drafts a verify accepts, and what it commits."""

from __future__ import annotations

from dataclasses import dataclass

import torch

PAD_TOKEN_ID = 0
"""Fills ``VerifyResult.committed`` past each row's ``counts``: a valid id, so that a stray gather stays in range."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class VerifyResult:
    """One verify of R requests; W = widest draft + 1. All int64 on the device of the inputs.

    ``accepted``  ``[R]``: drafts accepted, a in 0..d
    ``counts``    ``[R]``: tokens committed, a + 1
    ``committed`` ``[R, W]``: the accepted drafts, then the target's own token; ``PAD_TOKEN_ID`` after ``counts``
    ``last``      ``[R]``: the target's own token y_a, the next cycle's x_0
    """

    accepted: torch.Tensor
    counts: torch.Tensor
    committed: torch.Tensor
    last: torch.Tensor


def accept_drafts(drafts: torch.Tensor, *, num_drafts: torch.Tensor, targets: torch.Tensor) -> VerifyResult:
    """Accept the longest prefix of drafts that equal the target's tokens; commit it and the target's next token.

    Row with drafts x_1..x_d and target tokens y_0..y_d, where y_j was drawn from the target's law given x_1..x_j:

        a = length of the longest prefix with x_{j+1} == y_j, j < d
        committed = y_0..y_a   (y_0..y_{a-1} are the accepted drafts themselves)

    y_0 is drawn from the target's law whatever was drafted. Given that y_0..y_{j-1} were accepted, x_1..x_j equal them,
    so y_j was drawn from the target's law given the committed text. Hence every committed token is the target's, greedy
    or sampled, and drafts decide only how many are committed at once. d = 0 commits y_0: plain decoding.

    ``drafts``: int64 ``[R, D]``, anything past ``num_drafts``. ``num_drafts``: int64 ``[R]``, 0..D.
    ``targets``: int64 ``[R, D + 1]``, anything past column d (see :func:`pad_targets` for ragged ones).
    Mutates nothing; fixed shapes and no host synchronisation, so it may be captured. Raises ``ValueError`` on shapes.
    """
    num_rows, width = targets.shape[0], targets.shape[-1]
    if targets.dim() != 2 or drafts.shape != (num_rows, width - 1) or num_drafts.shape != (num_rows,):
        raise ValueError(
            f"drafts {tuple(drafts.shape)}, num_drafts {tuple(num_drafts.shape)}, targets {tuple(targets.shape)}: "
            "wanted [R, D], [R] and [R, D + 1]"
        )
    column = torch.arange(width, device=targets.device)
    is_equal = (drafts == targets[:, :-1]) & (column[:-1] < num_drafts[:, None])
    accepted = is_equal.to(torch.int64).cumprod(dim=1).sum(dim=1)
    committed = torch.where(column <= accepted[:, None], targets, PAD_TOKEN_ID)
    last = targets.gather(1, accepted[:, None]).squeeze(1)
    return VerifyResult(accepted=accepted, counts=accepted + 1, committed=committed, last=last)


def pad_targets(targets: torch.Tensor, *, offsets: torch.Tensor, num_drafts: torch.Tensor, width: int) -> torch.Tensor:
    """Ragged target tokens as the padded ``[R, width]`` of :func:`accept_drafts`.

    ``targets``: int64 ``[N]``, runs of d_i + 1 tokens. ``offsets``: int64 ``[R]``, where row i's run starts.
    ``num_drafts``: int64 ``[R]``, d_i < ``width`` = D + 1. Columns past d_i become ``PAD_TOKEN_ID``.
    Mutates nothing; no host synchronisation. Raises ``ValueError`` on shapes.
    """
    if targets.dim() != 1 or offsets.dim() != 1 or num_drafts.shape != offsets.shape or width < 1:
        raise ValueError(
            f"targets {tuple(targets.shape)}, offsets {tuple(offsets.shape)}, num_drafts {tuple(num_drafts.shape)}, "
            f"width {width}: wanted [N], [R], [R] and at least 1"
        )
    column = torch.arange(width, device=targets.device)
    is_inside = column <= num_drafts[:, None]
    index = torch.where(is_inside, offsets[:, None] + column, 0)
    if targets.shape[0] == 0:
        return torch.full_like(index, PAD_TOKEN_ID)
    return torch.where(is_inside, targets[index], PAD_TOKEN_ID)
