"""Device memory of a step: contents, allocator, peak, and what makes it fit."""
