"""Several processes give the weights of one process with the joined batch, for every mixer.

The network has batch norms that share their statistics (``train.sync_batchnorm``), the exhaustive
part also one without batch statistics. Float64; the tolerance is for the order of sums.
"""

import json

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
# The method uses a batch as a whole: no draw of the joined batch is that of its shares, unless
# partners are those of the whole batch (``train.partners``). AutoMix and SAMix hold while the mean
# mask of every share is on the same side of lam, as it is at first.
COUPLED = {
    ("saliencymix", "cut"): "one box a batch, at the peak of its first partner",
    ("co", "4"): "parts of 20 images, of which a share has four",
    ("multimix", "all"): "each mix is of all images of a batch",
}
# These learn a block with batch norms, which share statistics with sync_batchnorm alone.
NORMED = {("samix", "mask"), ("adautomix-pairs", "mask")}

# Rows whose partners are those of the whole batch in the quick part as well.
SOME = {"saliencymix", "co", "multimix", "align", "manifold", "puzzle-clean", "regmixup", "cutmix"}

PROGRAM = """
import json
import sys
import torch
from alignmixup.training import join_team
from joined import EVERY, trained

torch.set_num_threads(1)
team, _ = join_team(torch.device("cpu"))
folder, syncs, coupled, whole = sys.argv[1], *map(json.loads, sys.argv[2:])
weights = {}
for row, case in EVERY:
    weights[row.name, case] = trained(row, case, team, team.size, syncs=syncs)
    if [row.name, case] in coupled:
        weights[row.name, case, "mean"] = trained(row, case, team, team.size)
    if row.name in whole:
        batch = trained(row, case, team, team.size, syncs=syncs, partners="batch")
        weights[row.name, case, "batch"] = batch
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
    is_quick = size == 2 and syncs
    whole = sorted(SOME if is_quick else {row.name for row in ROWS if is_stateless(row)})
    args = (json.dumps(value) for value in (syncs, [*COUPLED], whole))
    finish(start_team(PROGRAM, tmp_path, *args, size=size), seconds=600)
    first, *others = (torch.load(tmp_path / f"{rank}.pt") for rank in range(size))
    for key, weights in first.items():
        for other in others:  # whatever the method does
            assert all(torch.equal(weights[name], other[key][name]) for name in weights), key
    for row, case in EVERY:
        key = (row.name, case)
        if key in COUPLED:  # the mean over the shares, each by itself
            expected = trained(row, case, Team(), size, accumulate=size)
            check_close(first[*key, "mean"], expected, key)
        elif syncs or key not in NORMED:
            check_close(first[key], trained(row, case, Team(), size, syncs=syncs), key)
        if row.name in whole:  # the same draw, that of the whole batch
            expected = trained(row, case, Team(), size, syncs=syncs, partners="batch")
            check_close(first[*key, "batch"], expected, key)


def test_the_parts_of_a_batch_give_the_weights_of_the_whole_batch():
    for row, case in EVERY:
        if (row.name, case) in COUPLED or not is_stateless(row):
            continue
        whole = trained(row, case, Team(), 2)
        check_close(trained(row, case, Team(), 2, accumulate=2), whole, (row.name, case))


COMPILED = """
import sys
import torch
from alignmixup.training import join_team
from joined import EVERY, trained

torch.set_num_threads(1)
team, _ = join_team(torch.device("cpu"))
row = next(row for row, _ in EVERY if row.name == "align")
weights = trained(row, "feat", team, 4, accumulate=2, compiles=True)
torch.save(weights, f"{sys.argv[1]}/{team.rank}.pt")
"""


@pytest.mark.slow
def test_compiled_steps_of_two_processes_are_those_of_the_joined_batch(tmp_path):
    finish(start_team(COMPILED, tmp_path), seconds=600)
    row = next(row for row in ROWS if row.name == "align")
    expected = trained(row, "feat", Team(), 4)
    check_close(torch.load(tmp_path / "0.pt"), expected, ("align", "feat"))


def test_a_mixer_with_state_takes_a_batch_in_one_part_and_partners_of_its_share():
    row = next(row for row in ROWS if row.name == "recursive")
    with pytest.raises(ValueError, match="accumulate=2 with RecursiveMix: its state changes once"):
        trained(row, "history", Team(), 2, accumulate=2)
    with pytest.raises(ValueError, match="partners='batch' with RecursiveMix: its state is"):
        trained(row, "history", Team(), 2, partners="batch")


def is_stateless(row):
    return not isinstance(row.mixer, Stateful)


def check_close(found, expected, key):
    tolerance = WIDER.get(key, TOLERANCE)
    torch.testing.assert_close(
        found, expected, rtol=0, atol=tolerance, msg=lambda text: f"{key}: {text}"
    )
