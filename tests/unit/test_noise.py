"""The noise is uniform, independent in seed, position and token, and a pure function of the three."""

from __future__ import annotations

import math

import pytest
import torch
from scipy import stats

from aspire_sglang import noise
from aspire_sglang.noise import gumbel_noise, gumbel_noise_at

MIN_P_VALUE = 1e-4
MASK_32, MASK_64 = (1 << 32) - 1, (1 << 64) - 1


pytestmark = pytest.mark.usefixtures("one_thread")


def uniforms(seeds: torch.Tensor, positions: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """The uniform numbers behind the noise, float64."""
    values = gumbel_noise(seeds, positions=positions, vocab_size=vocab_size, dtype=torch.float64)
    return torch.exp(-torch.exp(-values))


def grid(num_seeds: int, num_positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """All pairs, seeds outermost."""
    seeds = torch.arange(num_seeds).repeat_interleave(num_positions)
    return seeds, torch.arange(num_positions).repeat(num_seeds)


def uniform_p_value(sample: torch.Tensor, bins: int = 256) -> float:
    counts = torch.histc(sample.flatten(), bins=bins, min=0.0, max=1.0)
    return float(stats.chisquare(counts.numpy()).pvalue)


def pair_p_value(left: torch.Tensor, right: torch.Tensor, bins: int = 16) -> float:
    """Chi-square of the joint histogram against independent uniforms: sees more than linear correlation."""
    cell = (left * bins).long().clamp(max=bins - 1) * bins + (right * bins).long().clamp(max=bins - 1)
    return float(stats.chisquare(torch.bincount(cell.flatten(), minlength=bins * bins).numpy()).pvalue)


def mix64(value: int) -> int:
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK_64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK_64
    return value ^ (value >> 31)


def round32(value: int, shift: int, multiplier: int) -> int:
    return ((value ^ (value >> shift)) * multiplier) & MASK_32


def reference_noise(seed: int, position: int, token: int) -> float:
    """The definition in unsigned Python integers."""
    key = mix64(((mix64((seed & MASK_64) ^ 0x5851F42D4C957F2D)) + (position + 1) * 0x9E3779B97F4A7C15) & MASK_64)
    bits = (token * 0x9E3779B1) & MASK_32
    bits = round32(bits, 16, 0x7FEB352D)
    bits = round32(bits, 15, 0x846CA68B)
    bits ^= bits >> 16
    bits = round32(bits ^ (key & MASK_32), 15, 0x7FEB352D)
    bits = round32(bits ^ (key >> 32), 16, 0x846CA68B)
    bits = round32(bits, 15, 0x2C1B3C6D)
    bits ^= bits >> 16
    return -math.log(-math.log((((bits + (1 << 31)) & MASK_32) + 0.5) / 2**32))


def test_equals_its_definition() -> None:
    seeds = torch.tensor([0, 1, -1, 42, 2**63 - 1, -(2**63)])
    positions = torch.tensor([0, 1, 7, 131_071, 3, 0])
    tokens = torch.tensor([[0, 1, 49_151, 151_935]])
    got = gumbel_noise_at(seeds, positions=positions, token_ids=tokens)
    want = [
        [reference_noise(seed, position, token) for token in tokens[0].tolist()]
        for seed, position in zip(seeds.tolist(), positions.tolist(), strict=True)
    ]
    torch.testing.assert_close(got, torch.tensor(want, dtype=torch.float32), rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("num_seeds", "num_positions", "vocab_size"),
    [(1, 1, 1 << 20), (1 << 20, 1, 1), (1, 1 << 20, 1), (64, 64, 256)],
    ids=["tokens", "seeds", "positions", "all"],
)
def test_uniform_along_every_axis(num_seeds: int, num_positions: int, vocab_size: int) -> None:
    seeds, positions = grid(num_seeds, num_positions)
    sample = uniforms(seeds, positions, vocab_size)
    assert uniform_p_value(sample) > MIN_P_VALUE
    fine = (sample * 2**20) % 1.0  # the low bits, too
    assert uniform_p_value(fine) > MIN_P_VALUE


@pytest.mark.parametrize("distance", [1, 2, 16, 64])
@pytest.mark.parametrize("axis", [0, 1, 2], ids=["seed", "position", "token"])
def test_neighbours_are_independent(axis: int, distance: int) -> None:
    sample = uniforms(*grid(96, 96), 96).view(96, 96, 96)
    left, right = sample.narrow(axis, 0, 96 - distance), sample.narrow(axis, distance, 96 - distance)
    assert pair_p_value(left, right) > MIN_P_VALUE
    correlation = torch.corrcoef(torch.stack([left.flatten(), right.flatten()]))[0, 1]
    assert abs(correlation) < 4.5 / math.sqrt(left.numel())


def test_equal_sums_of_seed_and_position_are_independent() -> None:
    sample = uniforms(*grid(256, 256), 16).view(256, 256, 16)
    assert pair_p_value(sample[1:, :-1], sample[:-1, 1:]) > MIN_P_VALUE
    off_diagonal = torch.triu(torch.ones(256, 256, dtype=torch.bool), diagonal=1)
    assert pair_p_value(sample[off_diagonal], sample.transpose(0, 1)[off_diagonal]) > MIN_P_VALUE


def test_seeds_that_differ_in_one_bit_are_independent() -> None:
    base = torch.arange(4096)
    zero = torch.zeros_like(base)
    plain = uniforms(base, zero, 32)
    for bit in (0, 12, 31, 32, 47, 63):
        flipped = base ^ (-(2**63) if bit == 63 else 1 << bit)
        assert pair_p_value(plain, uniforms(flipped, zero, 32)) > MIN_P_VALUE / 10


def test_gumbel_moments() -> None:
    rows = torch.arange(8)
    values = gumbel_noise(rows, positions=rows, vocab_size=1 << 18).double()
    assert values.mean().item() == pytest.approx(0.5772157, abs=4 * 1.2825 / math.sqrt(values.numel()))
    assert values.var().item() == pytest.approx(math.pi**2 / 6, rel=0.01)


def test_extreme_bits_are_finite_and_resolved() -> None:
    bits = torch.tensor([-(2**31), -1, 0, 2**31 - 2, 2**31 - 1], dtype=torch.int32)
    values = noise._gumbel_of_bits(bits).to(torch.float32)
    assert torch.isfinite(values).all()
    assert (values.diff() >= 0).all()
    assert values[-1] > values[-2]  # the upper tail keeps its resolution in float32
    assert values[-1] == pytest.approx(33 * math.log(2), rel=1e-6)


def test_distinct_tokens_of_a_row_have_distinct_noise() -> None:
    values = gumbel_noise(torch.tensor([5]), positions=torch.tensor([9]), vocab_size=1 << 18, dtype=torch.float64)
    assert len(set(values[0].tolist())) == 1 << 18


def test_a_row_does_not_depend_on_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds, positions = torch.arange(13) * 7919, torch.arange(13) + 100
    whole = gumbel_noise(seeds, positions=positions, vocab_size=777)
    again = gumbel_noise(seeds, positions=positions, vocab_size=777)
    alone = [gumbel_noise(seeds[i : i + 1], positions=positions[i : i + 1], vocab_size=777) for i in range(13)]
    reversed_rows = gumbel_noise(seeds.flip(0), positions=positions.flip(0), vocab_size=777).flip(0)
    monkeypatch.setattr(noise, "CHUNK_ELEMENTS", 2000)
    chunked = gumbel_noise(seeds, positions=positions, vocab_size=777)
    for other in (again, torch.cat(alone), reversed_rows, chunked):
        assert torch.equal(whole, other)


def test_chosen_tokens_and_wider_vocabularies_agree() -> None:
    seeds, positions = torch.arange(5), torch.arange(5) * 3
    whole = gumbel_noise(seeds, positions=positions, vocab_size=512)
    tokens = torch.randint(512, (5, 20), generator=torch.Generator().manual_seed(0))
    assert torch.equal(gumbel_noise_at(seeds, positions=positions, token_ids=tokens), whole.gather(1, tokens))
    assert torch.equal(gumbel_noise(seeds, positions=positions, vocab_size=600)[:, :512], whole)


def test_argmax_draws_from_the_softmax() -> None:
    logits = torch.tensor([2.0, 0.0, 1.0, -3.0, 0.5])
    seeds = torch.arange(100_000)
    values = gumbel_noise(seeds, positions=torch.full_like(seeds, 17), vocab_size=5)
    counts = torch.bincount((logits + values).argmax(dim=1), minlength=5)
    expected = torch.softmax(logits.double(), dim=0) * seeds.numel()
    assert stats.chisquare(counts.numpy(), expected.numpy()).pvalue > MIN_P_VALUE


def test_empty_and_wrong_shapes() -> None:
    none = torch.empty(0, dtype=torch.int64)
    assert gumbel_noise(none, positions=none, vocab_size=8).shape == (0, 8)
    with pytest.raises(ValueError, match="wanted"):
        gumbel_noise(torch.zeros(2, dtype=torch.int64), positions=torch.zeros(3, dtype=torch.int64), vocab_size=8)
    two = torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match="3 rows"):
        gumbel_noise_at(two, positions=two, token_ids=torch.zeros(3, 4, dtype=torch.int64))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_gives_the_cpu_values() -> None:
    seeds, positions = torch.randint(-(2**63), 2**63 - 1, (64,)), torch.arange(64) * 1001
    cpu = gumbel_noise(seeds, positions=positions, vocab_size=50_000)
    cuda = gumbel_noise(seeds.cuda(), positions=positions.cuda(), vocab_size=50_000).cpu()
    assert (cpu != cuda).sum().item() <= 3  # of 3.2 million: float32 roundings that the two logarithms straddle
    torch.testing.assert_close(cuda, cpu, rtol=2.4e-7, atol=1e-9)
