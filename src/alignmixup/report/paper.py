"""The figures published in the AlignMixup paper, as data.

Every table keeps the label it has in the paper (``cls``, ``cls-imgnet``, ``adv``, ...); figures
that stand only in the text have tables of their own (``cls-300``, ``levit``, ``detection``), and
``logs`` holds the medians of the last ten epochs of the authors' own logs, which the paper does
not print. Values are as printed, in percent except where ``METRICS`` says otherwise: an error
stays an error, an accuracy an accuracy, a dash is ``None``.

Names are those of recipe keys: data ``cifar10``, network ``r18``, method ``alignmixup-ae``. A set
of mixed layers is written ``x-A-e``: x the image, A the feature tensor (A2, A4, A8 at a stated
resolution), e its vector embedding, E its tensor embedding, ``musigma`` and ``MSigma`` the pairs
(mu, sigma) and (M, Sigma) of the variational form. ``key_of`` returns the key of the recipe that a
cell is measured with, ``cell_beside`` the cell that a recipe's result stands beside.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from alignmixup.contracts import RecipeKey
from alignmixup.registry import suggestion

Better = Literal["lower", "higher"]


@dataclass(frozen=True, slots=True)
class Published:
    """One cell of one table. The last four fields are empty where the table does not vary them."""

    table: str
    data: str
    network: str
    method: str
    metric: str
    value: float | None
    printed: str = ""  # the value with the decimals of the paper
    note: str = ""
    source: str = ""  # where the out-of-distribution images come from
    layers: str = ""  # the set of mixed layers
    aligned: bool | None = None
    num_iters: int | None = None  # Sinkhorn iterations

    @property
    def top1_error(self) -> float | None:
        """The top-1 error this cell prints, be it as an error or as an accuracy."""
        if self.value is None or self.metric not in ("top1_error", "top1"):
            return None
        # Accuracies have two decimals; so has what is left to a hundred.
        return self.value if self.metric == "top1_error" else round(100 - self.value, 2)


@dataclass(frozen=True, slots=True)
class Metric:
    """How a metric is shown, and which way is better (``None``: neither)."""

    name: str
    unit: str
    better: Better | None


# Rows of the tables, in the order of the paper.
METHODS: Mapping[str, str] = {
    "baseline": "Baseline",
    "acol": "ACoL",
    "adl": "ADL",
    "cutout": "Cutout",
    "input": "Input mixup",
    "cutmix": "CutMix",
    "manifold": "Manifold mixup",
    "puzzlemix": "PuzzleMix",
    "comixup": "Co-Mixup",
    "saliencymix": "SaliencyMix",
    "stylemix": "StyleMix",
    "stylecutmix": "StyleCutMix",
    "alignmixup": "AlignMixup",
    "alignmixup-ae": "AlignMixup/AE",
    "alignmixup-vae": "AlignMixup/VAE",
}
DATA: Mapping[str, str] = {
    "cifar10": "CIFAR-10",
    "cifar100": "CIFAR-100",
    "tiny": "Tiny-ImageNet",
    "imagenet": "ImageNet",
    "cub200": "CUB200-2011",
    "voc07": "Pascal VOC07",
    "coco": "MS-COCO",
}
NETWORKS: Mapping[str, str] = {
    "r18": "R-18",
    "wrn16-8": "WRN16-8",
    "r50": "R-50",
    "vgg": "VGG-GAP",
    "levit-128s": "LeViT-128S",
    "ssd-r50": "SSD R-50",
    "faster-rcnn-r50": "Faster R-CNN R-50",
}
SOURCES: Mapping[str, str] = {
    "lsun-crop": "LSUN (crop)",
    "isun": "iSUN",
    "tiny-crop": "TI (crop)",
    "lsun-resize": "LSUN (resize)",
    "tiny-resize": "TI (resize)",
    "uniform": "Uniform",
    "gaussian": "Gaussian",
}
METRICS: Mapping[str, Metric] = {
    "top1_error": Metric("top-1 error", "%", "lower"),
    "top1": Metric("top-1 accuracy", "%", "higher"),
    "top1_median10": Metric("top-1 accuracy, median of last ten epochs", "%", "higher"),
    "fgsm_error": Metric("FGSM top-1 error", "%", "lower"),
    "pgd_error": Metric("PGD top-1 error", "%", "lower"),
    "det_acc_half": Metric("Det Acc", "%", "higher"),
    "auroc": Metric("AuROC", "%", "higher"),
    "aupr_id": Metric("AuPR (ID)", "%", "higher"),
    "aupr_ood": Metric("AuPR (OOD)", "%", "higher"),
    "top1_loc": Metric("Top-1 loc.", "%", "higher"),
    "maxboxacc_v2": Metric("MaxBoxAccV2", "%", "higher"),
    "ece": Metric("ECE", "%", "lower"),
    "oe": Metric("OE", "%", "lower"),
    "map": Metric("mAP", "%", "higher"),
    "params": Metric("parameters", "M", None),
    "ms_per_batch": Metric("ms/batch", "ms", "lower"),
}
TABLES: Mapping[str, str] = {
    "cls": "Image classification on CIFAR-10/100 and Tiny-ImageNet",
    "cls-imgnet": "Image classification on ImageNet, 300 epochs, with its cost on an RTX 2080 Ti",
    "cls-300": "CIFAR-100 after 300 epochs in place of 2000 (text)",
    "adv": "Robustness: FGSM at 8/255, PGD at 4/255 with steps of 2/255",
    "ood": "Out-of-distribution detection against CIFAR-100",
    "ood_extra": "Out-of-distribution detection, further sources and noise",
    "wsol": "Weakly supervised localization on CUB200-2011",
    "ablation": "Mixed layers, alignment and autoencoder on CIFAR-100",
    "imgnet": "Image classification on ImageNet, 100 epochs",
    "levit": "LeViT-128S on ImageNet, 100 epochs (text)",
    "supp-calibration": "Calibration on CIFAR-100",
    "iterations": "Sinkhorn iterations on CIFAR-100",
    "detection": "Transfer to detection (text)",
    "logs": "The authors' own logs, not printed in the paper",
}


def find(table: str) -> list[Published]:
    """Return every cell of a table, dashes included, in the paper's order."""
    if table not in TABLES:
        raise ValueError(f"the paper has no table {table!r}{suggestion(table, [*TABLES])}")
    return [f for f in FIGURES if f.table == table]


