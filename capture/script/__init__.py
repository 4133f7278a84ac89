"""Run a training script unchanged, and end it where the capture is complete."""
