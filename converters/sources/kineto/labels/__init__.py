"""Label events with module, phase and micro-batch."""
