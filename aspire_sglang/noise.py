"""Counter-based Gumbel noise: one value per (seed, position, token), whoever asks and in whatever batch.

Adding Gumbel noise to logits and taking the argmax draws from their softmax (the Gumbel-max trick). Because the noise
of a position is a pure function of the request's seed and that position, drafting and verifying see the same noise,
and a text depends on its seed alone, not on how it was speculated, batched, preempted or resumed.

How: the seed and the position are mixed into a 64-bit row key (SplitMix64's finaliser), each token id into 32 bits, and
three rounds of multiply and xor-shift, keyed by the row key's two halves, join them. Within a row the map from token id
to 32 bits is one to one. The 32 bits are the midpoint of one of 2^32 equal cells of (0, 1), so the logarithms are
finite, and they are taken in float64, where the upper tail (the one that wins an argmax) keeps its resolution.
"""

from __future__ import annotations

import torch

CHUNK_ELEMENTS = 1 << 22
"""Noise values made at once: the scratch (int32 and float64) of a chunk is about 64 MiB, near an H200's L2 of 50 MB."""

_GOLDEN_64 = 0x9E3779B97F4A7C15
_SEED_SALT = 0x5851F42D4C957F2D


def gumbel_noise(
    seeds: torch.Tensor, *, positions: torch.Tensor, vocab_size: int, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Standard Gumbel noise ``[T, vocab_size]`` of every token of each row's (seed, position).

    ``seeds``, ``positions``: int64 ``[T]`` on one device; any values (all 64 bits count). Result on that device.
    The 32 random bits are the same on every device; the float is too, but where the float64 logarithms of two devices
    straddle a float32 rounding boundary (at most one value in about 10^8, by one unit in the last place).
    Mutates nothing; no host synchronisation; fixed shapes, may be captured. Raises ``ValueError`` on wrong shapes.
    Source: Gumbel-max trick; SplitMix64 (Steele, Lea, Flood 2014); 32-bit multipliers of Wellons' hash prospector.
    """
    tokens = torch.arange(vocab_size, device=seeds.device)
    return gumbel_noise_at(seeds, positions=positions, token_ids=tokens[None], dtype=dtype)


def gumbel_noise_at(
    seeds: torch.Tensor, *, positions: torch.Tensor, token_ids: torch.Tensor, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """The values of :func:`gumbel_noise` at chosen tokens only: ``[T, K]``.

    ``token_ids``: int64 ``[T, K]``, or ``[1, K]`` for the same tokens in every row; ids in 0..2^31-1.
    """
    if seeds.dim() != 1 or positions.shape != seeds.shape or token_ids.dim() != 2:
        raise ValueError(
            f"seeds {tuple(seeds.shape)}, positions {tuple(positions.shape)}, token_ids {tuple(token_ids.shape)}: "
            "wanted [T], [T] and [T, K] or [1, K]"
        )
    if token_ids.shape[0] not in (1, seeds.shape[0]):
        raise ValueError(f"token_ids has {token_ids.shape[0]} rows; wanted 1 or {seeds.shape[0]}")
    num_rows, num_tokens = seeds.shape[0], token_ids.shape[1]
    keys = _row_keys(seeds.to(torch.int64), positions.to(torch.int64))
    shared = _hash_tokens(token_ids.to(torch.int32)) if token_ids.shape[0] == 1 else None
    noise = torch.empty((num_rows, num_tokens), dtype=dtype, device=seeds.device)
    rows_per_chunk = max(1, CHUNK_ELEMENTS // max(1, num_tokens))
    for start in range(0, num_rows, rows_per_chunk):
        rows = slice(start, start + rows_per_chunk)
        hashed = shared if shared is not None else _hash_tokens(token_ids[rows].to(torch.int32))
        noise[rows] = _gumbel_of_bits(_join(hashed, keys[rows]))
    return noise


def _row_keys(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """int64 ``[T]``: SplitMix64's output number ``position`` of a stream that starts at the hashed seed."""
    start = _mix64(seeds ^ _signed(_SEED_SALT, 64))
    return _mix64(start + (positions + 1) * _signed(_GOLDEN_64, 64))


def _join(hashed_tokens: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """int32 ``[T, K]``: uniform bits of each (row key, token). The key's halves enter before different rounds."""
    low = keys.to(torch.int32)[:, None]
    high = (keys >> 32).to(torch.int32)[:, None]
    bits = hashed_tokens ^ low
    _round32(bits, shift=15, multiplier=0x7FEB352D)
    bits ^= high
    _round32(bits, shift=16, multiplier=0x846CA68B)
    _round32(bits, shift=15, multiplier=0x2C1B3C6D)
    return _xor_shift32(bits, 16)


def _hash_tokens(token_ids: torch.Tensor) -> torch.Tensor:
    """New int32 tensor: token ids spread over 32 bits, one to one."""
    bits = token_ids * _signed(0x9E3779B1, 32)
    _round32(bits, shift=16, multiplier=0x7FEB352D)
    _round32(bits, shift=15, multiplier=0x846CA68B)
    return _xor_shift32(bits, 16)


def _gumbel_of_bits(bits: torch.Tensor) -> torch.Tensor:
    """float64: -log(-log u) with u = (unsigned bits + 1/2) / 2^32, rotated by half a turn since ``bits`` is signed."""
    uniform = bits.to(torch.float64).mul_(2.0**-32).add_(0.5 + 2.0**-33)
    return uniform.log_().neg_().log_().neg_()


def _mix64(value: torch.Tensor) -> torch.Tensor:
    """SplitMix64's finaliser on int64 (integer products wrap; shifts are logical)."""
    for shift, multiplier in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        value = (value ^ ((value >> shift) & ((1 << (64 - shift)) - 1))) * _signed(multiplier, 64)
    return value ^ ((value >> 31) & ((1 << 33) - 1))


def _round32(bits: torch.Tensor, *, shift: int, multiplier: int) -> None:
    """In place on int32: a logical xor-shift, then a wrapping product with an odd constant."""
    _xor_shift32(bits, shift)
    bits *= _signed(multiplier, 32)


def _xor_shift32(bits: torch.Tensor, shift: int) -> torch.Tensor:
    """In place on int32, and returned: ``bits ^= bits >>> shift``."""
    moved = bits >> shift
    moved &= (1 << (32 - shift)) - 1
    bits ^= moved
    return bits


def _signed(value: int, width: int) -> int:
    """The two's complement reading of an unsigned constant."""
    return value - (1 << width) if value >= 1 << (width - 1) else value
