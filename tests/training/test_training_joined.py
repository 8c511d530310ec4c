"""Several processes give the weights of one process with the joined batch, for every mixer.

The network has batch norms that share their statistics (``train.sync_batchnorm``), the exhaustive
part also one without batch statistics. Float64; the tolerance is for the order of sums.
"""

import pytest
import torch

from alignmixup.mixers.stateful import Stateful
from alignmixup.training import Team
from cases import ROWS
from forked import finish, start_team
from joined import EVERY, trained

TOLERANCE = 1e-10
# The block of SAMix computes partly in float32.
WIDER = {("samix", "mask"): 1e-5}
# The method uses a batch as a whole: no draw of the joined batch is that of its shares. AutoMix and
# SAMix hold while the mean mask of every share is on the same side of lam, as it is at first.
COUPLED = {
    ("saliencymix", "cut"): "one box a batch, at the peak of its first partner",
    ("co", "4"): "parts of 20 images, of which a share has four",
    ("multimix", "all"): "each mix is of all images of a batch",
}
# These learn a block with batch norms, which share statistics with sync_batchnorm alone.
NORMED = {("samix", "mask"), ("adautomix-pairs", "mask")}

PROGRAM = """
import sys
import torch
from alignmixup.training import join_team
from joined import EVERY, trained

torch.set_num_threads(1)
team, _ = join_team(torch.device("cpu"))
folder, syncs, coupled = sys.argv[1], sys.argv[2] == "True", sys.argv[3].split(",")
weights = {}
for row, case in EVERY:
    weights[row.name, case, syncs] = trained(row, case, team, team.size, syncs=syncs)
    if f"{row.name} {case}" in coupled:
        weights[row.name, case, False] = trained(row, case, team, team.size)
torch.save(weights, f"{folder}/{team.rank}.pt")
"""


@pytest.mark.parametrize(
    ("size", "syncs"),
    [
        pytest.param(2, True, id="2"),
        pytest.param(2, False, marks=pytest.mark.slow, id="2-no-statistics"),
        pytest.param(4, True, marks=pytest.mark.slow, id="4"),
        pytest.param(4, False, marks=pytest.mark.slow, id="4-no-statistics"),
    ],
)
def test_processes_give_the_weights_of_the_joined_batch(tmp_path, size, syncs):
    names = ",".join(" ".join(key) for key in COUPLED)
    finish(start_team(PROGRAM, tmp_path, syncs, names, size=size))
    first, *others = (torch.load(tmp_path / f"{rank}.pt") for rank in range(size))
    for key, weights in first.items():
        for other in others:  # whatever the method does
            assert all(torch.equal(weights[name], other[key][name]) for name in weights), key
    for row, case in EVERY:
        key = (row.name, case)
        if key in COUPLED:  # the mean over the shares, each by itself
            expected = trained(row, case, Team(), size, accumulate=size)
            check_close(first[*key, False], expected, key)
        elif syncs or key not in NORMED:
            check_close(first[*key, syncs], trained(row, case, Team(), size, syncs=syncs), key)


def test_the_parts_of_a_batch_give_the_weights_of_the_whole_batch():
    for row, case in EVERY:
        if (row.name, case) in COUPLED or isinstance(row.mixer, Stateful):
            continue
        whole = trained(row, case, Team(), 2)
        check_close(trained(row, case, Team(), 2, accumulate=2), whole, (row.name, case))


def test_a_mixer_with_state_takes_a_batch_in_one_part():
    row = next(row for row in ROWS if row.name == "recursive")
    with pytest.raises(ValueError, match="accumulate=2 with RecursiveMix: its state changes once"):
        trained(row, "history", Team(), 2, accumulate=2)


def check_close(found, expected, key):
    tolerance = WIDER.get(key, TOLERANCE)
    torch.testing.assert_close(
        found, expected, rtol=0, atol=tolerance, msg=lambda text: f"{key}: {text}"
    )
