"""Run a training script unchanged, and end it when the capture is complete."""