def order(name: str, known: Mapping[str, str]) -> tuple[int, str]:
    """Return a sort key: the paper's order of ``known`` names first, then the alphabet."""
    names = list(known)
    return (names.index(name), "") if name in known else (len(names), name)


_MARKS = {
    "*": "reported by Co-Mixup",
    "+": "reported by PuzzleMix",
    "@": "reported by the method's authors",
    "^": "best test epoch",
    "~": "implied by a difference in the text; not in the table",
    "=": "of table cls; by the text, methods that mix images are best at 300 epochs",
}


def _read(table: str, text: str, **fixed: str) -> list[Published]:
    """Read one table: a line per field that varies over columns, a line per method, dashes empty.

    A row ``method:layers`` names its layers too; a mark behind a figure stands for a note.
    """
    columns: list[dict[str, str]] = []
    figures = []
    for line in text.strip().splitlines():
        head, *cells = line.split()
        if head in Published.__dataclass_fields__:
            columns = columns or [{} for _ in cells]
            for column, cell in zip(columns, cells, strict=True):
                column[head] = cell
            continue
        method, _, layers = head.partition(":")
        for column, cell in zip(columns, cells, strict=True):
            fields = {"method": method, "layers": layers, **fixed, **column}
            figures.append(_figure(table, cell, fields))
    return figures


def _figure(table: str, cell: str, fields: Mapping[str, str]) -> Published:
    note = _MARKS.get(cell[-1], "")
    digits = cell[:-1] if note else cell
    return Published(
        table=table,
        data=fields["data"],
        network=fields["network"],
        method=fields["method"],
        metric=fields["metric"],
        value=None if digits == "--" else float(digits),
        printed=digits,
        note=note or fields.get("note", ""),
        source=fields.get("source", ""),
        layers=fields["layers"],
        aligned=fields["aligned"] == "yes" if "aligned" in fields else None,
        num_iters=int(fields["num_iters"]) if "num_iters" in fields else None,
    )


