"""Random numbers as arithmetic: known words, plain integers, the distribution of gammas."""

import numpy as np
import pytest
import scipy.stats
import torch

from alignmixup.ops.philox import dirichlet, gammas, philox


def word_of(seed: int, index: int) -> list[int]:
    words = philox(torch.tensor(seed), torch.tensor([index]))
    return [int(word) for word in words]


def test_known_words() -> None:
    """The first answer that the authors of Philox publish for it: zeros as counter and key."""
    assert word_of(0, 0) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


def in_plain_integers(seed: int, index: int, stream: int) -> list[int]:
    """Philox4x32-10 in Python's integers, which do not overflow."""
    counter, key = [index, stream, 0, 0], [seed & 0xFFFFFFFF, seed >> 32]
    for _ in range(10):
        low, high = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = [
            (high >> 32) ^ counter[1] ^ key[0],
            high & 0xFFFFFFFF,
            (low >> 32) ^ counter[3] ^ key[1],
            low & 0xFFFFFFFF,
        ]
        key = [(key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return counter


@pytest.mark.parametrize("seed", [1, 2**31 + 5, 2**62 - 1])
@pytest.mark.parametrize("stream", [0, 2])
def test_words_are_those_of_plain_integers(seed: int, stream: int) -> None:
    index = torch.tensor([0, 1, 77, 2**16, 2**31, 2**32 - 1])
    words = torch.stack(philox(torch.tensor(seed), index, stream), 1)
    assert words.tolist() == [in_plain_integers(seed, int(i), stream) for i in index]


@pytest.mark.parametrize("alpha", [0.5, 1.0, 2.0])
def test_gammas_have_their_distribution(alpha: float) -> None:
    drawn = gammas(torch.tensor(11), torch.tensor(alpha), (20_000,))
    assert scipy.stats.kstest(drawn.double().numpy(), "gamma", args=(alpha,)).pvalue > 1e-4


def test_dirichlet_columns_sum_to_one_and_have_beta_marginals() -> None:
    m, alpha = 8, 0.7
    weights = dirichlet(torch.tensor(3), torch.tensor(alpha), (m, 5000), dim=0)
    torch.testing.assert_close(weights.sum(0), torch.ones(5000))
    law = ("beta", (alpha, (m - 1) * alpha))
    assert scipy.stats.kstest(weights[2].double().numpy(), *law).pvalue > 1e-4


@pytest.mark.parametrize("alpha", [1e-40, 1e-3, 0.02, 1e30])
def test_dirichlet_of_every_alpha_has_its_law(alpha: float) -> None:
    """Beta marginals; with two parts the share of each is 0 or 1 for a small alpha."""
    weights = dirichlet(torch.tensor(3), torch.tensor(alpha), (2, 4000), dim=0)
    torch.testing.assert_close(weights.sum(0), torch.ones(4000))
    assert float(weights.mean(1)[0]) == pytest.approx(0.5, abs=0.03)
    assert float(weights[0].var()) == pytest.approx(0.25 / (2 * alpha + 1), abs=0.01)


def test_seeds_and_positions_are_independent() -> None:
    alpha = torch.tensor(1.0)
    a, b = (gammas(torch.tensor(seed), alpha, (4000,)).numpy() for seed in (1, 2))
    assert abs(np.corrcoef(a, b)[0, 1]) < 0.08
    assert abs(np.corrcoef(a[1:], a[:-1])[0, 1]) < 0.08
    assert np.array_equal(a, gammas(torch.tensor(1), alpha, (4000,)).numpy())
