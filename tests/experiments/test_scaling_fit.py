"""Power laws and compute advantages: made-up laws are found again, and the papers' own say what the papers say."""

import numpy as np
import pytest

from experiments.paper import SCALING_ADVANTAGE, SCALING_AT, SCALING_LAWS
from experiments.scaling_fit import Law, Measured, advantage, compute_advantage, fit_law

TRUE, BASELINE = Law(1.9, 0.057), Law(1.95, 0.055)
COMPUTE = np.geomspace(1e-5, 1e-3, 5)


def measured(law, *, noise=None, seeds=3, compute=COMPUTE):
    """By size; noise [sizes, seeds] is added to the logarithm of the loss."""
    noise = np.zeros((len(compute), seeds)) if noise is None else noise
    losses = [[law.loss(c) * np.exp(e) for e in row] for c, row in zip(compute, noise, strict=True)]
    return {
        f"size {i}": Measured(c, dict(enumerate(row))) for i, (c, row) in enumerate(zip(compute, losses, strict=True))
    }


def test_a_law_without_noise_is_found_exactly():
    fit = fit_law(measured(TRUE))
    assert fit.law == pytest.approx(TRUE, rel=1e-9)
    assert fit.A == pytest.approx((1.9, 1.9), rel=1e-9) and fit.alpha == pytest.approx((0.057, 0.057), rel=1e-9)
    assert fit.law.compute(fit.law.loss(3e-4)) == pytest.approx(3e-4)


def test_an_advantage_without_noise_is_that_of_the_laws():
    found = advantage(measured(TRUE), measured(BASELINE, compute=COMPUTE * 1.1))
    assert found.at == pytest.approx(1e-3)  # the largest that both have
    needed = found.value * found.at
    assert BASELINE.loss(needed) == pytest.approx(TRUE.loss(found.at)) and needed > found.at
    assert found.interval == pytest.approx((found.value, found.value), rel=1e-6) and found.above_one == 1
    assert (found.sizes, found.seeds) == (5, 15)
    same_slope = Law(1.9 * 1.01, 0.057)
    assert advantage(measured(TRUE), measured(same_slope)).value == pytest.approx(1.01 ** (1 / 0.057))
    assert advantage(measured(same_slope), measured(TRUE)).above_one == 0


@pytest.mark.parametrize("seeds, least", [(1, 0.7), (3, 0.9)])
def test_intervals_cover_the_truth_about_as_often_as_they_say(seeds, least):
    """Of 60 made-up studies; what is expected is in scaling_fit."""
    rng, covered, widths, slopes = np.random.default_rng(0), [], [], []
    for _ in range(60):
        ours, theirs = (0.004 * rng.normal(size=(5, seeds)) for _ in range(2))
        fit = fit_law(measured(TRUE, noise=ours))
        found = advantage(measured(TRUE, noise=ours), measured(BASELINE, noise=theirs))
        truth = compute_advantage(TRUE, BASELINE, found.at)
        covered.append([low <= x <= high for x, (low, high) in ((TRUE.alpha, fit.alpha), (truth, found.interval))])
        widths.append(np.diff(fit.alpha)[0])
        slopes.append(fit.law.alpha)
    assert np.all(np.mean(covered, axis=0) > least)
    assert np.median(widths) < 7 * np.std(slopes)  # 3.9 for a normal distribution of known width


def test_what_both_models_share_costs_no_certainty():
    noise = 0.01 * np.random.default_rng(1).normal(size=(5, 3))
    found = advantage(measured(TRUE, noise=noise), measured(Law(1.92, 0.057), noise=noise))
    low, high = np.log(found.interval)
    assert high - low < 0.2 * np.log(found.value)
    apart = advantage(measured(TRUE, noise=noise), measured(Law(1.92, 0.057), noise=noise[::-1]))
    assert np.diff(np.log(apart.interval))[0] > 5 * (high - low)


def test_seeds_alone_widen_an_interval():
    """Means that lie on the line exactly, of seeds that do not agree."""
    noise = 0.02 * np.array([[-1.0, 0.0, 1.0]] * 5)
    low, high = fit_law(measured(TRUE, noise=noise)).alpha
    assert low < TRUE.alpha < high and high - low > 1e-3


def test_only_runs_that_both_have_are_compared():
    ours, theirs = measured(TRUE), measured(BASELINE)
    expected = advantage(ours, theirs)
    theirs["size 0"] = Measured(theirs["size 0"].compute, {0: theirs["size 0"].losses[0]})
    ours["size 0"].losses[2] = 100.0  # has no partner
    ours["more"] = Measured(1.0, {0: 1e-3})
    found = advantage(ours, theirs)
    assert found.value == pytest.approx(expected.value) and (found.sizes, found.seeds) == (5, 13)


def test_too_few_sizes_and_a_rising_loss_are_refused():
    with pytest.raises(ValueError, match=r"at least 3 sizes, got 2 \(size 0, size 1\)"):
        fit_law(measured(TRUE, compute=COMPUTE[:2]))
    with pytest.raises(ValueError, match=r"got 0 \(none\)"):
        advantage(measured(TRUE), {})
    with pytest.raises(ValueError, match="alpha=-0.05: the loss does not fall"):
        advantage(measured(TRUE), measured(Law(1.9, -0.05)))
    flat = 0.05 * np.random.default_rng(2).normal(size=(5, 3))  # may rise as well: then no compute is enough
    found = advantage(measured(Law(1.0, 0.01)), measured(Law(2.0, 0.01), noise=flat))
    assert found.interval[1] == np.inf and found.above_one > 0.5


def test_the_papers_laws_give_their_advantages():
    kimi, attn_res = SCALING_LAWS.values()
    block, full, plain = (Law(*attn_res[m]) for m in ("block", "full", "hybrid"))
    assert compute_advantage(block, plain, SCALING_AT) == pytest.approx(SCALING_ADVANTAGE["block", "hybrid"], abs=0.005)
    assert compute_advantage(full, plain, SCALING_AT) > SCALING_ADVANTAGE["block", "hybrid"]
    hybrid, mla = Law(*kimi["hybrid"]), Law(*kimi["mla"])
    at = hybrid.compute(2.1)
    assert compute_advantage(hybrid, mla, at) == pytest.approx(SCALING_ADVANTAGE["hybrid", "mla"], abs=0.005)