_CLS = """
data           cifar10 cifar10 cifar100 cifar100 tiny
network        r18     wrn16-8 r18      wrn16-8  r18
baseline       5.19    5.11    23.24    20.63    43.40*
input          4.03    3.98    20.21    19.88    43.48*
cutmix         3.27    3.54    19.37    19.71    43.11*
manifold       2.95    3.56    19.80    19.23    40.76*
puzzlemix      2.93    2.99    20.01    19.25    36.52*
comixup        2.89    3.04    19.81    19.57    35.85*
saliencymix    2.99    3.53    19.69    19.59    34.81
stylemix       3.76    3.89    20.04    20.45    36.13
stylecutmix    3.06    3.12    19.34    19.28    34.49
alignmixup     2.95^   3.09^   18.29^   18.77^   33.13^
alignmixup-ae  2.83    3.15    17.82    18.09    32.73
"""

_CLS_IMGNET = """
metric         params ms_per_batch top1_error
baseline       25     418          23.68
input          25     436          22.58+
cutmix         25     427          21.40+
manifold       25     441          22.50+
puzzlemix      25     846          21.24+
comixup        25     1022         --
saliencymix    25     462          21.26@
stylemix       25     828          --
stylecutmix    25     912          --
alignmixup     25     450          20.68
alignmixup-ae  35     688          18.83
"""

_CLS_300 = """
metric         top1_error
input          20.21=
cutmix         19.37=
manifold       21.64
puzzlemix      20.01=
comixup        19.81=
saliencymix    19.69=
stylemix       20.04=
stylecutmix    19.34=
alignmixup     21.38
"""

_ADV_FGSM = """
data           cifar10 cifar10 cifar100 cifar100 tiny
network        r18     wrn16-8 r18      wrn16-8  r18
baseline       89.41   88.02   87.12    72.81    91.85+
input          78.42   79.21   81.30    67.33    88.68+
cutmix         77.72   78.33   86.96    60.16    88.68+
manifold       77.63   76.11   80.29    56.45    89.25+
puzzlemix      57.11   60.73   78.70    57.77    83.91+
comixup        60.19   58.93   77.61    56.59    --
saliencymix    57.43   68.10   77.79    58.10    81.16
stylemix       79.54   71.05   80.54    67.94    84.93
stylecutmix    58.79   56.12   77.49    56.83    80.59
alignmixup     54.83   56.20   74.18    55.05    78.83
alignmixup-ae  52.13   54.86   76.40    55.44    78.98
"""

_ADV_PGD = """
data           cifar10 cifar10 cifar100 cifar100
network        r18     wrn16-8 r18      wrn16-8
baseline       99.99   99.94   99.97    99.99
input          99.77   99.43   99.96    99.37
cutmix         99.82   98.10   98.67    97.98
manifold       97.22   98.49   99.66    98.43
puzzlemix      97.73   97.00   96.42    95.28
comixup        97.59   96.19   95.35    94.23
saliencymix    97.51   97.04   95.68    93.76
stylemix       98.23   97.46   98.39    98.24
stylecutmix    97.87   96.70   91.88    93.78
alignmixup     95.42   96.71   90.40    92.16
alignmixup-ae  97.16   95.32   91.69    92.23
"""

_FOUR = "det_acc_half auroc aupr_id aupr_ood "

_OOD = f"""
source         {"lsun-crop " * 4}    {"isun " * 4}        {"tiny-crop " * 4}
metric         {_FOUR * 3}
baseline       54.0 47.1 54.5 45.6   66.5 72.3 74.5 69.2   61.2 64.8 67.8 60.6
input          57.5 59.3 61.4 55.2   59.6 63.0 60.2 63.4   58.7 62.8 63.0 62.1
cutmix         63.8 63.1 61.9 63.4   67.0 76.3 81.0 77.7   70.4 84.3 87.1 80.6
manifold       58.9 60.3 57.8 59.5   64.7 73.1 80.7 76.0   67.4 69.9 69.3 70.5
puzzlemix      64.3 69.1 80.6 73.7   73.9 77.2 79.3 71.1   71.8 76.2 78.2 81.9
comixup        70.4 75.6 82.3 70.3   68.6 80.1 82.5 75.4   71.5 84.8 86.1 80.5
saliencymix    68.5 79.7 82.2 64.4   65.6 76.9 78.3 79.8   73.3 83.7 87.0 82.0
stylemix       62.3 64.2 70.9 63.9   61.6 68.4 67.6 60.3   67.8 73.9 71.5 78.4
stylecutmix    70.8 78.6 83.7 74.9   70.6 82.4 83.7 76.5   75.3 82.6 82.9 78.4
alignmixup     74.2 79.9 84.1 75.1   72.8 83.2 84.1 80.3   77.2 85.0 87.8 85.0
alignmixup-ae  76.9 83.5 86.7 79.4   75.6 84.1 85.9 81.7   79.7 88.0 89.7 85.7
"""

