from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from laya.common import ece_score

from infinity_bento.decisions import Decision
from infinity_bento.reliability import (
    BINS,
    HIGHEST,
    LOWEST,
    Sample,
    best_temperature,
    expected_calibration_error,
    figures,
    softmax,
)


def drawn(count: int, temperature: float, options: int | None = None, seed: int = 0) -> list[Sample]:
    """Answers of a model whose best temperature is known: the right option is drawn at that temperature."""
    generator = np.random.default_rng(seed)
    samples = []
    for _ in range(count):
        logits = generator.normal(0, 3, options or int(generator.integers(2, 8)))
        label = int(generator.choice(len(logits), p=softmax(logits / temperature)))
        samples.append(Sample(logits, label, 1.0))
    return samples


@pytest.mark.parametrize("temperature", [0.4, 1.0, 2.5, 6.0])
def test_a_known_temperature_is_found(temperature: float) -> None:
    samples = drawn(6000, temperature)
    assert best_temperature(samples) == pytest.approx(temperature, rel=0.06)
    before, after = figures(samples), figures(samples, best_temperature(samples))
    assert after.log_loss <= before.log_loss
    if temperature != 1.0:
        assert after.ece < before.ece / 2
        assert after.brier < before.brier
    assert after.ece < 0.02 and after.accuracy == before.accuracy


def test_the_loss_is_the_smallest_there() -> None:
    samples = drawn(300, 1.7)
    best = best_temperature(samples)
    losses = [figures(samples, best * factor).log_loss for factor in (0.98, 1.0, 1.02)]
    assert losses[1] == min(losses)


def test_the_present_temperature_does_not_count() -> None:
    """What is fitted divides the logits, not the probabilities that are served."""
    samples = drawn(500, 2.0, options=4)
    served = [Sample.of(Decision(tuple(softmax(s.logits / 3.0).tolist()), temperature=3.0), s.label) for s in samples]
    assert best_temperature(served) == pytest.approx(best_temperature(samples), rel=1e-6)
    assert figures(served).log_loss == pytest.approx(figures(samples, 3.0).log_loss, rel=1e-9)


def test_the_ends_of_the_range() -> None:
    sure = [Sample(np.array([1.0, 0.0]), 0, 1.0)] * 30
    assert best_temperature(sure) == LOWEST
    assert best_temperature([replace(sample, label=1) for sample in sure]) == HIGHEST


def test_a_probability_of_zero_is_no_trouble() -> None:
    sample = Sample.of(Decision((1.0, 0.0)), 1)
    found = figures([sample])
    assert np.isfinite(sample.logits).all() and np.isfinite(found.log_loss)
    assert (found.accuracy, found.brier) == (0.0, pytest.approx(2.0))


def test_the_calibration_error_equals_layas() -> None:
    generator = np.random.default_rng(3)
    confidence = np.concatenate([generator.random(500), [0.0, 1.0, 1 / BINS, 0.5, 2 / 3]])
    right = generator.random(len(confidence)) < 0.6
    assert expected_calibration_error(confidence, right) == pytest.approx(ece_score(confidence, right, BINS), abs=1e-12)


def test_figures_equal_torchs() -> None:
    samples = drawn(50, 1.0, options=3)
    logits, labels = torch.tensor(np.stack([s.logits for s in samples])), torch.tensor([s.label for s in samples])
    found = figures(samples, 1.3)
    rows = (logits / 1.3).softmax(-1)
    assert found.log_loss == pytest.approx(float(torch.nn.functional.cross_entropy(logits / 1.3, labels)))
    truth = torch.nn.functional.one_hot(labels, 3)
    assert found.brier == pytest.approx(float(((rows - truth) ** 2).sum(-1).mean()))
    assert found.accuracy == pytest.approx(float((rows.argmax(-1) == labels).double().mean()))
    assert set(found.as_dict()) == {"accuracy", "log_loss", "brier", "ece"}
