"""The summary of a run: which accuracies it has, and what it calls them."""

import pytest

from alignmixup.training import summarize
from alignmixup.training.ledger import LEDGER, Ledger


@pytest.mark.parametrize(("epochs", "median"), [(1, None), (10, None), (29, None), (30, 24.5)])
def test_a_median_of_ten_is_given_from_thirty_epochs_on(tmp_path, epochs, median):
    """The last ten of ten epochs are the whole history of the run."""
    ledger = Ledger(tmp_path / LEDGER)
    ledger.append("start", {"settings": {"epochs": epochs}})
    for epoch in range(epochs):
        ledger.append("epoch", {"epoch": epoch + 1, "test": {"top1": float(epoch)}})
    summary = summarize(tmp_path)
    assert summary.median10 == median
    assert (summary.last, summary.best) == (epochs - 1, epochs - 1)
    assert ("median" in str(summary)) == (median is not None)
    assert f"last {epochs - 1:.2f}, best {epochs - 1:.2f} (epoch {epochs}" in str(summary)