_OOD_EXTRA = f"""
source         {"lsun-resize " * 4}  {"tiny-resize " * 4} {"uniform " * 4}      {"gaussian " * 4}
metric         {_FOUR * 4}
baseline       67.6 73.3 76.6 68.9   65.1 70.6 73.1 67.1   58.3 75.3 75.0 69.0   60.8 64.3 62.9 63.9
input          61.5 66.5 66.4 65.8   59.6 63.8 63.0 63.4   50.0 67.9 71.8 71.7   60.2 65.0 63.1 64.1
cutmix         71.3 77.4 79.1 75.5   69.1 79.4 79.8 73.3   74.8 80.0 84.9 72.4   75.7 79.0 84.0 70.9
manifold       67.8 78.9 76.3 71.3   62.5 77.8 76.8 72.2   69.8 75.9 83.2 71.9   70.8 78.8 81.3 71.6
puzzlemix      74.9 79.9 84.0 77.5   73.9 77.3 80.6 71.9   78.6 85.2 86.0 74.4   78.5 85.1 85.9 74.3
comixup        73.8 82.6 86.8 76.9   68.1 78.9 82.5 74.2   80.4 87.6 87.4 75.2   81.6 78.6 89.5 74.2
saliencymix    75.8 79.7 82.2 84.4   75.3 81.2 83.8 79.5   83.1 87.4 89.1 76.6   82.4 85.4 81.1 81.3
stylemix       73.0 74.6 72.4 73.4   72.9 79.5 78.2 74.6   75.3 71.8 77.8 65.5   78.0 75.2 84.3 71.0
stylecutmix    74.3 83.1 86.9 78.9   73.8 80.9 83.1 76.3   84.5 83.2 88.6 78.3   84.8 81.9 83.3 73.9
alignmixup     76.1 84.3 87.1 85.8   74.7 82.6 86.1 80.9   86.9 89.1 93.6 77.7   86.7 87.9 91.8 77.4
alignmixup-ae  77.0 85.8 87.9 83.7   76.2 84.8 87.2 82.3   88.0 90.6 94.0 80.8   86.0 87.2 91.9 75.6
"""

_WSOL = """
metric         top1_loc top1_loc maxboxacc_v2 maxboxacc_v2
network        vgg      r50      vgg          r50
acol           45.9     --       57.4         --
adl            52.4     --       61.3         58.4
baseline       37.1     49.4     59.0         59.7
input          41.7     49.3     57.1         60.6
cutmix         52.5     54.8     62.6         64.8
alignmixup     53.1     56.2     63.8         65.4
"""

_WSOL_TEXT = """
network        vgg      r50
cutout         45.8~    52.4~
"""

_ABLATION = """
aligned                     no     yes
baseline                    76.76  --
manifold                    80.20  --
stylecutmix                 80.66  --
alignmixup:x-e              80.81  --
alignmixup:A                79.07  80.28
alignmixup:e                78.71  --
alignmixup:x-A              80.34  81.71
alignmixup:x-A-E            80.46  81.36
alignmixup:x-A-e            80.33  81.92
alignmixup-ae:x-e           81.92  --
alignmixup-ae:A             79.39  81.04
alignmixup-ae:e             79.49  --
alignmixup-ae:x-A           81.78  81.85
alignmixup-ae:x-E           80.80  81.54
alignmixup-ae:x-A-e         81.61  82.18
alignmixup-ae:x-A2-e        81.47  81.20
alignmixup-ae:x-A4-e        81.61  82.18
alignmixup-ae:x-A8-e        80.49  82.20
alignmixup-vae:x-musigma    81.81  --
alignmixup-vae:x-A          81.35  81.85
alignmixup-vae:x-MSigma     80.45  81.10
alignmixup-vae:x-A-musigma  81.00  81.89
"""

# The text credits all competitors of this table to Co-Mixup, the two style methods included.
_IMGNET = """
metric         top1_error
baseline       24.03*
input          22.97*
manifold       23.30*
cutmix         22.92*
puzzlemix      22.49*
comixup        22.39*
stylemix       24.06*
stylecutmix    22.71*
alignmixup     22.0
"""

_LEVIT = """
metric         top1
baseline       67.4
input          68.3
manifold       67.8
cutmix         68.7
alignmixup     69.9
"""

