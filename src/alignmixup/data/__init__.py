"""Images with labels: every source by name, and batches of them on the device."""

from alignmixup.data.cub import BoxedFileSet, load_cub, scan_cub
from alignmixup.data.folder import FileSet, load_folder, scan_folder
from alignmixup.data.loader import DeviceLoader, EvalBatches, eval_batches
from alignmixup.data.shapes import (
    SHAPE_NAMES,
    TEXTURE_NAMES,
    ShapesDrawing,
    ShapesTruth,
    draw_shapes,
    shapes,
)
from alignmixup.data.sources import Source, check, fetch, find, load, names
from alignmixup.data.stream import StreamLoader
from alignmixup.data.voc import DetectionSet, concatenate, scan_coco, scan_voc

__all__ = [
    "SHAPE_NAMES",
    "TEXTURE_NAMES",
    "BoxedFileSet",
    "DetectionSet",
    "DeviceLoader",
    "EvalBatches",
    "FileSet",
    "ShapesDrawing",
    "ShapesTruth",
    "Source",
    "StreamLoader",
    "check",
    "concatenate",
    "draw_shapes",
    "eval_batches",
    "fetch",
    "find",
    "load",
    "load_cub",
    "load_folder",
    "names",
    "scan_coco",
    "scan_cub",
    "scan_folder",
    "scan_voc",
    "shapes",
]
