"""``detect``: fine-tuned from a run, killed, resumed, scored once, and shown in the report."""

import json
import os
import re
import signal
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from alignmixup.cli import main
from alignmixup.experiments import detecting
from alignmixup.experiments.detecting import KINDS, Transfer, schedule, transfer
from alignmixup.models import build
from alignmixup.recipes.catalog import find_recipe
from alignmixup.recipes.schema import changed
from alignmixup.report.reading import read_results
from alignmixup.report.tables import table
from alignmixup.training import loop
from alignmixup.training.checkpoint import Checkpoint, CheckpointWriter, load_checkpoint
from torchvision_ops import patch_torchvision_ops

XML = "<annotation><size><width>48</width><height>40</height></size>{}</annotation>"
OBJECT = (
    "<object><name>dog</name><difficult>{}</difficult><bndbox><xmin>9</xmin><ymin>7</ymin>"
    "<xmax>40</xmax><ymax>36</ymax></bndbox></object>"
)
NUM_TRAIN = 5


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """VOC: five images to train on, the last with a difficult object alone, and two to test."""
    place = tmp_path_factory.mktemp("data")
    folder = place / "VOCdevkit" / "VOC2007"
    for name in ("Annotations", "JPEGImages", "ImageSets/Main"):
        (folder / name).mkdir(parents=True)
    rng = np.random.default_rng(0)
    splits = {"trainval": range(NUM_TRAIN), "test": range(NUM_TRAIN, NUM_TRAIN + 2)}
    for split, numbers in splits.items():
        (folder / f"ImageSets/Main/{split}.txt").write_text("".join(f"{i}\n" for i in numbers))
        for i in numbers:
            pixels = rng.integers(0, 256, (40, 48, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / f"JPEGImages/{i}.jpg")
            objects = OBJECT.format(int(i == NUM_TRAIN - 1))
            (folder / f"Annotations/{i}.xml").write_text(XML.format(objects))
    coco = place / "coco"
    (coco / "annotations").mkdir(parents=True)
    for split, count in (("train2017", 3), ("val2017", 2)):
        (coco / split).mkdir()
        for i in range(count):
            Image.new("RGB", (20, 30)).save(coco / split / f"{i}.png")
        size = {"width": 20, "height": 30}
        document = {
            "images": [{"id": i, "file_name": f"{i}.png", **size} for i in range(count)],
            "categories": [{"id": 1, "name": "person"}, {"id": 3, "name": "car"}],
            "annotations": [
                {"id": i + 1, "image_id": i, "category_id": 3, "bbox": [2, 3, 10, 12]}
                for i in range(count)
            ],
        }
        (coco / f"annotations/instances_{split}.json").write_text(json.dumps(document))
    return place


@pytest.fixture(scope="module")
def weights():
    return build(find_recipe("imagenet-r50-alignmixup").net, 3, (0.5,) * 3, (0.2,) * 3, 64)


def finished_run(folder, weights, epochs=1, name="imagenet-r50-alignmixup"):
    """The folder of a run, as training leaves it after one epoch."""
    folder.mkdir(parents=True)
    recipe = changed(find_recipe(name), {"train.epochs": epochs})
    (folder / "run.json").write_text(json.dumps(recipe.to_json()))
    writer = CheckpointWriter(folder / "checkpoint.safetensors")
    tensors = {f"model.{k}": v for k, v in weights.state_dict().items()}
    writer.save(Checkpoint(tensors, {"epoch": 1}))
    writer.close()
    return folder


@pytest.fixture
def run(tmp_path):
    """A run whose weights nobody looks at: the detector is a toy."""
    return finished_run(tmp_path / "run", nn.Linear(1, 1))


class Toy(nn.Module):
    """A detector as torchvision's are called; its loss has chance in it, as theirs has."""

    def __init__(self, state, num_classes, *, seed=0):
        super().__init__()
        self.num_classes = num_classes
        self.weight = nn.Parameter(torch.full((3,), 0.1))

    def forward(self, images, targets=None):
        if targets is not None:
            shown = torch.stack([image.mean(dim=(1, 2)) for image in images])
            wanted = torch.stack([t["boxes"].mean() + t["labels"].sum() for t in targets])
            noise = 1 + 0.1 * torch.rand(len(images))
            return {"loss": (noise * (shown @ self.weight - wanted / 100) ** 2).mean()}
        box = torch.tensor([[8.0, 6.0, 40.0, 36.0]])
        return [
            {
                "boxes": box,
                "labels": torch.tensor([min(12, self.num_classes)]),
                "scores": torch.ones(1),
            }
            for _ in images
        ]


@pytest.fixture
def toy(monkeypatch):
    kinds = {name: replace(kind, make=Toy) for name, kind in KINDS.items()}
    monkeypatch.setattr(detecting, "KINDS", kinds)


SHORT = schedule("voc", epochs=3, batch_size=2, lr=0.01)


def short(**changes):
    return Transfer("voc", replace(SHORT, num_warmup_steps=2, **changes), years=(2007,))


def call(run, root, what=None, **options):
    return transfer(run, what or short(), root=root, device="cpu", quiet=True, **options)


def command(run, root, **flags):
    """The words of the command, and its flags."""
    flags = {"data": "voc", "root": root, "years": 2007, "device": "cpu", **flags}
    pairs = [(f"--{name.replace('_', '-')}", str(value)) for name, value in flags.items()]
    return ["detect", str(run), *(word for pair in pairs for word in pair)]


def trained(run):
    return load_checkpoint(run / "detection-voc" / "checkpoint.safetensors")


@pytest.mark.usefixtures("toy")
def test_results_are_appended_once_with_what_they_are_of(run, root):
    results = call(run, root)
    assert {r.metric: r.value for r in results} == pytest.approx({"map": 100, "map_area": 100})
    lines = (run / "results.jsonl").read_text().splitlines()
    assert [json.loads(line)["metric"] for line in lines] == ["map", "map_area"]
    first = json.loads(lines[0])
    assert first["key"] == asdict(find_recipe("imagenet-r50-alignmixup").key)
    assert first["task"] == "detection"
    told = {"data": "voc07", "network": "ssd-r50", "num_images": 2, "num_trained": NUM_TRAIN - 1}
    assert told.items() <= first["settings"].items()
    assert first["settings"]["trained_on"] == "voc2007"
    again = call(run, root)
    assert [r.value for r in again] == [r.value for r in results]
    assert (run / "results.jsonl").read_text().splitlines() == lines


@pytest.mark.usefixtures("toy")
def test_the_report_shows_them_beside_the_published_figure(run, root):
    call(run, root)
    with_coco = Transfer("coco", schedule("coco", epochs=1, batch_size=2))
    call(run, root, with_coco)
    made = table(read_results([run]), "detection")
    columns = ("Pascal VOC07 SSD R-50 mAP (%)", "MS-COCO Faster R-CNN R-50 mAP (%)")
    assert made.columns == ("Method", *columns)
    rows = {row[0]: row[1:] for row in made.rows}
    ours = rows["AlignMixup"]
    assert ours[0] == "100.00 (78.40)"
    assert ours[1].endswith("(35.84)")
    assert rows["CutMix"] == ("(77.60)", "(35.16)")


class Killed(Exception):
    pass


@pytest.mark.usefixtures("toy")
@pytest.mark.parametrize("num_steps", [1, 2, 3, 5, 6])
def test_one_that_was_killed_resumes_to_the_same_weights(
    run, root, tmp_path, monkeypatch, num_steps
):
    """With a checkpoint at every step: also in the middle of an epoch."""
    monkeypatch.setattr(loop, "SAVE_EVERY", 0.0)
    whole = finished_run(tmp_path / "whole", nn.Linear(1, 1))
    call(whole, root)
    left, forward = [num_steps], Toy.forward

    def dying(self, images, targets=None):
        if not left[0]:
            raise Killed
        left[0] -= 1
        return forward(self, images, targets)

    monkeypatch.setattr(Toy, "forward", dying)
    with pytest.raises(Killed):
        call(run, root)
    reached = trained(run).facts
    assert 2 * reached["epoch"] + reached["step"] == num_steps
    assert not (run / "results.jsonl").exists()
    monkeypatch.setattr(Toy, "forward", forward)
    call(run, root)
    assert trained(run).facts == trained(whole).facts
    for name, value in trained(whole).tensors.items():
        assert torch.equal(trained(run).tensors[name], value), name
    ledgers = [(f / "detection-voc" / "ledger.jsonl").read_text() for f in (run, whole)]
    epochs = [[x for x in map(json.loads, t.splitlines()) if "epoch" in x] for t in ledgers]
    assert epochs[0] == epochs[1]
    assert [e["epoch"] for e in epochs[0] if e["event"] == "epoch"] == [1, 2, 3]


@pytest.mark.usefixtures("toy")
def test_a_signal_stops_it_at_a_checkpoint_with_status_130(run, root, monkeypatch, capsys):
    forward = Toy.forward

    def interrupted(self, images, targets=None):
        os.kill(os.getpid(), signal.SIGINT)
        return forward(self, images, targets)

    monkeypatch.setattr(Toy, "forward", interrupted)
    words = command(run, root, epochs=3, batch_size=2)
    for reached in ({"epoch": 0, "step": 1}, {"epoch": 1, "step": 0}):
        assert main(words) == 130
        assert "the same command resumes" in capsys.readouterr().err
        assert reached.items() <= trained(run).facts.items()
    monkeypatch.setattr(Toy, "forward", forward)
    assert main(words) == 0
    said = capsys.readouterr()
    assert re.search(r"epoch 2/3  loss [\d.]+  about 0 s left", said.err)
    assert re.search(r"ssd-r50 +voc07 +map +100\.00", said.out)


@pytest.mark.usefixtures("toy")
def test_other_settings_are_refused_unless_it_starts_over(run, root):
    call(run, root)
    with pytest.raises(ValueError, match=r"tuning\.lr: 0\.01 before, 0\.02 now.*--again"):
        call(run, root, short(lr=0.02))
    call(run, root, short(num_threads=2))  # changes nothing
    assert len(call(run, root, short(lr=0.02), again=True)) == 2
    assert len((run / "results.jsonl").read_text().splitlines()) == 4


@pytest.mark.usefixtures("toy")
def test_what_cannot_be_done_is_said_in_one_line(run, root, tmp_path):
    with pytest.raises(ValueError, match=r"is at epoch 1 of 5: resume it"):
        call(finished_run(tmp_path / "begun", nn.Linear(1, 1), epochs=5), root)
    with pytest.raises(FileNotFoundError, match="VOC 2012"):
        call(run, root, Transfer("voc", SHORT))
    with pytest.raises(FileNotFoundError, match="COCO: no annotations"):
        call(run, tmp_path, Transfer("coco"))
    with pytest.raises(ValueError, match="limit must be at least 1"):
        Transfer("voc", limit=0)


def test_a_network_of_another_kind_is_refused(run, root, monkeypatch):
    patch_torchvision_ops(monkeypatch)
    with pytest.raises(ValueError, match="not the weights of a ResNet-50"):
        call(run, root)


def test_schedules_keep_their_shape_when_shortened():
    assert schedule("voc") == KINDS["voc"].schedule
    assert schedule("voc", epochs=24).milestones == (16, 20)
    assert schedule("coco", epochs=6, lr=0.1).milestones == (4, 6)


@pytest.mark.slow
def test_the_command_trains_and_scores_the_real_detector(
    root, weights, tmp_path, monkeypatch, capsys
):
    """SSD300 on the ResNet-50 of a run, one step; the second call only reads."""
    patch_torchvision_ops(monkeypatch)
    run = finished_run(tmp_path / "run", weights)
    words = command(run, root, epochs=1, batch_size=1, limit=1)
    for _ in range(2):
        assert main(words) == 0
        assert re.search(r"ssd-r50 +voc07 +map +\d+\.\d\d", capsys.readouterr().out)
    assert len((run / "results.jsonl").read_text().splitlines()) == 2
    state = trained(run).part("model")
    assert "backbone.layer4.2.conv3.weight" in state
    assert state["head.classification_head.module_list.0.weight"].isfinite().all()
