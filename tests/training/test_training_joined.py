"""Several processes give the weights of one process with the joined batch, for every mixer.

With a network without batch statistics, and with batch norms that share theirs
(``train.sync_batchnorm``). Float64; the tolerance is for the order of sums.
"""

import functools
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

# Rows that the quick part also runs with batch norms, and with partners of the whole batch.
SYNCED = {"none", "align", "puzzle", "recursive", "samix", "adautomix-pairs"}
WHOLE = {"saliencymix", "co", "multimix", "align", "puzzle-clean", "regmixup"}

PROGRAM = """
import json
import sys
import torch
import seeds
seeds.move_seeds()
from alignmixup.training import join_team
from joined import ROWS, trained

torch.set_num_threads(1)
team, _ = join_team(torch.device("cpu"))
rows = {row.name: row for row in ROWS}
weights = [
    trained(rows[name], case, team, team.size, syncs=syncs, partners=partners)
    for name, case, syncs, partners in json.loads(sys.argv[2])
]
torch.save(weights, f"{sys.argv[1]}/{team.rank}.pt")
"""


@pytest.mark.parametrize(
    ("size", "synced", "whole"),
    [
        pytest.param(2, SYNCED, WHOLE, id="2"),
        pytest.param(2, None, None, marks=pytest.mark.slow, id="2-exhaustive"),
        pytest.param(4, None, None, marks=pytest.mark.slow, id="4-exhaustive"),
    ],
)
def test_processes_give_the_weights_of_the_joined_batch(tmp_path, size, synced, whole):
    jobs = jobs_of(synced, whole)
    text = json.dumps([(row.name, *rest) for row, *rest in jobs])
    finish(start_team(PROGRAM, tmp_path, text, size=size), seconds=600)
    first, *others = (torch.load(tmp_path / f"{rank}.pt") for rank in range(size))
    for number, (row, case, syncs, partners) in enumerate(jobs):
        found, key = first[number], (row.name, case)
        for other in others:  # whatever the method does
            assert all(torch.equal(found[name], other[number][name]) for name in found), key
        if partners == "batch" or not (key in COUPLED or (key in NORMED and not syncs)):
            check_close(found, trained_alone(row.name, case, size, syncs, partners), key)
        elif key in COUPLED and not syncs:  # the mean over the shares, each by itself
            check_close(found, trained(row, case, Team(), size, accumulate=size), key)


def jobs_of(synced, whole):
    """(row, case, whether norms are synchronized, partners) of all runs; None stands for all."""
    jobs = [(row, case, False, "share") for row, case in EVERY]
    for row, case in EVERY:
        if synced is None or row.name in synced:
            jobs.append((row, case, True, "share"))
        if is_stateless(row) and (whole is None or row.name in whole):
            jobs += [
                (row, case, syncs, "batch") for syncs in ((False,) if whole else (False, True))
            ]
    return jobs


def test_the_parts_of_a_batch_give_the_weights_of_the_whole_batch():
    for row, case in EVERY:
        if (row.name, case) in COUPLED or not is_stateless(row):
            continue
        whole = trained_alone(row.name, case, 2, False, "share")
        check_close(trained(row, case, Team(), 2, accumulate=2), whole, (row.name, case))


@functools.cache
def trained_alone(name, case, num_shares, syncs, partners):
    """The weights of one process with the whole batch, which two tests compare with."""
    row = next(row for row in ROWS if row.name == name)
    return trained(row, case, Team(), num_shares, syncs=syncs, partners=partners)


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
