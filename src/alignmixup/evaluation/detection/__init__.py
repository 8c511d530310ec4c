"""Transfer to detection: detectors on a trained backbone, their fine-tuning and their scores."""