_CALIBRATION = """
metric         ece    oe
baseline       10.25  1.11
input          18.50  1.42
cutmix         7.60   1.05
manifold       18.41  0.79
puzzlemix      8.22   0.61
comixup        5.83   0.55
saliencymix    5.89   0.59
stylemix       11.43  1.31
stylecutmix    9.30   0.87
alignmixup     5.78   0.41
alignmixup-ae  5.06   0.48
"""

_ITERATIONS = """
num_iters      0      10     20     50     100    200    500    1000
alignmixup     80.98  80.96  81.31  81.42  81.71  81.50  81.34  81.28
"""

_DETECTION = """
data           voc07    coco
network        ssd-r50  faster-rcnn-r50
cutmix         77.6     35.16
alignmixup     78.4     35.84
"""

_LOGS = """
data           cifar10 cifar10 cifar100 cifar100 tiny
network        r18     wrn16-8 r18      wrn16-8  r18
alignmixup     96.89   96.77   81.47    80.18    65.24
"""

_C100 = {"data": "cifar100", "network": "r18"}
_IN50 = {"data": "imagenet", "network": "r50"}

# Every cell of every table, dashes included.
FIGURES: tuple[Published, ...] = (
    *_read("cls", _CLS, metric="top1_error"),
    *_read("cls-imgnet", _CLS_IMGNET, **_IN50),
    *_read("cls-300", _CLS_300, **_C100, note="300 epochs"),
    *_read("adv", _ADV_FGSM, metric="fgsm_error"),
    *_read("adv", _ADV_PGD, metric="pgd_error"),
    *_read("ood", _OOD, **_C100),
    *_read("ood_extra", _OOD_EXTRA, **_C100),
    *_read("wsol", _WSOL, data="cub200"),
    *_read("wsol", _WSOL_TEXT, data="cub200", metric="top1_loc"),
    *_read("ablation", _ABLATION, **_C100, metric="top1"),
    *_read("imgnet", _IMGNET, **_IN50),
    *_read("levit", _LEVIT, data="imagenet", network="levit-128s"),
    *_read("supp-calibration", _CALIBRATION, **_C100),
    *_read("iterations", _ITERATIONS, **_C100, metric="top1"),
    *_read("detection", _DETECTION, metric="map"),
    *_read("logs", _LOGS, metric="top1_median10", note="median of the last ten epochs"),
)

# Schedules that have tables of their own, by the label of their recipes.
_SCHEDULES = {"cls-300": "300", "imgnet": "100"}
_ALIGNED = {(f.method, f.layers) for f in FIGURES if f.aligned and f.value is not None}


def key_of(cell: Published) -> RecipeKey:
    """Return the key of a cell; a set of vectors, with nothing to align, has no ``unaligned``."""
    is_unaligned = cell.aligned is False and (cell.method, cell.layers) in _ALIGNED
    return RecipeKey(cell.data, cell.network, cell.method).labeled(
        _SCHEDULES.get(cell.table, ""),
        cell.layers.replace("-", ""),
        "" if cell.num_iters is None else f"iterations{cell.num_iters}",
        "unaligned" if is_unaligned else "",
    )


# How reports write the labels of variants that the paper's tables vary, in the paper's order.
# The set {x} is not in the paper, but there is a recipe; nor is the alignment study.
LABELS: Mapping[str, str] = {
    **{
        f.layers.replace("-", ""): f"{{{f.layers.replace('-', ', ')}}}" for f in FIGURES if f.layers
    },
    "x": "{x}",
    **{f"iterations{f.num_iters}": f"{f.num_iters} iterations" for f in find("iterations")},
    **{label: label for label in (*_SCHEDULES.values(), "unaligned", "study")},
}
_Where = tuple[str, str, str, frozenset[str], str, str]


def _where(key: RecipeKey, metric: str, source: str) -> _Where:
    labels = frozenset(label for label in key.labels if label in LABELS)
    return key.data, key.network, key.method, labels, metric, source


_CELLS = {
    _where(key_of(f), "top1_error" if f.top1_error is not None else f.metric, f.source): f
    for f in reversed(FIGURES)  # the first table that prints a figure wins
    if f.value is not None
}


def cell_beside(key: RecipeKey, metric: str = "top1_error", source: str = "") -> Published | None:
    """Return the printed cell that a result of this recipe stands beside, if there is one.

    Labels that no table varies, such as ``fast`` or ``bce``, are ignored.
    """
    return _CELLS.get(_where(key, metric, source))
